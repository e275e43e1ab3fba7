"""What must hold of every rank of a simulated cluster, and of all of them together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvcr_actors.core.inventory import InventoryIndex
from kvcr_actors.simulation.orders import check_bytes
from kvcr_actors.simulation.pages import POOLS, SIZES
from kvcr_actors.testing.invariants import check_invariants
from kvcr_actors.testing.ranks import Verdict
from kvcr_actors.types import NO_SLOT

if TYPE_CHECKING:
    from kvcr_actors.simulation.member import Life


class ViolationError(AssertionError):
    """A rule that every run must keep was broken; the message names the rule and what broke it."""


def check_life(rank: int, life: Life, index: InventoryIndex, *, quiet: bool) -> None:
    """Claims, slots, answers, accounts and events of one controller, and every byte in its host memory."""
    stats = life.assembly.stats.merged(life.desk.stats)
    check_invariants(life.assembly, life.orders, life.completions, index=index, stats=stats, quiet=quiet)
    check_host_bytes(rank, life)


def check_host_bytes(rank: int, life: Life) -> None:
    """Each page that stands ready in host memory holds its own bytes, and hangs from a page that is ready."""
    for page in life.assembly.host.snapshot():
        if not page.ready:
            continue
        if page.parent is not None and not page.parent.ready:
            raise ViolationError(f"rank {rank}: page {page.key.hex()[:8]} is ready in host memory, its parent is not")
        for pool in POOLS:
            slot = page.slots[pool]
            if slot != NO_SLOT:
                start = slot * SIZES[pool]
                found = life.memory.buffer(pool)[start : start + SIZES[pool]]
                check_bytes(rank, pool, page.key, life.generation, found, "in host memory")


def check_equal_prefixes(request_id: int, ready: Mapping[int, int]) -> None:
    """Every rank that holds a request's prefix holds the same length of it."""
    if len(set(ready.values())) > 1:
        raise ViolationError(f"request {request_id}: ranks hold prefixes of different lengths: {dict(ready)}")


def check_current(rank: int, request_id: int, generation: int, reset_to: int) -> None:
    """After a reset is over, no page that was computed or asked for before it is handed out."""
    if generation < reset_to:
        raise ViolationError(
            f"rank {rank}: request {request_id} of generation {generation} was given pages after the reset to "
            f"{reset_to}"
        )


def check_equal_nodes(node_id: int, done: Sequence[bool]) -> None:
    """A node is on the host of all ranks, or of none."""
    if len(set(done)) > 1:
        raise ViolationError(f"node {node_id}: backed up on some ranks only: {list(done)}")


def check_verdicts(verdicts: Iterable[Verdict]) -> None:
    """In one round an operation ends with the same bits on every rank, or with none."""
    agreed: dict[tuple[int, object], int] = {}
    for verdict in verdicts:
        if verdict.bits and agreed.setdefault((verdict.round, verdict.operation), verdict.bits) != verdict.bits:
            raise ViolationError(f"{verdict.operation} ended with different bits on different ranks")


def check_same_operations(verdicts: Iterable[Verdict], ranks: int) -> None:
    """Every rank opened the same operations, equally often; for runs in which no controller and no actor began anew."""
    opened: dict[object, Counter[int]] = {}
    for verdict in verdicts:
        opened.setdefault(verdict.operation, Counter())[verdict.rank] += 1
    for operation, counts in opened.items():
        if len(counts) < ranks or len(set(counts.values())) > 1:
            raise ViolationError(f"{operation} was not opened alike on every rank: {dict(counts)} times by rank")
