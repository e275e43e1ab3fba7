"""Several replicas with a cache each, behind a router: what placement does to hits.

Round-robin spreads every conversation over all replicas, so each keeps a copy of what all share and misses what it
served elsewhere. A router that is aware of caches sends a request where most of its prefix lies, unless that replica
has had more than its share of pages; it knows the caches exactly, as an index kept from events does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import attrs

from kvcr_actors.errors import ConfigError
from kvcr_actors.lab.simulate import SimulatedTier
from kvcr_actors.lab.workload import Workload
from kvcr_actors.types import Eviction, PageKey

Router = Literal["round-robin", "aware"]
ROUTERS: Final[tuple[Router, ...]] = ("round-robin", "aware")
_OVERLOAD = 1.25
"""A replica that had this many times its share of pages is sent nothing for its cache's sake."""


@attrs.frozen
class Placement:
    """Hits of all replicas under one router, and the busiest replica's load as a multiple of the mean."""

    router: Router
    replicas: int
    capacity_pages: int
    hits: int
    pages: int
    busiest: float


def place(work: Workload, replicas: int, capacity: int, router: Router, eviction: Eviction) -> Placement:
    """Serve a trace by `replicas` replicas of `capacity` pages each."""
    if replicas < 1:
        raise ConfigError(f"replicas: {replicas}: requests need one to go to; give 1 or more")
    tiers = [SimulatedTier(eviction, capacity) for _ in range(replicas)]
    loads = [0] * replicas
    hits = 0
    for number, keys in enumerate(work.keys):
        chosen = number % replicas if router == "round-robin" else _aware(tiers, loads, keys)
        hits += tiers[chosen].ask(keys)
        loads[chosen] += len(keys)
    return Placement(router, replicas, capacity, hits, work.pages, max(loads) * replicas / work.pages)


def _aware(tiers: Sequence[SimulatedTier], loads: Sequence[int], keys: Sequence[PageKey]) -> int:
    """The replica that has most of a prefix, the least loaded of equals."""
    limit = _OVERLOAD * (sum(loads) + len(keys)) / len(loads)
    found = [tier.would_find(keys) if load <= limit else -1 for tier, load in zip(tiers, loads, strict=True)]
    return max(range(len(tiers)), key=lambda index: (found[index], -loads[index]))
