"""Requests that are aborted wherever they stand, and completions in any order: everything comes back, once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import permutations
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from kvcr_actors.controller import CacheController
from kvcr_actors.messages import Completion, PrefetchCancelled, PrefetchReady, RestoreFinished
from kvcr_actors.ports import BatchOutcome, PageBatch, PageOutcome
from kvcr_actors.testing.faults import Fault, FaultPlan
from kvcr_actors.testing.host_memory import BytesHostMemory
from kvcr_actors.testing.virtual_time import VIRTUAL, BackendName, run_virtual
from kvcr_actors.transfers import Operation
from kvcr_actors.types import PrefetchRequest, RequestId, RestoreOrder
from tests.actors.cluster import cluster
from tests.actors.rig import LAYOUT, Rig, chain
from tests.doors import Ports

on_both_loops = pytest.mark.parametrize("backend", VIRTUAL)


# Restores.


class NotingMemory(BytesHostMemory):
    """Host memory that lists every (pool, slot) that is freed, and fails if a copy may still read it."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(LAYOUT, rig.device.host.slots)
        self.freed: list[tuple[int, int]] = []
        self._device = rig.device
        rig.device.host = self

    def poison(self, pool: int, slots: Sequence[int]) -> None:
        assert not self._device.describe()["running"], "memory was freed under a copy"
        self.freed.extend((pool, slot) for slot in slots)
        super().poison(pool, slots)


async def abort_a_restore(when: str) -> None:
    rig, keys = Rig(host_slots=4, store_pages=None), chain("a", 3)
    memory = NotingMemory(rig)
    async with rig.running():
        await rig.back_up(rig.node(keys))
        await rig.prefetched("r", keys)
        fence = anyio.Event()
        if when == "before the submit":
            rig.desk.cancel("r")
        ids = rig.give_restore("r", 3, fence=fence)
        await anyio.sleep(0.01)
        if when == "in flight":
            rig.give_cancel("r")
            await anyio.sleep(1)
            rig.forget_host()
            assert rig.assembly.host.contents() == set(keys)
            assert rig.assembly.ledger.open
        fence.set()
        if when == "just finished":
            await anyio.sleep(0.001)  # as long as the copy takes
            rig.give_cancel("r")
        answer = await rig.reply("r")
        if when != "before the submit":  # there the actor that has its turn first decides
            assert isinstance(answer, RestoreFinished)
        if isinstance(answer, RestoreFinished):
            rig.assert_bytes(ids, keys)
        await rig.quiet()
        rig.check()
        rig.forget_host()
        await rig.quiet()
        assert len(memory.freed) == len(set(memory.freed)) == len(LAYOUT.pools) * len(keys)
    rig.check()


@on_both_loops
@pytest.mark.parametrize("when", ["before the submit", "in flight", "just finished"])
def test_scenario_03_an_aborted_restore_frees_each_slot_once_and_only_when_its_copy_is_quiet(
    when: str, backend: BackendName
) -> None:
    run_virtual(partial(abort_a_restore, when), backend=backend)


# Ten thousand aborts at every place where a request can sit.

ABORTS, BURST = 10_000, 100
A = chain("a", 6)
PLACES = (
    "at the desk",
    "in the inbox",
    "in the lookup",
    "in its read",
    "behind another's read",
    "ready",
    "restoring",
    "behind one of its id",
)


