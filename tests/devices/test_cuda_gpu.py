"""The CUDA device on a real GPU: the same bytes, and the races that only hardware can lose."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

from kvcr_actors import (
    BackupNode,
    CacheController,
    CacheLayout,
    Completion,
    PoolSpec,
    PrefetchReady,
    PrefetchRequest,
    RestoreFinished,
    RestoreOrder,
    chain_seed,
    page_keys,
)
from kvcr_actors.core.copy_plan import CopyPlan, Direction, plan_copy
from kvcr_actors.devices.cuda import CudaDevice
from kvcr_actors.devices.cuda_runtime import CudaRuntime
from kvcr_actors.devices.host_memory import HostPools
from kvcr_actors.devices.layer_groups import GROUP_BYTES
from kvcr_actors.devices.row_mover import PlaneTable, RowMover, TorchMover, TritonMover
from kvcr_actors.testing.services import open_services
from tests.devices.harness import LAYOUTS, expected_device, expected_host, random_plan

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.real_clock,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

PAGES = 48
SLOTS = 96
ROUNDS = 1000
RACE = CacheLayout((PoolSpec("kv", 4, 16 << 10),))


class Bench:
    def __init__(
        self,
        layout: CacheLayout,
        mover: type[RowMover] = TritonMover,
        staging_bytes: int = 1 << 20,
        chunk: int = 1 << 30,
        direct_bytes: int = 1 << 30,
    ) -> None:
        self.layout = layout
        self.host = HostPools(layout, SLOTS, registrar=CudaRuntime(0), register_chunk_bytes=chunk)
        self.pools = [self.random((pool.planes, PAGES, pool.plane_bytes)) for pool in layout.pools]
        for pool in range(len(layout.pools)):
            # By way of pageable memory: one copy may not cross two registered chunks.
            self.host.tensor(pool).copy_(self.random(self.host.tensor(pool).shape).cpu())
        planes = [pool.unbind(0) for pool in self.pools]
        table = PlaneTable(layout, planes)
        layers = [list(range(pool.planes)) for pool in layout.pools]
        self.device = CudaDevice(
            layout,
            planes,
            self.host,
            layers=layers,
            staging_bytes=staging_bytes,
            direct_bytes=direct_bytes,
            mover=mover(table),  # type: ignore[call-arg]
        )

    @staticmethod
    def random(shape: tuple[int, ...] | torch.Size) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")

    @staticmethod
    def delay(milliseconds: float) -> None:
        torch.cuda._sleep(int(milliseconds * 1_500_000))

    async def run(self, plan: CopyPlan, *fences: object) -> None:
        outcome = await self.device.submit(plan, fences).outcome()
        assert outcome.failed == {}


@asynccontextmanager
async def opened(bench: Bench) -> AsyncIterator[Bench]:
    async with open_services() as services:
        await bench.device.open(services)
        yield bench
        await bench.device.close(30)
        bench.host.close()


@pytest.mark.parametrize("direct_bytes", [1000, 1 << 30])
@pytest.mark.parametrize(
    ("mover", "group_bytes"), [(TritonMover, GROUP_BYTES), (TritonMover, 1), (TorchMover, GROUP_BYTES)]
)
@pytest.mark.parametrize("name", LAYOUTS)
async def test_both_directions_move_exactly_the_pages_of_the_plan(
    name: str, mover: type[RowMover], group_bytes: int, direct_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcr_actors.devices.layer_groups.GROUP_BYTES", group_bytes)
    layout, rng = LAYOUTS[name], random.Random(name)
    async with opened(Bench(layout, mover, 60_000, 16 << 10, direct_bytes)) as bench:
        for count, run in ((1, 1), (17, 3), (48, 12), (31, 1)):
            for direction in Direction:
                plan = random_plan(rng, layout, direction, count, PAGES, SLOTS, run=run)
                hosts = [bench.host.tensor(pool).clone() for pool in range(len(layout.pools))]
                pools = [pool.cpu() for pool in bench.pools]
                await bench.run(plan)
                for pool in range(len(pools)):
                    if direction is Direction.TO_HOST:
                        hosts[pool] = expected_host(hosts[pool], pools[pool], plan, pool)
                    else:
                        pools[pool] = expected_device(pools[pool], hosts[pool], plan, pool)
                    assert torch.equal(bench.host.tensor(pool), hosts[pool])
                    assert torch.equal(bench.pools[pool].cpu(), pools[pool])


def whole(direction: Direction) -> CopyPlan:
    return plan_copy(direction, [((range(PAGES),), (range(PAGES),))])


async def backups_see_the_writer(rounds: int, *, fenced: bool) -> bool:
    """Each round a writer is late by a spinning kernel; whether every backup has its bytes."""
    async with opened(Bench(RACE, staging_bytes=8 << 20)) as bench:
        written, right = bench.random(bench.pools[0].shape), torch.ones(1, dtype=torch.bool, device="cuda")
        for _ in range(rounds):
            written.add_(37)
            torch.cuda.synchronize()
            bench.delay(2)
            bench.pools[0].copy_(written)
            await bench.run(whole(Direction.TO_HOST), *([torch.cuda.current_stream()] if fenced else []))
            host = bench.host.tensor(0)[:PAGES].cuda().view(PAGES, 4, -1).transpose(0, 1)
            right &= torch.equal(host, written)
        return bool(right)


async def restores_spare_the_reader(rounds: int, *, fenced: bool) -> bool:
    """Each round a reader is late; whether it saw the pages as they were before the restore."""
    async with opened(Bench(RACE, staging_bytes=8 << 20)) as bench:
        seen, right = torch.empty_like(bench.pools[0]), True
        for number in range(rounds):
            bench.host.tensor(0).fill_(number % 251)
            old = bench.pools[0].clone()
            torch.cuda.synchronize()
            bench.delay(2)
            seen.copy_(bench.pools[0])
            await bench.run(whole(Direction.TO_DEVICE), *([torch.cuda.current_stream()] if fenced else []))
            torch.cuda.synchronize()
            right &= torch.equal(seen, old) and bool((bench.pools[0] == number % 251).all())
        return right


async def slots_are_reused(rounds: int, *, after_quiet: bool) -> bool:
    """Each round a restore's host slots are given to others; whether the restore still brought their old bytes."""
    async with opened(Bench(RACE, staging_bytes=8 << 20)) as bench:
        right = True
        for number in range(rounds):
            bench.host.tensor(0).fill_(number % 251)
            bench.delay(2)
            operation = bench.device.submit(whole(Direction.TO_DEVICE), (torch.cuda.current_stream(),))
            if after_quiet:
                await operation.quiet()
            bench.host.poison(0, range(SLOTS))
            assert (await operation.outcome()).failed == {}
            right &= bool((bench.pools[0] == number % 251).all())
        return right


