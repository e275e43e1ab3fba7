"""The mover's front door over the real devices: one submit a direction and step, one ack when all is quiet."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence

import anyio
import numpy as np
import pytest
import torch

from kvcr_actors import (
    NO_SLOT,
    CacheLayout,
    ConfigError,
    CpuDevice,
    CpuFence,
    DeadlineError,
    InvalidNodeError,
    PoolSpec,
)
from kvcr_actors.core.copy_plan import CopyPlan, Direction
from kvcr_actors.devices.cuda import CopyEngine
from kvcr_actors.devices.foreign_host import ForeignHostPools
from kvcr_actors.devices.host_memory import HostPools
from kvcr_actors.devices.row_mover import PlaneTable, TorchMover
from kvcr_actors.movers.mover import PageMover
from kvcr_actors.movers.orders import MoveAck, MoveFailure, MoveOrder, MoverFailed
from kvcr_actors.ports import CopyOutcome
from kvcr_actors.testing.services import open_services
from kvcr_actors.transfers import Operation
from tests.devices.engine_bench import RING
from tests.devices.harness import random_bytes
from tests.devices.scheduled_runtime import ScheduledRuntime

LAYOUT = CacheLayout((PoolSpec("kv", 4, 256), PoolSpec("swa", 6, 256), PoolSpec("mamba", 2, 4096)))
PAGES, SLOTS = 200, 150
POOLS = range(3)
DOORS = [("thread", "asyncio"), ("thread", "trio"), ("inline", "asyncio")]
OUT, BACK = Direction.TO_HOST, Direction.TO_DEVICE


class Counted(CpuDevice):
    """Notes each plan."""

    plans: list[CopyPlan]

    def submit(self, plan: CopyPlan, fences: Sequence[object] = ()) -> Operation[CopyOutcome]:
        self.plans.append(plan)
        return super().submit(plan, fences)


def cpu_device(**options: float) -> Counted:
    device = Counted(LAYOUT, PAGES, HostPools(LAYOUT, SLOTS), **options)  # type: ignore[arg-type]
    device.plans = []
    for pool in POOLS:
        device.pool_view(pool).copy_(random_bytes(device.pool_view(pool).shape))
    return device


def pages_of(device: CpuDevice, pool: int) -> torch.Tensor:
    return device.gather(pool, range(device.pages_of(pool)))


def slots_of(device: CpuDevice, pool: int) -> torch.Tensor:
    return torch.cat([view.flatten(1) for view in device.host.views(pool)], dim=1)


def acks(mover: PageMover, count: int = 1) -> list[MoveAck]:
    found: list[MoveAck] = []
    end = time.monotonic() + 10
    while len(found) < count and time.monotonic() < end:
        mover.wait(0.5)
        for one in mover.take():
            assert isinstance(one, MoveAck), one
            found.append(one)
    assert len(found) == count
    return found


@pytest.fixture(params=DOORS, ids="-".join)
def door(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param


def open_mover(device: CpuDevice | CopyEngine, door: tuple[str, str], **options: float) -> PageMover:
    return PageMover(device, host=door[0], loop=door[1], **options)  # type: ignore[arg-type]


def test_a_steps_orders_are_one_submit_and_one_ack(door: tuple[str, str]) -> None:
    device = cpu_device()
    with open_mover(device, door) as mover:
        fence = CpuFence()
        for node in range(64):
            pages = ((node, node + 64), (NO_SLOT, node), (NO_SLOT, node + 100))
            slots = ((2 * node, 2 * node + 1), (NO_SLOT, node), (NO_SLOT, node))
            mover.move(MoveOrder(node, OUT, pages, slots))
        late = [random_bytes((PAGES, spec.page_bytes)) for spec in LAYOUT.pools]
        step = mover.flush(fence)
        for pool in POOLS:
            device.load(pool, range(PAGES), late[pool])
        fence.set()
        (ack,) = acks(mover)
        assert ack == MoveAck(step, OUT, tuple(range(64)), (), ack.bytes)
        assert ack.bytes == 128 * 1024 + 64 * 1536 + 64 * 8192
        assert len(device.plans) == 1
        for node in range(64):
            assert torch.equal(slots_of(device, 0)[2 * node : 2 * node + 2], late[0][[node, node + 64]])
            assert torch.equal(slots_of(device, 1)[node], late[1][node])
            assert torch.equal(slots_of(device, 2)[node], late[2][node + 100])
        assert mover.flush(fence) is None


def test_both_directions_of_a_step_are_one_submit_each_and_each_has_an_ack(door: tuple[str, str]) -> None:
    device = cpu_device()
    with open_mover(device, door) as mover:
        before = slots_of(device, 0).clone(), pages_of(device, 0).clone()
        mover.move(MoveOrder("out", OUT, ([1], [], []), ([2], [], [])))
        mover.move(MoveOrder("back", BACK, ([3], [], []), ([4], [], [])))
        mover.move(MoveOrder("out too", OUT, ([5], [], []), ([6], [], [])))
        step = mover.flush()
        found = {ack.direction: ack for ack in acks(mover, 2)}
        assert found[OUT] == MoveAck(step, OUT, ("out", "out too"), (), 2048)
        assert found[BACK] == MoveAck(step, BACK, ("back",), (), 1024)
        assert sorted(plan.direction.value for plan in device.plans) == ["to_device", "to_host"]
        assert torch.equal(slots_of(device, 0)[[2, 6]], before[1][[1, 5]])
        assert torch.equal(pages_of(device, 0)[3], before[0][4])


def test_what_an_engine_does_to_its_lists_changes_nothing(door: tuple[str, str]) -> None:
    device = cpu_device()
    with open_mover(device, door) as mover:
        kinds = [[1, 2], np.array([3, 4]), np.array([5, 6], np.int32), torch.tensor([7, 8]), torch.tensor([9, 10])[:2]]
        slots: list[object] = [[0, 1], np.array([2, 3]), (4, 5), torch.tensor([6, 7], dtype=torch.int32), range(8, 10)]
        for number, (pages, into) in enumerate(zip(kinds, slots, strict=True)):
            mover.move(MoveOrder(number, OUT, (pages, (), ()), (into, (), ())))
            for given in (pages, into):
                if not isinstance(given, tuple | range):
                    given[0] = 99  # type: ignore[index]
        mover.flush()
        assert acks(mover)[0].done == (0, 1, 2, 3, 4)
        assert torch.equal(slots_of(device, 0)[:10], pages_of(device, 0)[1:11])


def test_a_malformed_order_costs_no_other_its_copy(door: tuple[str, str]) -> None:
    device = cpu_device()
    with open_mover(device, door) as mover:
        mover.move(MoveOrder("good", OUT, ([1], [2], [3]), ([1], [2], [3])))
        mover.move(MoveOrder("page", OUT, ([1, PAGES], [], []), ([4, 5], [], [])))
        mover.move(MoveOrder("slot", OUT, ([1], [1], []), ([6], [SLOTS], [])))
        mover.move(MoveOrder("twice", OUT, ([9], [], []), ([1], [], [])))
        step = mover.flush()
        (ack,) = acks(mover)
        assert ack.step == step
        assert ack.done == ("good",)
        assert {one.order_id: dict(one.pools) for one in ack.failed} == {
            "page": {"kv": "device page 200 is not one of the 200 of pool kv"},
            "slot": {"swa": "host slot 150 is not one of the 150 of pool swa"},
            "twice": {"kv": "host slot 1 of pool kv is written twice in one step"},
        }
        assert torch.equal(slots_of(device, 0)[1], pages_of(device, 0)[1])
        assert not slots_of(device, 0)[[4, 6]].any()


def test_orders_fail_by_pool_and_id_and_only_those_that_use_it(door: tuple[str, str]) -> None:
    class Half(Counted):
        def submit(self, plan: CopyPlan, fences: Sequence[object] = ()) -> Operation[CopyOutcome]:
            operation = Operation[CopyOutcome]()
            super().submit(plan, fences).when_settled(
                lambda outcome: operation.settle(CopyOutcome(outcome.bytes, failed={1: "the DMA failed"}))
            )
            return operation

    device = Half(LAYOUT, PAGES, HostPools(LAYOUT, SLOTS))
    device.plans = []
    with open_mover(device, door) as mover:
        mover.move(MoveOrder(1, OUT, ([1], [1], []), ([1], [1], [])))
        mover.move(MoveOrder(2, OUT, ([2], [], [2]), ([2], [], [2])))
        mover.flush()
        (ack,) = acks(mover)
        assert ack.done == (2,)
        assert ack.failed == (MoveFailure(1, {"swa": "the DMA failed"}),)


def test_an_ack_waits_until_the_memory_is_quiet(door: tuple[str, str]) -> None:
    class Late(Counted):
        held: Operation[CopyOutcome]

        def submit(self, plan: CopyPlan, fences: Sequence[object] = ()) -> Operation[CopyOutcome]:
            self.held = Operation[CopyOutcome]()
            self.held.settle(CopyOutcome(0, failed={0: "given up while it ran"}), quiet=False)
            return self.held

    device = Late(LAYOUT, PAGES, HostPools(LAYOUT, SLOTS))
    device.plans = []
    with open_mover(device, door) as mover:
        mover.move(MoveOrder(1, OUT, ([1], [], []), ([1], [], [])))
        mover.flush(urgent=True)
        assert not mover.wait(0.05)
        services = mover._bell
        assert services is not None
        services.post(lambda: device.held.become_quiet())
        assert acks(mover)[0].failed == (MoveFailure(1, {"kv": "given up while it ran"}),)


def test_a_layer_is_waited_for_from_the_flush_on(door: tuple[str, str]) -> None:
    device = cpu_device()
    with open_mover(device, door) as mover:
        device.host.views(0)[0].copy_(random_bytes(device.host.views(0)[0].shape))
        mover.wait_layer(0)
        fence = CpuFence()
        mover.move(MoveOrder(1, BACK, ([7], [], []), ([3], [], [])))
        mover.flush(fence)
        with pytest.raises(DeadlineError, match="layer 2: 1 restores"):
            mover.wait_layer(2, deadline_s=0.05)
        fence.set()
        mover.wait_layer(2, deadline_s=5)
        assert torch.equal(pages_of(device, 0)[7], slots_of(device, 0)[3])
        assert acks(mover)[0].done == (1,)


def test_steps_beyond_the_limit_fail_at_once_and_nothing_waits() -> None:
    device = cpu_device()
    mover = PageMover(device, host="inline", limit=2)
    with mover:
        for number in range(4):
            mover.move(MoveOrder(number, OUT, ([number], [], []), ([number], [], [])))
            mover.flush()
        refused = mover.take()
        assert [one.failed[0].order_id for one in refused if isinstance(one, MoveAck)] == [2, 3]
        assert "queue_full" in refused[0].failed[0].pools["kv"]  # type: ignore[union-attr]
        assert [ack.done for ack in acks(mover, 2)] == [(0,), (1,)]


def test_a_close_waits_for_what_runs_and_says_what_does_not_end(door: tuple[str, str]) -> None:
    device = cpu_device(fence_deadline_s=20.0)
    mover = open_mover(device, door, drain_budget_s=0.2).start()
    fence = CpuFence()
    mover.move(MoveOrder(1, OUT, ([1], [], []), ([1], [], [])))
    mover.flush(fence)
    with pytest.raises(DeadlineError, match="1"):
        mover.close()
    fence.set()


def test_orders_after_the_end_are_answered(door: tuple[str, str]) -> None:
    device = cpu_device()
    mover = open_mover(device, door)
    with mover:
        pass
    mover.move(MoveOrder(1, OUT, ([1], [], []), ([1], [], [])))
    mover.flush()
    (ack,) = mover.take()
    assert isinstance(ack, MoveAck)
    assert "stopped" in ack.failed[0].pools["kv"]


def test_a_failure_is_the_last_word_and_every_open_order_has_its_answer(door: tuple[str, str]) -> None:
    class Raises(Counted):
        def submit(self, plan: CopyPlan, fences: Sequence[object] = ()) -> Operation[CopyOutcome]:
            raise RuntimeError("planted")

    device = Raises(LAYOUT, PAGES, HostPools(LAYOUT, SLOTS))
    mover = open_mover(device, door).start()
    for number in range(2):
        mover.move(MoveOrder(number, OUT, ([1], [], []), ([1], [], [])))
        mover.flush()
    seen: list[object] = []
    end = time.monotonic() + 5
    while not any(isinstance(one, MoverFailed) for one in seen) and time.monotonic() < end:
        mover.wait(0.2)
        seen += mover.take()
    assert isinstance(seen[-1], MoverFailed)
    assert {one.failed[0].order_id for one in seen[:-1] if isinstance(one, MoveAck)} == {0, 1}
    with pytest.raises(RuntimeError, match="planted"):
        mover.close()


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (([1], OUT, ([], [], []), ([], [], [])), "hashable"),
        ((1, "out", ([], [], []), ([], [], [])), "direction"),
        ((1, OUT, ([], []), ([], [], [])), "2 page lists and 3 slot lists"),
        ((1, OUT, ([1], [], []), ([], [], [])), "pool 0 lists 1 pages and 0 slots"),
        ((1, OUT, ([None], [], []), ([1], [], [])), "None is not an int"),
        ((1, OUT, ([True], [], []), ([1], [], [])), "True is not an int"),
        ((1, OUT, ([1 << 63], [], []), ([1], [], [])), "does not fit 64 bits"),
        ((1, OUT, (np.array([1 << 63], np.uint64), [], []), ([1], [], [])), "does not fit 64 bits"),
        ((1, OUT, (np.array([1.0]), [], []), ([1], [], [])), "integers in one dimension"),
        ((1, OUT, (torch.tensor([[1]]), [], []), ([1], [], [])), "integers in one dimension"),
        ((1, OUT, (5, [], []), ([1], [], [])), "give ints, a numpy array or a tensor"),
    ],
)
def test_a_malformed_order_is_refused_before_it_is_queued(order: tuple[object, ...], words: str) -> None:
    with pytest.raises(InvalidNodeError, match=words):
        MoveOrder(*order)  # type: ignore[arg-type]


def test_an_order_names_every_pool() -> None:
    mover = PageMover(cpu_device(), host="inline")
    with pytest.raises(InvalidNodeError, match="order 1 lists 1 pools; the layout has 3"):
        mover.move(MoveOrder(1, OUT, ([1],), ([1],)))
    mover.close()
    with pytest.raises(ConfigError, match="host 'x'"):
        PageMover(cpu_device(), host="x")  # type: ignore[arg-type]


class EngineRig:
    """The CUDA device's path without a GPU, over foreign, chunked, layer-first host memory."""

    def __init__(self, seed: int) -> None:
        self.runtime = ScheduledRuntime(seed)
        self.planes = [[random_bytes((PAGES, spec.plane_bytes)) for _ in range(spec.planes)] for spec in LAYOUT.pools]
        self.runs = [random_bytes((spec.planes, SLOTS, spec.plane_bytes)) for spec in LAYOUT.pools]
        borders: list[int] = []
        for run in self.runs:
            for at in range(0, run.nbytes, 7000):
                self.runtime.register(run.data_ptr() + at, min(7000, run.nbytes - at))
                borders.append(run.data_ptr() + at)
        host = ForeignHostPools(LAYOUT, [run.unbind(0) for run in self.runs], borders=borders, registered=True)
        self.device = CopyEngine(
            LAYOUT,
            self.planes,
            host,
            self.runtime,
            staging_bytes=8 * RING,
            index_bytes=64 << 10,
            mover=TorchMover(PlaneTable(LAYOUT, self.planes)),
        )

    def page(self, pool: int, page: int) -> torch.Tensor:
        return torch.cat([plane[page] for plane in self.planes[pool]])

    def slot(self, pool: int, slot: int) -> torch.Tensor:
        return self.runs[pool][:, slot].flatten()