class Place:
    """Brings requests to one place, then aborts them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rig = Rig(store_latency_s=0.03, host_slots=32)
        assert self.rig.store is not None
        lookup_s = 0.03 if name == "in the lookup" else 0.0
        self.rig.store._latency = lambda kind, _: lookup_s if kind == "lookup" else 0.03
        self.paths = [A] * BURST
        if name == "in its read":
            self.paths = [A, *(chain(f"other {n}", 2) for n in range(9))] * (BURST // 10)

    async def fill(self) -> None:
        for keys in dict.fromkeys(self.paths):
            await self.rig.stored(keys)
        if self.name in ("ready", "restoring"):
            await self.rig.prefetched("first", A)
            self.rig.give_cancel("first")

    async def burst(self, first: int) -> None:
        rig, wait_s = self.rig, {"in the lookup": 0.01, "in its read": 0.02, "behind another's read": 0.02}
        ids = range(first, first + BURST)
        for request_id, keys in zip(ids, self.paths, strict=True):
            request = PrefetchRequest(request_id, keys)
            rig.orders.prefetch(request)
            rig.desk.prefetch(request)
            if self.name == "at the desk":
                rig.desk.cancel(request_id)
        rig.desk.flush_pending_backups()
        if self.name not in ("at the desk", "in the inbox"):
            await anyio.sleep(wait_s.get(self.name, 0.001))
        if self.name == "restoring":
            for request_id in ids:
                order = RestoreOrder(request_id, 0, ((0, 1, 2, 3, 4, 5),) * len(LAYOUT.pools))
                rig.orders.restore(order)
                rig.desk.restore(order)
            rig.desk.flush_pending_backups()
            await anyio.lowlevel.checkpoint()
        for request_id in ids:
            rig.desk.cancel(request_id)
            if self.name == "behind one of its id":
                rig.desk.prefetch(PrefetchRequest(request_id, A))
                rig.desk.cancel(request_id)
        rig.desk.flush_pending_backups()
        await rig.quiet()
        await rig.ports_quiet()
        if self.name not in ("ready", "restoring"):
            rig.forget_host()
            await rig.quiet()


async def abort_at(name: str) -> None:
    place = Place(name)
    rig = place.rig
    async with rig.running():
        await place.fill()
        for first in range(0, ABORTS, BURST):
            await place.burst(first)
            assert rig.assembly.ledger.open == 0
            assert rig.assembly.host.filling_pages == 0
        if name != "behind one of its id":  # there an id has two answers
            rig.check()
        finished = await rig.restored("last", A)
        assert finished is not None
        assert finished.pages == len(A)
        state = rig.assembly._state
        assert state is not None
        assert not state.prefixes


@pytest.mark.parametrize("place", PLACES)
def test_scenario_15_ten_thousand_requests_aborted_at_one_place_leave_nothing_and_prefetch_is_admitted(
    place: str,
) -> None:
    run_virtual(partial(abort_at, place))


# Completions in any order.


async def complete(order: Sequence[int], gone: Sequence[int]) -> None:
    rig, paths = Rig(), [chain(name, 2) for name in "abc"]
    async with rig.running():
        for keys in paths:
            await rig.stored(keys)
        assert rig.store is not None
        real, held = rig.store.read, list[tuple[Operation[BatchOutcome], Operation[BatchOutcome]]]()

        def hold(batch: PageBatch, request_id: RequestId) -> Operation[BatchOutcome]:
            held.append((real(batch, request_id), Operation()))
            return held[-1][1]

        rig.store.read = hold  # type: ignore[method-assign]
        for number, keys in enumerate(paths):
            rig.give_prefetch(number, keys)
        await anyio.sleep(0.1)
        assert len(held) == len(paths)
        for number in gone:
            rig.give_cancel(number)
        await anyio.sleep(0.1)
        for number in order:
            inner, outer = held[number]
            outer.settle(await inner.outcome())
            outer.settle(BatchOutcome((PageOutcome.FAILED,) * 2, "delivered twice"))
            outer.become_quiet()
            await anyio.sleep(0.01)
        for number, keys in enumerate(paths):
            answer = await rig.reply(number)
            if number in gone:
                assert isinstance(answer, PrefetchCancelled)
                continue
            assert isinstance(answer, PrefetchReady)
            assert answer.pages == 2
            ids = rig.give_restore(number, 2)
            assert isinstance(await rig.reply(number), RestoreFinished)
            rig.assert_bytes(ids, keys)
        await rig.quiet()
        assert rig.assembly.host.contents() == {key for keys in paths for key in keys}, "late pages serve others"
        rig.check()
    rig.check()
    assert rig.stats.prefetch.cancelled == len(gone)


@on_both_loops
@pytest.mark.parametrize("gone", [(), (1,), (0, 1, 2)], ids=["all live", "one is gone", "all are gone"])
def test_scenario_20_reads_that_end_in_any_order_twice_and_after_their_request_is_gone_do_no_harm(
    gone: Sequence[int], backend: BackendName
) -> None:
    for order in permutations(range(3)):
        run_virtual(partial(complete, order, gone), backend=backend)


# Backups alone.

Options = Callable[[], dict[str, Any]]

CONFIGURATIONS: dict[str, Options] = {
    "a host alone": lambda: {"store_pages": None},
    "a host and a store": dict,
    "a store that fails": lambda: {"store_faults": FaultPlan.always(Fault.FAIL, "write"), "deposit_retries": 1},
    "a store that is full": lambda: {"store_pages": 3},
    "a short queue": lambda: {"deposit_queue_pages": 2, "store_latency_s": 0.05},
    "a small host": lambda: {"host_slots": 5},
    "copies that fail": lambda: {"device_faults": FaultPlan.always(Fault.FAIL, "to_host")},
    "a pool that fails": lambda: {"device_faults": FaultPlan.always(Fault.FAIL, "to_host.side")},
    "small inboxes": lambda: {"inbox_limit": 1},
    "without refresh": lambda: {"refresh_store": False},
}
BACKUPS, STEPS = 50, 400
PATH = chain("decoded", BACKUPS)


def above(number: int) -> bytes | None:
    """Several paths of eight pages."""
    return PATH[number - 1] if number % 8 else None


async def decode_only(pools: Sequence[int], options: Options) -> None:
    rig = Rig(**{"host_slots": 16, **options()})
    async with rig.running():
        for number in range(BACKUPS):
            rig.give_step(rig.node(PATH[number : number + 1], above(number), pools))
            await anyio.sleep(0.01)
        steps = 0
        while rig.assembly.ledger.open:
            assert (steps := steps + 1) < STEPS, rig.assembly.ledger.open_claims()
            rig.desk.flush_pending_backups()
            await anyio.sleep(0.01)
        assert rig.assembly.ledger.taken
        await rig.quiet()
        rig.check()
    rig.check()


@pytest.mark.parametrize("pools", [(0, 1), (0,), (1,)], ids=["all pools", "KV alone", "a side pool alone"])
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_scenario_22_backups_without_any_request_give_their_claims_back_in_a_bounded_number_of_steps(
    configuration: str, pools: Sequence[int]
) -> None:
    run_virtual(partial(decode_only, pools, CONFIGURATIONS[configuration]))


async def decode_only_on_ranks() -> None:
    async with cluster(2, by_rank={1: {"host_slots": 6, "copy_s": 0.03}}) as members:
        for number in range(BACKUPS):
            for one in members:
                one.controller._desk.write(one.node(number, PATH[number : number + 1], above(number)))
            await anyio.sleep(0.01)
        steps = 0
        while any(one.controller.claims.open for one in members):
            assert (steps := steps + 1) < STEPS
            await anyio.sleep(0.01)
        assert all(one.controller.claims.taken for one in members)


def test_scenario_22_so_do_backups_on_two_ranks() -> None:
    run_virtual(decode_only_on_ranks)


def test_scenario_22_so_do_backups_of_a_controller_that_its_caller_pumps() -> None:
    ports, acks = Ports(host_slots=16), list[Completion]()
    with CacheController(host="inline", **ports.arguments) as controller:
        for number in range(BACKUPS):
            controller.write(ports.node(PATH[number : number + 1], above(number)))
            controller.pump()
            acks += controller.take()
        steps = 0
        while controller.claims.open or len(acks) < BACKUPS:
            assert (steps := steps + 1) < 50 * STEPS, controller.claims.open_claims()
            controller.wait(0.01)
            acks += controller.take()
        assert controller.claims.taken