async def test_scenario_01_a_backup_has_what_a_late_writer_wrote() -> None:
    assert await backups_see_the_writer(ROUNDS, fenced=True)


async def test_scenario_01_without_its_fence_a_backup_loses_the_race() -> None:
    assert not await backups_see_the_writer(20, fenced=False)


async def test_a_restore_spares_pages_that_are_still_read() -> None:
    assert await restores_spare_the_reader(ROUNDS, fenced=True)


async def test_without_its_fence_a_restore_loses_the_race() -> None:
    assert not await restores_spare_the_reader(20, fenced=False)


async def test_scenario_02_host_slots_reused_after_quiet_are_not_restored() -> None:
    assert await slots_are_reused(ROUNDS, after_quiet=True)


async def test_scenario_02_host_slots_reused_before_quiet_are() -> None:
    assert not await slots_are_reused(20, after_quiet=False)


def test_draining_a_stream_waits_for_all_that_it_was_given() -> None:
    runtime = CudaRuntime(0)
    stream = runtime.stream()
    with torch.cuda.stream(stream):
        Bench.delay(20)
    assert not stream.query()
    runtime.drain(stream)
    assert stream.query()


async def test_a_layer_waited_for_is_there_when_the_engine_reads_it() -> None:
    layout = CacheLayout((PoolSpec("kv", 32, 64 << 10),))

    async def layers_are_right(rounds: int, *, waits: bool) -> bool:
        right = True
        async with opened(Bench(layout, staging_bytes=128 << 20)) as bench:
            seen = torch.empty_like(bench.pools[0])
            for number in range(rounds):
                bench.host.tensor(0).fill_(number % 251)
                operation = bench.device.submit(whole(Direction.TO_DEVICE))
                for layer in range(32):
                    if waits:
                        bench.device.wait_layer(layer)
                    seen[layer].copy_(bench.pools[0][layer])
                assert (await operation.outcome()).failed == {}
                right &= bool((seen == number % 251).all())
        return right

    assert await layers_are_right(60, waits=True)
    assert not await layers_are_right(20, waits=False)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("inline", [False, True])
