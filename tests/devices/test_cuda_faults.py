"""A `CopyEngine` whose runtime fails, and its life from opening to close."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from array import array
from collections.abc import Callable, Sequence

import anyio
import pytest
import torch

from kvcr_actors.core.copy_plan import CopyPlan, Direction, PoolCopy, plan_copy
from kvcr_actors.devices.copy_program import EncodedPart
from kvcr_actors.devices.row_mover import TorchMover
from kvcr_actors.errors import DeadlineError, DeviceError
from kvcr_actors.testing.services import open_services
from tests.devices.engine_bench import PAGES, SLOTS, Bench, layers_of
from tests.devices.harness import LAYOUTS, random_plan
from tests.devices.scheduled_runtime import Event, ScheduledRuntime, Stream

pytestmark = [pytest.mark.anyio, pytest.mark.real_clock]

HYBRID = LAYOUTS["hybrid"]
ONE = LAYOUTS["one_plane"]
LATE_S = 0.05


class FailingRuntime(ScheduledRuntime):
    """Refuses the `at`-th call that gives a stream work, counted from when `at` is set; and later ones if `lasting`."""

    def __init__(self, seed: int, *, lasting: bool, error: Callable[[str], Exception]) -> None:
        super().__init__(seed)
        self.at = 0
        self.has_refused = False
        self._lasting = lasting
        self._error = error

    def record(self, stream: Stream, *, blocking: bool = False) -> Event:
        self._count()
        return super().record(stream, blocking=blocking)

    def wait(self, stream: Stream, event: Event) -> None:
        self._count()
        super().wait(stream, event)

    def launch(self, stream: Stream, call: Callable[[], None]) -> None:
        self._count()
        super().launch(stream, call)

    def upload(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        self._count()
        super().upload(stream, target, source)

    def copy(self, stream: Stream, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int]) -> None:
        self._count()
        super().copy(stream, targets, sources, sizes)

    def refuse(self, number: int) -> None:
        self.at, self.has_refused = number, False

    def _count(self) -> None:
        self.at -= 1
        if self.at == 0 or (self.has_refused and self._lasting):
            self.has_refused = True
            raise self._error("refused")


def backup_and_restore(rng: random.Random) -> tuple[CopyPlan, CopyPlan]:
    """A backup of the first half of the pages and slots, and a restore of the others: they may overlap in time."""
    out, back = (random_plan(rng, HYBRID, way, 5, PAGES // 2, SLOTS // 2, run=2) for way in Direction)
    others = [
        PoolCopy(
            copy.pool,
            array("q", [page + PAGES // 2 for page in copy.device_pages]),
            array("q", [slot + SLOTS // 2 for slot in copy.host_slots]),
        )
        for copy in back.pools
    ]
    return out, CopyPlan(Direction.TO_DEVICE, tuple(others))


async def refuse_one_call(bench: Bench, number: int) -> None:
    """Refuse one call of a backup and a restore: they end, what did not fail is right, and then all is quiet."""
    device, runtime = bench.device, bench.runtime
    assert isinstance(runtime, FailingRuntime)
    bench.fill()
    out, back = backup_and_restore(random.Random(number))
    hosts, _ = bench.expect(out)
    _, pages = bench.expect(back)
    runtime.refuse(number)
    operations = device.submit(out), device.submit(back, (runtime.engine,))
    with anyio.fail_after(30):
        backed_up, restored = [await operation.outcome() for operation in operations]
    assert all(operation.is_quiet for operation in operations)
    for pool, device_pages in enumerate(bench.pools):
        host = bench.host.tensor(pool)
        first = SLOTS // 2 if pool in backed_up.failed else 0
        assert torch.equal(host[first:], hosts[pool][first:])
        end = PAGES // 2 if pool in restored.failed else PAGES
        assert torch.equal(device_pages[:, :end], pages[pool][:, :end])
        host.fill_(1)
        device_pages.fill_(2)
    runtime.finish()
    assert all(bool((bench.host.tensor(pool) == 1).all()) for pool in range(3)), "copied after it was quiet"
    assert all(bool((device_pages == 2).all()) for device_pages in bench.pools), "copied after it was quiet"
    device.wait_layer(0, deadline_s=0.01)  # waits for no restore that is over


@pytest.mark.parametrize("error", [DeviceError, RuntimeError])
@pytest.mark.parametrize("lasting", [False, True])
async def test_whichever_call_is_refused_submits_end_their_memory_is_quiet_and_the_next_ones_work(
    lasting: bool, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcr_actors.devices.layer_groups.GROUP_BYTES", 1)
    runtime = FailingRuntime(1, lasting=lasting, error=error)
    bench = Bench(HYBRID, layers=layers_of(HYBRID), direct_bytes=4096, runtime=runtime)
    async with open_services() as services:
        await bench.device.open(services)
        number = 0
        runtime.has_refused = True
        while runtime.has_refused:
            number += 1
            await refuse_one_call(bench, number)
        await bench.device.close(5)
    assert number > 25


class HeldRuntime(ScheduledRuntime):
    """Tells when the launching thread waits for something; `careless` lets it go on at once."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.careless = False
        self.is_opened = False
        self.waits = threading.Event()

    def synchronize(self, event: Event) -> None:
        if self.is_opened and threading.current_thread().name == "kvcr-launch":
            self.waits.set()
            if self.careless:
                return
        super().synchronize(event)


