"""Several ranks, each a whole controller over a hybrid model's pools, on one loop under virtual time."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import anyio

from kvcr_actors.aio import AsyncController
from kvcr_actors.config import ControllerConfig
from kvcr_actors.messages import BackupAck, PrefetchReady
from kvcr_actors.ports import EventSink, Ranks, Store, StoreTraits
from kvcr_actors.ranks.single import SingleRank
from kvcr_actors.runtime.supervisor import raising_sole_cause
from kvcr_actors.stores.memory import memory_backend
from kvcr_actors.testing.devices import LoopDevice
from kvcr_actors.testing.faults import FaultPlan
from kvcr_actors.testing.host_memory import BytesHostMemory
from kvcr_actors.testing.ranks import RankHub
from kvcr_actors.testing.stores import FaultyStore
from kvcr_actors.types import (
    NO_SLOT,
    BackupNode,
    CacheLayout,
    PageKey,
    PoolSpec,
    PrefetchRequest,
    RequestId,
    RestoreOrder,
    TrailingPages,
)

HYBRID = CacheLayout(
    (
        PoolSpec("kv", 2, 12),
        PoolSpec("swa", 1, 5, TrailingPages(2)),
        PoolSpec("mamba", 1, 7, TrailingPages(1)),
    )
)
KV, SWA, MAMBA = 0b001, 0b010, 0b100
ALL = KV | SWA | MAMBA
LONG_S = 600.0
TRAITS = StoreTraits(batch_pages=4, read_budget_s=2.0, write_budget_s=3.0)


def page_bytes(rank: int, key: PageKey, pool: int) -> bytes:
    """The bytes that belong to one rank's component: ranks hold shards, each its own."""
    return random.Random(f"{rank}/{key.hex()}/{pool}").randbytes(HYBRID.pools[pool].page_bytes)


class Member:
    """One rank."""

    def __init__(
        self,
        ranks: Ranks,
        *,
        host_slots: int = 32,
        store: Store | int | None = 64,
        store_faults: FaultPlan | None = None,
        device_faults: FaultPlan | None = None,
        copy_s: float = 0.001,
        read_s: float = 0.01,
        sinks: Sequence[EventSink] = (),
        **config: Any,
    ) -> None:
        self.rank = ranks.rank
        self.host_memory = BytesHostMemory(HYBRID, host_slots)
        self.device = LoopDevice(HYBRID, 4096, self.host_memory, latency_s=copy_s, faults=device_faults or FaultPlan())
        if isinstance(store, int):
            self.backend = memory_backend(store)
            store = FaultyStore(
                self.backend,
                store_faults or FaultPlan(),
                latency=lambda kind, pages: read_s if kind == "read" else 0.0,
                traits=TRAITS,
            )
        self.store = store
        settings = {"poison_freed_pages": True, "host_reserve_fraction": 0.0, "agreement_deadline_s": 5.0, **config}
        self.controller = AsyncController(
            ControllerConfig.from_mapping(settings), device=self.device, store=store, ranks=ranks, sinks=sinks
        )
        self._free_page = count(0)

    @property
    def host(self) -> Any:
        return self.controller._assembly.host

    def node(
        self, node_id: int, keys: Sequence[PageKey], parent: PageKey | None = None, masks: int | Sequence[int] = ALL
    ) -> BackupNode:
        """A node in fresh device pages; `masks` are the pools of all pages, or of each."""
        every = [masks] * len(keys) if isinstance(masks, int) else masks
        ids = [next(self._free_page) for _ in keys]
        for pool in range(3):
            self.device.load(pool, ids, b"".join(page_bytes(self.rank, key, pool) for key in keys))
        pages = tuple(
            tuple(page if mask >> pool & 1 else NO_SLOT for page, mask in zip(ids, every, strict=True))
            for pool in range(3)
        )
        return BackupNode(node_id, tuple(keys), pages, parent)

    async def back_up(self, *nodes: BackupNode) -> BackupAck:
        return await self.controller.backup(nodes, timeout_s=LONG_S)

    async def prefetch(self, request_id: RequestId, keys: Sequence[PageKey], **more: Any) -> PrefetchReady:
        return await self.controller.prefetch(PrefetchRequest(request_id, tuple(keys), **more), LONG_S)

    async def restore(self, request_id: RequestId, keys: Sequence[PageKey], masks: Sequence[int] | None = None) -> None:
        """Restore a ready prefix and check every byte of the pools in `masks` (all where it is None)."""
        ids = [next(self._free_page) for _ in keys]
        done = await self.controller.restore(RestoreOrder(request_id, 0, (tuple(ids),) * 3), timeout_s=LONG_S)
        assert done.account is not None
        for index, (page, key) in enumerate(zip(ids, keys, strict=True)):
            for pool in range(3):
                if (ALL if masks is None else masks[index]) >> pool & 1:
                    assert self.device.gather(pool, [page]) == page_bytes(self.rank, key, pool), (index, pool)

    def forget_host(self) -> None:
        self.host.clear()
        state = self.controller._assembly._state
        assert state is not None
        state.publish_changes()

    async def store_away(self, node_id: int, keys: Sequence[PageKey], masks: int | Sequence[int] = ALL) -> BackupAck:
        """Bring a path to the store and out of the host."""
        ack = await self.back_up(self.node(node_id, keys, masks=masks))
        await self.controller.wait_quiet(LONG_S)
        self.forget_host()
        return ack

    def check_baseline(self) -> None:
        """Nothing is held, claimed, pinned or half filled."""
        claims = self.controller.claims
        assert claims.open == 0, claims.open_claims()
        assert (claims.quarantined, claims.quarantined_bytes, claims.refused) == (0, 0, 0)
        self.host.check()
        assert self.host.filling_pages == 0
        pages = [self.host.get(key) for key in self.host.contents()]
        assert not [page for page in pages if page.pins]


@asynccontextmanager
async def single(**options: Any) -> AsyncGenerator[Member]:
    """A controller without other ranks; at its end nothing is left."""
    member = Member(SingleRank(), **options)
    await member.controller.start(LONG_S)
    try:
        yield member
        await member.controller.wait_quiet(LONG_S)
        member.check_baseline()
    finally:
        with anyio.CancelScope(shield=True):
            await member.controller.close(LONG_S)
    member.check_baseline()


@asynccontextmanager
async def cluster(
    size: int = 2, *, hub: RankHub | None = None, by_rank: Mapping[int, Mapping[str, Any]] | None = None, **common: Any
) -> AsyncGenerator[list[Member]]:
    """`size` ranks; `by_rank` has options of single ones. At the end nothing is left on any of them."""
    hub = hub or RankHub(size, deadline_s=5.0)
    members = [Member(one, **{**common, **(by_rank or {}).get(one.rank, {})}) for one in hub.ranks]
    with raising_sole_cause():
        async with hub.running():
            for one in members:
                await one.controller.start(LONG_S)
            try:
                yield members
                for one in members:
                    if one.controller._host.is_running:
                        await one.controller.wait_quiet(LONG_S)
                        one.check_baseline()
                assert not any(len(one.table) for one in hub.ranks)
            finally:
                with anyio.CancelScope(shield=True):
                    for one in members:
                        await one.controller.close(LONG_S)
            for one in members:
                one.check_baseline()


async def on_all(*calls: Any) -> list[Any]:
    """Await coroutines side by side."""
    results: list[Any] = [None] * len(calls)

    async def run(index: int) -> None:
        results[index] = await calls[index]

    async with anyio.create_task_group() as tasks:
        for index in range(len(calls)):
            tasks.start_soon(run, index)
    return results