async def test_pools_on_another_gpu_than_the_threads_own_are_moved_and_waited_for_there(inline: bool) -> None:
    host = HostPools(RACE, SLOTS, registrar=CudaRuntime(1))
    pool = torch.randint(0, 256, (4, PAGES, 16 << 10), dtype=torch.uint8, device="cuda:1")
    written, stream = pool.clone(), torch.cuda.current_stream(1)
    device = CudaDevice(RACE, [pool.unbind(0)], host, layers=[range(4)], staging_bytes=1 << 20, launch_on_caller=inline)
    async with open_services() as services:
        await device.open(services)
        fence = torch.cuda.Event()
        fence.record(stream)
        assert (await device.submit(whole(Direction.TO_HOST), (fence,)).outcome()).failed == {}
        pool.zero_()
        operation = device.submit(whole(Direction.TO_DEVICE), (stream,))
        device.wait_layer(3)
        assert torch.equal(pool, written)
        assert (await operation.outcome()).failed == {}
        await device.close(30)
    host.close()
    assert torch.cuda.current_device() == 0


def test_an_engine_beside_a_controller_in_a_thread_reads_layers_only_behind_their_restore() -> None:
    layout, pages = CacheLayout((PoolSpec("kv", 32, 64 << 10),)), PAGES // 2
    keys = page_keys(range(pages), 1, chain_seed())

    def layers_are_right(rounds: int, *, waits: bool) -> bool:
        bench, right = Bench(layout, staging_bytes=128 << 20), True
        pool, seen = bench.pools[0], torch.empty_like(bench.pools[0][:, :pages])
        first, second = tuple(range(pages)), tuple(range(pages, 2 * pages))
        with CacheController(device=bench.device) as controller:
            controller.write_back([BackupNode(1, keys, (first,))], torch.cuda.current_stream())
            for number in range(rounds):
                pool[:, pages:] = 0
                controller.prefetch(PrefetchRequest(number, keys))
                controller.flush_pending_backups()
                await_one(controller, PrefetchReady)
                torch.cuda.synchronize()
                controller.restore(RestoreOrder(number, 0, (second,)))
                controller.flush_pending_backups(torch.cuda.current_stream())
                if waits:
                    controller.wait_restores_submitted()
                for layer in range(32):
                    bench.device.wait_layer(layer)
                    seen[layer].copy_(pool[layer, pages:])
                await_one(controller, RestoreFinished)
                right &= bool((seen == pool[:, :pages]).all())
        bench.host.close()
        return right

    assert layers_are_right(60, waits=True)
    assert not layers_are_right(20, waits=False)


def await_one(controller: CacheController, kind: type[Completion]) -> None:
    while not any(isinstance(one, kind) for one in controller.take()):
        assert controller.wait(10)