@pytest.mark.parametrize("seed", range(4))
def test_orders_on_foreign_chunked_layer_first_memory_give_equal_bytes_both_ways(
    seed: int, door: tuple[str, str]
) -> None:
    rig, rng = EngineRig(seed), random.Random(seed)
    with open_mover(rig.device, door) as mover:
        for direction in (OUT, BACK):
            expected: list[tuple[int, int, int, torch.Tensor]] = []
            slots = [rng.sample(range(SLOTS), 128) for _ in POOLS]
            pages = [rng.sample(range(PAGES), 128) for _ in POOLS]
            for order in range(64):
                mine = slice(2 * order, 2 * order + 2)
                mover.move(MoveOrder(order, direction, [of[mine] for of in pages], [of[mine] for of in slots]))
                for pool in POOLS:
                    for page, slot in zip(pages[pool][mine], slots[pool][mine], strict=True):
                        source = rig.page(pool, page) if direction is OUT else rig.slot(pool, slot)
                        expected.append((pool, page, slot, source.clone()))
            submits = rig.device.submits
            mover.flush(rig.runtime.engine)
            (ack,) = acks(mover)
            assert ack.done == tuple(range(64))
            assert rig.device.submits == submits + 1
            for pool, page, slot, source in expected:
                assert torch.equal(rig.slot(pool, slot) if direction is OUT else rig.page(pool, page), source)


@pytest.mark.parametrize("seed", range(6))
def test_page_lists_on_the_device_are_read_behind_the_fence_and_off_the_engines_thread(seed: int) -> None:
    rig = EngineRig(seed)
    lists = torch.zeros(4, dtype=torch.int32)
    read: list[str] = []

    async def main() -> None:
        async with open_services() as services:
            await rig.device.open(services)
            rig.runtime.engine_runs(lambda: lists.copy_(torch.tensor([5, 6, 7, 8])))
            found = await rig.device.read_page_lists((lists[:1], lists[1:]), (rig.runtime.engine,)).outcome()
            read.extend(map(str, (found.error, [list(one) for one in found.lists])))
            await rig.device.close(5)
            assert "not open" in str((await rig.device.read_page_lists((lists,)).outcome()).error)

    anyio.run(main)
    assert read == ["None", "[[5], [6, 7, 8]]"]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    end = time.monotonic() + 5
    while (
        left := [one for one in threading.enumerate() if one not in before and "kvcr" in one.name]
    ) and time.monotonic() < end:
        time.sleep(0.01)
    assert not left
