"""What the engine asks of one rank in one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import anyio
import attrs

from kvcr_actors.desk import EngineDesk
from kvcr_actors.ports import Store
from kvcr_actors.simulation.pages import POOLS, SIZES, page_bytes
from kvcr_actors.testing.invariants import OrderBook
from kvcr_actors.types import NO_SLOT, BackupNode, PageKey, PrefetchRequest, RestoreOrder

_SCRATCH = b"\x5c"


@attrs.frozen
class Reset:
    """A reset in the middle of a step: how many of the step's nodes, requests and restores come before it."""

    generation: int
    """Of the pages that are computed from now on; the order's label."""
    exchanges: bool
    """Whether another store takes the place of the one that is attached, which is cleared otherwise."""
    nodes: int
    requests: int
    restores: int


@attrs.define
class StepOrders:
    """The orders of a step, the same on every rank, and the kernels that run before its fence."""

    nodes: list[BackupNode] = attrs.field(factory=list[BackupNode])
    requests: list[PrefetchRequest] = attrs.field(factory=list[PrefetchRequest])
    restores: list[RestoreOrder] = attrs.field(factory=list[RestoreOrder])
    cancels: list[int] = attrs.field(factory=list[int])
    stops: list[int] = attrs.field(factory=list[int])
    computed: list[tuple[int, PageKey, int, int]] = attrs.field(factory=list[tuple[int, PageKey, int, int]])
    """Device pages that a kernel of this step writes: (page, key, pools, generation)."""
    reset: Reset | None = None

    @property
    def size(self) -> int:
        """How many orders they are."""
        orders = (self.nodes, self.requests, self.restores, self.cancels, self.stops)
        return sum(map(len, orders)) + (self.reset is not None)

    def kernel_writes(self, rank: int) -> list[tuple[int, int, bytes]]:
        """What the step's kernels write as (pool, page, bytes); pages to be restored are their scratch space."""
        scratch = {page for order in self.restores for pages in order.pages for page in pages} - {NO_SLOT}
        writes = [(pool, page, _SCRATCH * SIZES[pool]) for page in sorted(scratch) for pool in POOLS]
        for page, key, mask, generation in self.computed:
            writes += [(pool, page, page_bytes(rank, key, pool, generation)) for pool in POOLS if mask >> pool & 1]
        return writes

    def give(
        self, desk: EngineDesk, book: OrderBook, fence: anyio.Event | None, new_store: Callable[[], Store | None]
    ) -> int | None:
        """Hand everything to a rank's desk as one step, and note it; returns the step's number, if it has nodes."""
        reset, nodes, requests, restores = self.reset, 0, 0, 0
        if reset is not None:
            nodes, requests, restores = reset.nodes, reset.requests, reset.restores
            self._queue(desk, book, slice(nodes), slice(requests), slice(restores))
            book.resets.append(reset.generation)
            store = new_store() if reset.exchanges else None
            desk.forget(reset.generation, clear=store is None, store=store)
        self._queue(desk, book, slice(nodes, None), slice(requests, None), slice(restores, None))
        for request_id in self.cancels:
            desk.cancel(request_id)
        for request_id in self.stops:
            desk.stop_prefetch(request_id)
        step = desk.flush_pending_backups(fence)
        book.step(step, self.nodes)
        return step

    def _queue(self, desk: EngineDesk, book: OrderBook, nodes: slice, requests: slice, restores: slice) -> None:
        desk.write_all(self.nodes[nodes])
        for request in self.requests[requests]:
            book.prefetch(request)
            desk.prefetch(request)
        for order in self.restores[restores]:
            book.restore(order)
            desk.restore(order)

    def words(self) -> Iterator[str]:
        """The orders for people."""
        for node in self.nodes:
            yield f"write node {node.node_id} of {len(node.keys)} pages"
        for request in self.requests:
            yield f"prefetch {request.request_id} of {len(request.keys)} pages from {request.device_pages}"
        for order in self.restores:
            yield f"restore {order.request_id} pages {order.first}..{order.first + order.count}"
        yield from (f"cancel {request_id}" for request_id in self.cancels)
        yield from (f"stop {request_id}" for request_id in self.stops)
        if self.reset is not None:
            yield f"reset to generation {self.reset.generation}, after {self.reset.nodes} nodes of the step"


def check_bytes(rank: int, pool: int, key: PageKey, generation: int, found: bytes | memoryview, where: str) -> None:
    """AssertionError unless a component's bytes are those of its page, computed in a generation."""
    if found == page_bytes(rank, key, pool, generation):
        return
    for older in range(generation):
        if found == page_bytes(rank, key, pool, older):
            raise AssertionError(
                f"bytes of generation {older} {where}, after the reset to {generation}: rank {rank}, pool {pool}, page "
                f"{key.hex()[:8]}"
            )
    raise AssertionError(f"wrong bytes {where}: rank {rank}, pool {pool}, page {key.hex()[:8]}")


def check_all_bytes(
    rank: int, key: PageKey, generation: int, mask: int, found: Sequence[bytes | memoryview], where: str
) -> None:
    """Check a page's components in the pools of `mask`."""
    for pool in POOLS:
        if mask >> pool & 1:
            check_bytes(rank, pool, key, generation, found[pool], where)