async def more_plans_than_the_index_ring_holds(seed: int, *, careless: bool) -> bool:
    """Whether they are all right, though the stream takes up none of their index buffers until all are launched."""
    runtime = HeldRuntime(seed)
    runtime.careless = careless
    bench = Bench(ONE, index_bytes=4096, runtime=runtime)
    pages, slots = [slot % PAGES for slot in range(SLOTS)], range(SLOTS)
    plans = [plan_copy(Direction.TO_HOST, [(([page],), ([slot],))]) for page, slot in zip(pages, slots, strict=True)]
    hosts, _ = bench.expect(plan_copy(Direction.TO_HOST, [((pages,), (slots,))]))
    async with open_services() as services:
        await bench.device.open(services)
        runtime.is_opened = True
        fence = Event()
        operations = [bench.device.submit(plan, (fence,)) for plan in plans]
        assert await anyio.to_thread.run_sync(runtime.waits.wait, 30)
        while careless and bench.device.describe()["launching"]:  # noqa: ASYNC110 - a thread's progress
            await anyio.sleep(0.001)
        fence.is_over = True
        runtime.engine_runs(lambda: None)  # wakes whoever waits
        for operation in operations:
            await operation.outcome()
        await bench.device.close(5)
    return torch.equal(bench.host.tensor(0), hosts[0])


async def test_an_index_buffer_is_not_overwritten_before_the_device_has_read_it() -> None:
    assert await more_plans_than_the_index_ring_holds(1, careless=False)
    assert not await more_plans_than_the_index_ring_holds(1, careless=True)


async def test_launches_that_a_close_gave_up_have_failed_and_are_quiet() -> None:
    bench, fence = Bench(ONE, index_bytes=4096, runtime=HeldRuntime(1)), Event()
    assert isinstance(bench.runtime, HeldRuntime)
    plans = [plan_copy(Direction.TO_DEVICE, [(([1],), ([slot],))]) for slot in range(SLOTS)]
    async with open_services() as services:
        await bench.device.open(services)
        bench.runtime.is_opened = True
        operations = [bench.device.submit(plan, (fence,)) for plan in plans]
        assert await anyio.to_thread.run_sync(bench.runtime.waits.wait, 30)
        with pytest.raises(DeadlineError, match="kvcr-launch: a call did not end"):
            await bench.device.close(LATE_S)
        fence.is_over = True
        bench.runtime.engine_runs(lambda: None)  # wakes whoever waits
        await bench.device.close(10)
        assert all(operation.is_quiet for operation in operations)
        assert all([(await operation.outcome()).failed for operation in operations])
        bench.device.wait_layer(0, deadline_s=0.01)


async def test_an_engine_does_not_wait_for_a_restore_that_was_never_launched() -> None:
    bench, fence = Bench(ONE), Event()
    refused = plan_copy(Direction.TO_DEVICE, [(([PAGES],), ([1],))])
    async with open_services() as services:
        await bench.device.open(services)
        bench.device.submit(plan_copy(Direction.TO_DEVICE, [(([1],), ([1],))]), (fence,))
        operation = bench.device.submit(refused)
        bench.device.wait_layer(0, deadline_s=10)  # the first is awaited on the device, the second not at all
        assert not operation.is_settled
        fence.is_over = True
        bench.runtime.engine_runs(lambda: None)  # wakes whoever waits
        assert "device page" in (await operation.outcome()).failed[0]
        await bench.device.close(10)


async def test_an_index_ring_that_is_too_small_fails_the_plan_and_names_the_option() -> None:
    bench = Bench(ONE, index_bytes=4096)
    large = CopyPlan(
        Direction.TO_DEVICE, (PoolCopy(0, array("q", [page % PAGES for page in range(600)]), array("q", [1] * 600)),)
    )
    async with open_services() as services:
        await bench.device.open(services)
        assert "raise index_bytes" in (await bench.device.submit(large).outcome()).failed[0]
        bench.device.wait_layer(0, deadline_s=0.01)
        small = plan_copy(Direction.TO_DEVICE, [(([1],), ([1],))])
        assert (await bench.device.submit(small).outcome()).failed == {}
        await bench.device.close(5)


