from __future__ import annotations

import random
import threading
import time
from array import array
from concurrent.futures import ThreadPoolExecutor

import anyio
import pytest
import torch

from kvcr_actors.core.copy_plan import CopyPlan, Direction, PoolCopy, plan_copy
from kvcr_actors.devices.cpu import CpuDevice, CpuFence
from kvcr_actors.devices.host_memory import POISON_BYTE, HostPools
from kvcr_actors.errors import ConfigError, DeadlineError
from kvcr_actors.testing.services import open_services
from kvcr_actors.types import CacheLayout
from tests.devices.harness import LAYOUTS, expected_device, expected_host, random_bytes, random_plan

pytestmark = [pytest.mark.anyio, pytest.mark.real_clock]

PAGES = 40
SLOTS = 64


def make_device(layout: CacheLayout, **options: float) -> CpuDevice:
    host = HostPools(layout, SLOTS)
    device = CpuDevice(layout, PAGES, host, **options)  # type: ignore[arg-type]
    for pool in range(len(layout.pools)):
        device.pool_view(pool).copy_(random_bytes(device.pool_view(pool).shape))
        host.tensor(pool).copy_(random_bytes(host.tensor(pool).shape))
    return device


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("run", [1, 3, 20])
@pytest.mark.parametrize("staging_bytes", [1, 1 << 20])
async def test_both_directions_move_exactly_the_pages_of_the_plan(name: str, run: int, staging_bytes: int) -> None:
    layout, rng = LAYOUTS[name], random.Random(run)
    device = make_device(layout, staging_bytes=staging_bytes)
    async with open_services() as services:
        await device.open(services)
        for direction in Direction:
            plan = random_plan(rng, layout, direction, 20, PAGES, SLOTS, run=run)
            pools = range(len(layout.pools))
            hosts = [device.host.tensor(pool).clone() for pool in pools]
            pages = [device.pool_view(pool).clone() for pool in pools]
            outcome = await device.submit(plan).outcome()
            assert outcome.failed == {}
            assert outcome.bytes == plan.bytes_for(layout)
            for pool in pools:
                if direction is Direction.TO_HOST:
                    hosts[pool] = expected_host(hosts[pool], pages[pool], plan, pool)
                else:
                    pages[pool] = expected_device(pages[pool], hosts[pool], plan, pool)
                assert torch.equal(device.host.tensor(pool), hosts[pool])
                assert torch.equal(device.pool_view(pool), pages[pool])
        await device.close(5)
    assert device.submits == 2


async def test_one_slot_can_be_restored_to_two_pages() -> None:
    layout = LAYOUTS["one_plane"]
    device = make_device(layout)
    async with open_services() as services:
        await device.open(services)
        outcome = await device.submit(plan_copy(Direction.TO_DEVICE, [(([4, 9],), ([7, 7],))])).outcome()
        await device.close(5)
    assert outcome.failed == {}
    assert torch.equal(device.gather(0, [4, 9]), device.host.tensor(0)[[7, 7]])


async def test_a_copy_waits_for_its_fence_and_the_caller_does_not() -> None:
    layout = LAYOUTS["hybrid"]
    device = make_device(layout)
    plan = plan_copy(Direction.TO_HOST, [(([1], [2], [3]), ([1], [2], [3]))])
    async with open_services() as services:
        await device.open(services)
        fence = CpuFence()
        operation = device.submit(plan, (fence,))
        late = random_bytes((1, layout.pools[0].page_bytes))
        with anyio.move_on_after(0.05):
            await operation.outcome()
        assert not operation.is_settled
        device.load(0, [1], late)
        threading.Thread(target=fence.set).start()
        assert (await operation.outcome()).failed == {}
        assert torch.equal(device.host.tensor(0)[1], late[0])
        await device.close(5)


async def backups_behind_a_late_kernel(rounds: int) -> int:
    """Each round a kernel writes a pattern late, behind the backup of its step: in how many the host lacks it."""
    device, pages = make_device(LAYOUTS["one_plane"]), list(range(4))
    plan = plan_copy(Direction.TO_HOST, [((pages,), (pages,))])
    wrong = 0
    async with open_services() as services:
        await device.open(services)
        with ThreadPoolExecutor(1) as stream:
            for number in range(rounds):
                pattern, fence = (
                    torch.full((4, device.layout.pools[0].page_bytes), number % 251, dtype=torch.uint8),
                    CpuFence(),
                )

                def kernel(pattern: torch.Tensor = pattern, fence: CpuFence = fence) -> None:
                    time.sleep(0.0002)
                    device.load(0, pages, pattern)
                    fence.set()

                operation = device.submit(plan, (fence,))
                launched = stream.submit(kernel)
                assert (await operation.outcome()).failed == {}
                wrong += not torch.equal(device.host.tensor(0)[:4], pattern)
                await anyio.to_thread.run_sync(launched.result)
        await device.close(5)
    return wrong


async def test_scenario_01_a_thousand_backups_have_what_a_late_kernel_of_their_step_wrote() -> None:
    assert await backups_behind_a_late_kernel(1000) == 0


async def test_scenario_01_without_the_wait_for_its_fence_a_backup_loses_the_race(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CpuFence, "wait", lambda fence, deadline_s: None)
    assert await backups_behind_a_late_kernel(50) > 0


