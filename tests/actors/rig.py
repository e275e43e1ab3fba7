"""The real actors over the loop device and the faulty store, with every order noted and every byte known."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import count
from typing import Any

import anyio
import pytest

from kvcr_actors.assembly import Assembly
from kvcr_actors.config import ControllerConfig
from kvcr_actors.core.inventory import InventoryIndex
from kvcr_actors.core.stats import ControllerStats
from kvcr_actors.errors import ControllerClosedError, KvcrActorsError
from kvcr_actors.messages import BackupAck, Completion, PrefetchCancelled, PrefetchReady, RestoreFinished
from kvcr_actors.ports import EventSink, StoreTraits
from kvcr_actors.ranks.single import SingleRank
from kvcr_actors.runtime.hosts import TaskHost
from kvcr_actors.runtime.supervisor import ActorState, Supervisor
from kvcr_actors.stores.memory import memory_backend
from kvcr_actors.testing.devices import LoopDevice
from kvcr_actors.testing.faults import FaultPlan
from kvcr_actors.testing.host_memory import BytesHostMemory
from kvcr_actors.testing.invariants import OrderBook, check_invariants
from kvcr_actors.testing.store_driver import chain
from kvcr_actors.testing.stores import FaultyStore
from kvcr_actors.testing.virtual_time import VIRTUAL, BackendName, run_virtual
from kvcr_actors.types import BackupNode, CacheLayout, PageKey, PoolSpec, PrefetchRequest, RequestId, RestoreOrder
from tests.planting import PlantedError

LAYOUT = CacheLayout((PoolSpec("kv", 2, 12), PoolSpec("side", 1, 5)))
POOLS = range(len(LAYOUT.pools))
LONG_S = 600.0
"""Beyond every deadline; virtual where a test waits that long."""

DEADLINES = {
    "copy_deadline_s": 4.0,
    "prefetch_deadline_s": 20.0,
    "claim_lifetime_s": 60.0,
    "drain_budget_s": 5.0,
    "failed_read_pause_s": 2.0,
}
TRAITS = StoreTraits(batch_pages=2, read_budget_s=2.0, write_budget_s=3.0)

__all__ = ["LAYOUT", "LONG_S", "PlantedError", "Rig", "chain", "in_time", "page_bytes", "virtual"]


def page_bytes(key: PageKey, pool: int) -> bytes:
    """The bytes that belong to a component."""
    return random.Random(f"{key.hex()}/{pool}").randbytes(LAYOUT.pools[pool].page_bytes)


def virtual(test: Callable[[], Awaitable[None]]) -> Any:
    """Run an async test under both virtual clocks: for tests that wait for deadlines."""

    def run(backend: BackendName) -> None:
        run_virtual(test, backend=backend)

    run.__name__ = test.__name__
    return pytest.mark.parametrize("backend", VIRTUAL)(run)


async def _raise() -> None:
    raise PlantedError("planted")


@contextmanager
def in_time(otherwise: str) -> Generator[None]:
    """AssertionError, and not one of the many timeouts that the product has, if a block takes too long."""
    with anyio.move_on_after(LONG_S) as limit:
        yield
    assert not limit.cancelled_caught, f"{otherwise} within {LONG_S:g} s"


class Rig:
    """An assembly in a task of the test's loop, with its desk; `give` methods note what they ask for."""

    def __init__(
        self,
        *,
        host_slots: int = 16,
        store_pages: int | None = 64,
        device_faults: FaultPlan | None = None,
        store_faults: FaultPlan | None = None,
        store_latency_s: float = 0.0,
        copy_latency_s: float = 0.001,
        late_s: float = 10.0,
        traits: StoreTraits = TRAITS,
        sinks: Sequence[EventSink] = (),
        **config: Any,
    ) -> None:
        settings = {**DEADLINES, "poison_freed_pages": True, "host_reserve_fraction": 0.0, **config}
        self.config = ControllerConfig.from_mapping(settings)
        memory = BytesHostMemory(LAYOUT, host_slots)
        self.device = LoopDevice(
            LAYOUT, 4096, memory, latency_s=copy_latency_s, late_s=late_s, faults=device_faults or FaultPlan()
        )
        self.store: FaultyStore | None = None
        if store_pages is not None:
            self.store = FaultyStore(
                memory_backend(store_pages),
                store_faults or FaultPlan(),
                latency=lambda kind, pages: 0.0 if kind == "lookup" else store_latency_s,
                late_s=late_s,
                traits=traits,
            )
        self.index = InventoryIndex()
        self.assembly = Assembly(
            self.config,
            device=self.device,
            store=self.store,
            ranks=SingleRank(),
            sinks=(self.index, *sinks),
            relay=False,
        )
        self.desk = self.assembly.make_desk()
        self.host = TaskHost(self.assembly.main)
        self.orders = OrderBook()
        self.completions: list[Completion] = []
        self._unread: list[Completion] = []
        self._ids = count(1)
        self._free_page = count(0)
        self.failure: Exception | None = None

    # -- life

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[Rig]:
        """Start; close at the end and keep what the controller failed with in `failure`."""
        await self.start()
        try:
            yield self
        finally:
            with anyio.CancelScope(shield=True):
                await self.close()

    async def start(self) -> None:
        await self.host.start(LONG_S)

    async def close(self) -> None:
        try:
            await self.host.stop(LONG_S)
        except KvcrActorsError as error:
            self.failure = error
        self.take()

    @property
    def stats(self) -> ControllerStats:
        return self.assembly.stats.merged(self.desk.stats)

    def supervisor(self, actor: str) -> Supervisor[Any]:
        assert self.assembly._runtime is not None
        return next(one for one in self.assembly._runtime._supervisors if one.spec.name == actor)

    def take(self) -> list[Completion]:
        """The completions that came since the last call; all are kept."""
        new = self.desk.take()
        self.completions += new
        self._unread += new
        return new

    async def quiet(self) -> None:
        """Until no actor has anything to do; one that was killed has nothing to do any more."""
        assert self.assembly._runtime is not None
        with in_time("not quiet"), suppress(ControllerClosedError):
            await self.assembly._runtime.wait_quiet()
        self.take()

    async def ports_quiet(self) -> None:
        """Until device and store touch no memory."""
        with in_time("ports not quiet"):
            while self.device.describe()["running"] or (self.store is not None and self.store.running):  # noqa: ASYNC110
                await anyio.sleep(0.05)
            await anyio.sleep(0.05)
        self.take()

    def check(self, *, quiet: bool = True) -> None:
        self.take()
        check_invariants(self.assembly, self.orders, self.completions, index=self.index, stats=self.stats, quiet=quiet)

    async def crash(self, actor: str) -> None:
        """Have a task of an actor raise, and wait until its next incarnation lives."""
        supervisor = self.supervisor(actor)
        restarts = supervisor.describe()["restarts"]
        living: Any = supervisor._actor
        living._tasks.start_soon(_raise)
        with anyio.fail_after(LONG_S):
            while supervisor.describe()["restarts"] == restarts or supervisor.state is not ActorState.RUNNING:  # noqa: ASYNC110
                await anyio.sleep(0.01)

    # -- orders

    def node(
        self, keys: Sequence[PageKey], parent: PageKey | None = None, pools: Sequence[int] | None = None
    ) -> BackupNode:
        """A node in fresh device pages that hold the bytes of its keys."""
        chosen = POOLS if pools is None else pools
        ids = [next(self._free_page) for _ in keys]
        for pool in POOLS:
            self.device.load(pool, ids, b"".join(page_bytes(key, pool) for key in keys))
        pages = tuple(tuple(ids) if pool in chosen else (-1,) * len(ids) for pool in POOLS)
        return BackupNode(next(self._ids), tuple(keys), pages, parent)

    def give_step(self, *nodes: BackupNode, fence: object | None = None) -> int:
        for node in nodes:
            self.desk.write(node, flush=False)
        step = self.desk.flush_pending_backups(fence)
        assert step is not None
        self.orders.step(step, nodes)
        return step

    def give_prefetch(self, request_id: RequestId, keys: Sequence[PageKey], device_pages: int = 0) -> None:
        request = PrefetchRequest(request_id, tuple(keys), device_pages)
        self.orders.prefetch(request)
        self.desk.prefetch(request)
        self.desk.flush_pending_backups()

    def give_restore(
        self,
        request_id: RequestId,
        count: int,
        first: int = 0,
        fence: object | None = None,
        device_pages: int | None = None,
    ) -> Sequence[int]:
        ids = [next(self._free_page) for _ in range(count)]
        order = RestoreOrder(request_id, first, tuple(tuple(ids) for _ in POOLS), device_pages)
        self.orders.restore(order)
        self.desk.restore(order)
        self.desk.flush_pending_backups(fence)
        return ids

    def give_cancel(self, request_id: RequestId) -> None:
        self.desk.cancel(request_id)
        self.desk.flush_pending_backups()

    # -- answers

    async def answer(self, matches: Any) -> Any:
        """The first completion that matches; None if the controller ended without one."""
        with in_time("no answer"):
            while True:
                for completion in self._unread:
                    if matches(completion):
                        self._unread.remove(completion)
                        return completion
                if not self.take():
                    if not self.host.is_running:
                        return None
                    with anyio.move_on_after(1.0):
                        await self.assembly.outbox.wait_async()

    async def ack(self, step: int) -> BackupAck | None:
        return await self.answer(lambda one: isinstance(one, BackupAck) and one.step == step)

    async def reply(self, request_id: RequestId) -> PrefetchReady | PrefetchCancelled | RestoreFinished | None:
        kinds = (PrefetchReady, PrefetchCancelled, RestoreFinished)
        return await self.answer(lambda one: isinstance(one, kinds) and one.request_id == request_id)

    def assert_bytes(self, ids: Sequence[int], keys: Sequence[PageKey]) -> None:
        """The device pages hold what belongs to the keys."""
        for pool in POOLS:
            expected = b"".join(page_bytes(key, pool) for key in keys)
            assert self.device.gather(pool, list(ids)) == expected, f"wrong bytes in pool {pool}"

    # -- moves that many tests make

    async def back_up(self, *nodes: BackupNode) -> BackupAck | None:
        return await self.ack(self.give_step(*nodes))

    async def stored(self, keys: Sequence[PageKey]) -> None:
        """Bring a path to the store and out of the host; for rigs without faults so far."""
        await self.back_up(self.node(keys))
        await self.quiet()
        self.forget_host()
        assert self.store is not None
        assert self.store.contents() >= set(keys)

    def forget_host(self) -> None:
        """Evict what may be evicted."""
        self.assembly.host.clear()
        assert self.assembly._state is not None
        self.assembly._state.publish_changes()

    async def prefetched(self, request_id: RequestId, keys: Sequence[PageKey]) -> PrefetchReady:
        self.give_prefetch(request_id, keys)
        answer = await self.reply(request_id)
        assert isinstance(answer, PrefetchReady)
        return answer

    async def restored(self, request_id: RequestId, keys: Sequence[PageKey]) -> RestoreFinished | None:
        """Prefetch a path and restore what stands ready; None if nothing did. Checks the bytes.

        A copy that is never quiet is never answered: None too, after a while.
        """
        self.give_prefetch(request_id, keys)
        answer = await self.reply(request_id)
        if not isinstance(answer, PrefetchReady) or answer.account is not None:
            return None
        ids = self.give_restore(request_id, answer.pages)
        finished = None
        with anyio.move_on_after(100.0):
            finished = await self.reply(request_id)
        if not isinstance(finished, RestoreFinished):
            return None
        self.assert_bytes(ids[: finished.pages], keys[: finished.pages])
        return finished


async def live(rig: Rig, *, wait: bool = True) -> None:
    """A life with every kind of order in it: it ends whatever goes wrong, and asserts no outcome but right bytes."""
    a, b = chain("a", 5), chain("b", 4)
    first = rig.give_step(rig.node(a[:3]), rig.node(a[3:], a[2]))
    second = rig.give_step(rig.node(b))
    await rig.ack(first)
    await rig.ack(second)
    if wait:
        await rig.quiet()
    rig.forget_host()
    await rig.restored("r1", a)
    rig.give_prefetch("r2", b)
    rig.give_prefetch("r3", (*a[:4], *chain("c", 2)))
    rig.give_cancel("r3")
    await rig.reply("r3")
    answer = await rig.reply("r2")
    if isinstance(answer, PrefetchReady) and answer.account is None:
        rig.give_cancel("r2")
        await rig.reply("r2")
    again = rig.give_step(rig.node(b))
    await rig.ack(again)