class CountingRuntime(ScheduledRuntime):
    """Knows how many of its events somebody still holds."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.events = weakref.WeakSet[Event]()

    def record(self, stream: Stream, *, blocking: bool = False) -> Event:
        event = super().record(stream, blocking=blocking)
        self.events.add(event)
        return event


@pytest.mark.parametrize("direct_bytes", [256, 1 << 30])
async def test_a_device_keeps_no_events_of_copies_long_over(direct_bytes: int) -> None:
    runtime = CountingRuntime(0)
    bench = Bench(ONE, direct_bytes=direct_bytes, index_bytes=4096, runtime=runtime)
    plan = plan_copy(Direction.TO_HOST, [((range(PAGES),), (range(PAGES),))])
    async with open_services() as services:
        await bench.device.open(services)
        for _ in range(200):
            assert (await bench.device.submit(plan).outcome()).failed == {}
        gc.collect()
        assert len(runtime.events) < 60
        await bench.device.close(5)


class NotingRuntime(ScheduledRuntime):
    """Notes on which threads kernels are launched."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.launchers: set[str] = set()

    def launch(self, stream: Stream, call: Callable[[], None]) -> None:
        self.launchers.add(threading.current_thread().name)
        super().launch(stream, call)


@pytest.mark.parametrize("on_caller", [False, True])
@pytest.mark.parametrize("direction", list(Direction))
async def test_submits_are_launched_by_their_own_thread_or_by_the_caller(direction: Direction, on_caller: bool) -> None:
    runtime = NotingRuntime(0)
    bench = Bench(HYBRID, launch_on_caller=on_caller, runtime=runtime)
    plan = random_plan(random.Random(1), HYBRID, direction, 5, PAGES, SLOTS)
    async with open_services() as services:
        await bench.device.open(services)
        runtime.launchers.clear()
        expected = bench.expect(plan)
        assert (await bench.device.submit(plan).outcome()).failed == {}
        bench.check(expected)
        assert runtime.launchers == {threading.current_thread().name if on_caller else "kvcr-launch"}
        await bench.device.close(5)


async def test_a_device_that_is_not_open_or_a_wrong_fence_is_an_outcome_and_no_submit() -> None:
    bench = Bench(ONE)
    plan = plan_copy(Direction.TO_HOST, [(([1],), ([1],))])
    assert "not open" in (await bench.device.submit(plan).outcome()).failed[0]
    async with open_services() as services:
        await bench.device.open(services)
        assert "fence: not 'a string'" in (await bench.device.submit(plan, ("a string",)).outcome()).failed[0]
        await bench.device.close(5)
    assert "not open" in (await bench.device.submit(plan).outcome()).failed[0]
    assert bench.device.submits == 0


async def test_a_device_describes_itself() -> None:
    bench = Bench(HYBRID)
    plan = plan_copy(Direction.TO_HOST, [(([1], [1], [1]), ([1], [1], [1]))])
    async with open_services() as services:
        await bench.device.open(services)
        await bench.device.submit(plan).outcome()
        await bench.device.close(5)
    assert bench.device.describe() == {
        "device": "cpu",
        "submits": 1,
        "launching": 0,
        "running": {"to_host": 0, "to_device": 0},
        "pages": {"kv": PAGES, "swa": PAGES, "mamba": PAGES},
    }


class BrokenMover(TorchMover):
    """Cannot launch anything."""

    def move(self, part: EncodedPart, plan: torch.Tensor, staging: torch.Tensor, *, to_staging: bool) -> None:
        raise RuntimeError("no kernel image is available")


async def test_a_device_whose_kernel_does_not_load_cannot_be_opened_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    bench = Bench(ONE, mover=BrokenMover)
    async with open_services() as services:
        with pytest.raises(DeviceError, match="cannot be opened: RuntimeError: no kernel image"):
            await bench.device.open(services)
        assert "kvcr-launch" not in {thread.name for thread in set(threading.enumerate()) - before}
        await bench.device.close(5)


async def test_copies_that_outlast_a_close_all_become_quiet_and_the_next_close_waits_for_them() -> None:
    bench, fence = Bench(ONE), Event()
    async with open_services() as services:
        await bench.device.open(services)
        plans = [plan_copy(way, [(([page],), ([page],))]) for page in range(3) for way in Direction]
        operations = [bench.device.submit(plan, (fence,)) for plan in plans]
        for _ in range(2):
            with pytest.raises(DeadlineError, match=r"kvcr-wait-to_host: .*; kvcr-wait-to_device: "):
                await bench.device.close(LATE_S)
            assert all(operation.is_settled and not operation.is_quiet for operation in operations)

        async def close() -> None:
            await bench.device.close(30)
            assert all(operation.is_quiet for operation in operations)

        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(close)
            fence.is_over = True
            bench.runtime.engine_runs(lambda: None)  # wakes whoever waits
        bench.device.wait_layer(0, deadline_s=0.01)


async def test_a_close_names_only_what_did_not_end() -> None:
    bench, fence = Bench(ONE), Event()
    async with open_services() as services:
        await bench.device.open(services)
        bench.device.submit(plan_copy(Direction.TO_HOST, [(([1],), ([1],))]), (fence,))
        with pytest.raises(DeadlineError) as late:
            await bench.device.close(LATE_S)
        assert "kvcr-wait-to_host" in str(late.value)
        assert "kvcr-wait-to_device" not in str(late.value)
        fence.is_over = True
        bench.runtime.engine_runs(lambda: None)
        await bench.device.close(30)
