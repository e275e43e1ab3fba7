from __future__ import annotations

import random

import anyio
import pytest

from kvcr_actors.core.copy_plan import CopyPlan, Direction, plan_copy
from kvcr_actors.errors import DeadlineError
from kvcr_actors.testing.devices import LoopDevice
from kvcr_actors.testing.faults import Fault, FaultPlan
from kvcr_actors.testing.host_memory import BytesHostMemory
from kvcr_actors.testing.services import open_services
from kvcr_actors.types import CacheLayout, PoolSpec

pytestmark = pytest.mark.anyio

LAYOUT = CacheLayout((PoolSpec("kv", 2, 4), PoolSpec("swa", 1, 3)))


def make_device(faults: FaultPlan | None = None, **options: float) -> LoopDevice:
    rng = random.Random(0)
    host = BytesHostMemory(LAYOUT, 8)
    device = LoopDevice(LAYOUT, 8, host, faults=faults, **options)  # type: ignore[arg-type]
    for pool, spec in enumerate(LAYOUT.pools):
        device.load(pool, range(8), rng.randbytes(8 * spec.page_bytes))
    return device


def backup(*pairs: tuple[int, int]) -> CopyPlan:
    pages, slots = [page for page, _ in pairs], [slot for _, slot in pairs]
    return plan_copy(Direction.TO_HOST, [((pages, pages), (slots, slots))])


def is_copied(device: LoopDevice, pool: int, page: int, slot: int) -> bool:
    size = LAYOUT.pools[pool].page_bytes
    return device.gather(pool, [page]) == bytes(device.host.buffer(pool)[slot * size : (slot + 1) * size])


async def test_pages_go_to_the_host_and_come_back() -> None:
    device = make_device()
    async with open_services() as services:
        await device.open(services)
        outcome = await device.submit(backup((5, 1), (2, 7))).outcome()
        assert outcome.bytes == 2 * LAYOUT.page_bytes
        assert all(is_copied(device, pool, page, slot) for pool in (0, 1) for page, slot in ((5, 1), (2, 7)))
        before = device.gather(0, [5])
        device.poison(0, [5])
        assert device.gather(0, [5]) != before
        await device.submit(plan_copy(Direction.TO_DEVICE, [(([5], [5]), ([1], [1]))])).outcome()
        assert device.gather(0, [5]) == before
        await device.close(5)
    assert device.submits == 2


async def test_a_copy_takes_its_time_and_waits_for_its_fence() -> None:
    device = make_device(latency_s=0.2, seconds_per_byte=0.01)
    async with open_services() as services:
        await device.open(services)
        fence, begin = anyio.Event(), anyio.current_time()
        operation = device.submit(backup((1, 1)), (fence,))
        await anyio.sleep(0.7)
        assert not operation.is_settled
        late = bytes(range(8))
        device.load(0, [1], late)
        fence.set()
        await operation.outcome()
        assert bytes(device.host.buffer(0)[8:16]) == late
        assert anyio.current_time() - begin == pytest.approx(0.7 + 0.2 + 0.11, abs=0.05)
        await device.close(5)


async def test_copies_of_one_direction_run_in_order_of_submission() -> None:
    device = make_device()
    async with open_services() as services:
        await device.open(services)
        fence = anyio.Event()
        first, second = device.submit(backup((1, 3)), (fence,)), device.submit(backup((2, 3)))
        await anyio.sleep(0.1)
        assert not second.is_settled
        fence.set()
        await second.outcome()
        assert first.is_quiet
        assert is_copied(device, 0, 2, 3)
        await device.close(5)


@pytest.mark.parametrize("fault", [Fault.FAIL, Fault.TRUNCATE, Fault.CORRUPT])
async def test_a_fault_in_one_pool_fails_that_pool_alone(fault: Fault) -> None:
    device = make_device(FaultPlan.always(fault, "to_host.swa"))
    async with open_services() as services:
        await device.open(services)
        outcome = await device.submit(backup((1, 1), (2, 2))).outcome()
        await device.close(5)
    assert set(outcome.failed) == {1}
    assert outcome.bytes == 16
    assert is_copied(device, 0, 2, 2)
    assert not is_copied(device, 1, 2, 2)


async def test_a_launch_that_fails_is_an_outcome_and_no_submit() -> None:
    device = make_device(FaultPlan.always(Fault.FAIL, "to_host"))
    async with open_services() as services:
        await device.open(services)
        operation = device.submit(backup((1, 1)))
        assert operation.is_quiet
        assert set((await operation.outcome()).failed) == {0, 1}
        await device.close(5)
    assert device.submits == 0


async def test_a_late_copy_settles_as_failed_and_touches_memory_until_it_is_quiet() -> None:
    device = make_device(FaultPlan.always(Fault.LATE, "to_host"), late_s=0.2)
    async with open_services() as services:
        await device.open(services)
        operation = device.submit(backup((1, 1)))
        assert set((await operation.outcome()).failed) == {0, 1}
        assert not operation.is_quiet
        assert not is_copied(device, 0, 1, 1)
        await operation.quiet()
        assert is_copied(device, 0, 1, 1)
        await device.close(5)


async def test_a_dropped_completion_is_copied_and_never_told() -> None:
    device = make_device(FaultPlan.always(Fault.DROP, "to_host", limit=1))
    async with open_services() as services:
        await device.open(services)
        lost, next_one = device.submit(backup((1, 1))), device.submit(backup((2, 2)))
        await next_one.outcome()
        assert not lost.is_settled
        assert is_copied(device, 0, 1, 1)
        await device.close(5)


async def test_a_stalled_copy_begins_when_released_and_keeps_close_waiting() -> None:
    device = make_device(FaultPlan.always(Fault.STALL, "to_host"))
    async with open_services() as services:
        await device.open(services)
        operation = device.submit(backup((1, 1)))
        with pytest.raises(DeadlineError, match="1 copies"):
            await device.close(0.3)
        assert not operation.is_settled
        device.release()
        assert (await operation.outcome()).failed == {}


async def test_truncated_corrupt_and_duplicate_submits() -> None:
    schedule = {
        ("to_host", 0): Fault.TRUNCATE,
        ("to_host", 1): Fault.CORRUPT,
        ("to_host", 2): Fault.CORRUPT_SILENTLY,
        ("to_host", 3): Fault.DUPLICATE,
    }
    device = make_device(FaultPlan(schedule=schedule))
    async with open_services() as services:
        await device.open(services)
        outcomes = [await device.submit(backup((slot, slot))).outcome() for slot in range(4)]
        await device.close(5)
    assert [set(outcome.failed) for outcome in outcomes] == [{1}, {0, 1}, set(), set()]
    assert [is_copied(device, 0, slot, slot) for slot in range(4)] == [True, False, False, True]


async def test_a_page_that_does_not_exist_fails_its_pool() -> None:
    device = make_device()
    async with open_services() as services:
        await device.open(services)
        outcome = await device.submit(plan_copy(Direction.TO_HOST, [(([1], [8]), ([1], [1]))])).outcome()
        await device.close(5)
    assert set(outcome.failed) == {1}
    assert "page 8" in outcome.failed[1]
