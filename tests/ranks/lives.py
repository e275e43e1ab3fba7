"""What one rank's process is told to do, as plain values: the test writes it, the process reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

AGREEMENT_S = 60.0
"""The deadline of a collective where none may be missed: longer than the patience, so that to wait for it is a hang."""


@attrs.frozen(kw_only=True)
class Life:
    """One controller from its start to its close: how it is made, and what its scheduler loop does step by step.

    `script` has one sequence a step: the name of a method of `controller_worker.Scheduler`, and its arguments.
    """

    group: str = ""
    rank: int = 0
    size: int = 1
    script: Sequence[Sequence[Any]]
    config: Mapping[str, Any] = attrs.field(factory=dict[str, Any])
    host_slots: int = 32
    store: Mapping[str, Any] | None = attrs.field(factory=dict[str, Any])
    """Options of `controller_worker.make_store`; None is no store."""
    loop: str = "asyncio"
    shape: Sequence[int] = (8, 2)
    """Slots and words of a round's table."""
    survivors: int | None = None
    """How many ranks come to the end; None is all."""
    patience_s: float = 30.0
    """What is not answered by then counts as a hang."""
    settle_s: float = 20.0
    """What is quiet only later, and agreements that this rank has left, have this long after the script."""
    planted: str | None = None
    """A fault of `planted_faults` in this process alone."""


def lives(
    size: int, script: Sequence[Sequence[Any]], *, by_rank: Mapping[int, Mapping[str, Any]] | None = None, **common: Any
) -> list[Life]:
    """A life for each of `size` ranks: `script` and `common` for all, `by_rank` for single ones."""
    return [Life(**{"script": script, **common, **(by_rank or {}).get(rank, {})}) for rank in range(size)]


def rotated(orders: Sequence[Sequence[Any]], by: int) -> list[Sequence[Any]]:
    """The same orders, begun elsewhere: ranks get theirs in different order."""
    by %= len(orders)
    return [*orders[by:], *orders[:by]]