@pytest.mark.parametrize("held", Direction)
async def test_a_copy_behind_a_fence_holds_up_none_of_the_other_direction(held: Direction) -> None:
    device = make_device(LAYOUTS["one_plane"])
    plans = {direction: plan_copy(direction, [(([1],), ([1],))]) for direction in Direction}
    (free,) = (direction for direction in Direction if direction is not held)
    async with open_services() as services:
        await device.open(services)
        fence = CpuFence()
        waiting, behind = device.submit(plans[held], (fence,)), device.submit(plans[held])
        with anyio.fail_after(10):
            assert (await device.submit(plans[free]).outcome()).failed == {}
        assert not waiting.is_settled
        assert not behind.is_settled
        fence.set()
        await behind.outcome()
        assert waiting.is_settled
        await device.close(5)


async def test_a_copy_waits_for_each_of_its_fences() -> None:
    device, fences = make_device(LAYOUTS["one_plane"]), (CpuFence(), CpuFence())
    async with open_services() as services:
        await device.open(services)
        operation = device.submit(plan_copy(Direction.TO_HOST, [(([3],), ([5],))]), fences)
        fences[0].set()
        await anyio.sleep(0.02)
        assert not operation.is_settled
        late = random_bytes((1, 256))
        device.load(0, [3], late)
        fences[1].set()
        assert (await operation.outcome()).failed == {}
        await device.close(5)
    assert torch.equal(device.host.views(0)[0][5].flatten(), late[0])


async def test_a_fence_that_is_never_set_fails_the_submit_and_copies_nothing() -> None:
    device = make_device(LAYOUTS["hybrid"], fence_deadline_s=0.01)
    before = device.host.tensor(0).clone()
    async with open_services() as services:
        await device.open(services)
        outcome = await device.submit(
            random_plan(random.Random(1), device.layout, Direction.TO_HOST, 3, PAGES, SLOTS), (CpuFence(),)
        ).outcome()
        await device.close(5)
    assert set(outcome.failed) == {0, 1, 2}
    assert "fence" in outcome.failed[0]
    assert torch.equal(before, device.host.tensor(0))


@pytest.mark.parametrize(
    ("pages", "slots", "word"),
    [
        ([PAGES], [1], f"device page {PAGES}"),
        ([-1], [1], "device page -1"),
        ([1], [SLOTS], f"host slot {SLOTS}"),
        ([1], [-1], "host slot -1"),
        ([1, 2], [5, 4], "sorted"),
        ([1, 2], [5, 5], "sorted"),
        ([1, 2], [5], "2 device pages"),
    ],
)
async def test_a_pool_with_bad_pairs_fails_alone(pages: list[int], slots: list[int], word: str) -> None:
    device = make_device(LAYOUTS["hybrid"])
    host_before = device.host.tensor(1).clone()
    good = PoolCopy(0, array("q", [3]), array("q", [4]))
    plan = CopyPlan(Direction.TO_HOST, (good, PoolCopy(1, array("q", pages), array("q", slots))))
    async with open_services() as services:
        await device.open(services)
        outcome = await device.submit(plan).outcome()
        await device.close(5)
    assert set(outcome.failed) == {1}
    assert word in outcome.failed[1]
    assert "swa" in outcome.failed[1]
    assert torch.equal(device.host.tensor(0)[4], device.gather(0, [3])[0])
    assert torch.equal(device.host.tensor(1), host_before)


async def test_a_wrong_fence_or_a_closed_device_is_an_outcome_not_an_exception() -> None:
    device = make_device(LAYOUTS["one_plane"])
    plan = plan_copy(Direction.TO_HOST, [(([1],), ([1],))])
    assert "not open" in (await device.submit(plan).outcome()).failed[0]
    async with open_services() as services:
        await device.open(services)
        assert "fence" in (await device.submit(plan, ("a string",)).outcome()).failed[0]
        await device.close(5)
    assert "not open" in (await device.submit(plan).outcome()).failed[0]
    assert device.submits == 0


async def test_close_waits_for_copies_and_names_those_that_do_not_end() -> None:
    device = make_device(LAYOUTS["one_plane"])
    plan = plan_copy(Direction.TO_HOST, [(([1],), ([1],))])
    async with open_services() as services:
        await device.open(services)
        fence = CpuFence()
        operation = device.submit(plan, (fence,))
        for _ in range(2):  # the second must not say that all is over either
            with pytest.raises(DeadlineError, match="kvcr-cpu-to_host"):
                await device.close(0.01)
        assert not operation.is_quiet
        fence.set()
        await device.close(30)
        assert operation.is_quiet


async def test_load_gather_and_poison_see_pages_across_all_planes() -> None:
    device = make_device(LAYOUTS["odd"])
    content = random_bytes((2, 99))
    device.load(0, [5, 2], content)
    assert torch.equal(device.gather(0, [2, 5]), content.flip(0))
    assert torch.equal(device.pool_view(0)[:, 5].flatten(), content[0])
    device.poison(0, [5])
    assert bool((device.gather(0, [5]) == POISON_BYTE).all())
    assert torch.equal(device.gather(0, [2])[0], content[1])


def test_a_layout_that_does_not_fit_is_refused_by_name() -> None:
    layout = LAYOUTS["hybrid"]
    host = HostPools(layout, 4)
    with pytest.raises(ConfigError, match="pages"):
        CpuDevice(layout, [1, 2], host)
    with pytest.raises(ConfigError, match="another layout"):
        CpuDevice(LAYOUTS["odd"], 4, host)
