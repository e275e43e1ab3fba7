"""The CUDA device's whole path on a runtime without a GPU that runs streams late and in any legal order."""

from __future__ import annotations

import importlib.util
import random
from array import array
from collections.abc import Callable

import anyio
import pytest
import torch

from kvcr_actors.core.copy_plan import CopyPlan, Direction, PoolCopy, plan_copy
from kvcr_actors.devices.copy_lane import CopyLane
from kvcr_actors.devices.cuda import CopyEngine, CudaDevice
from kvcr_actors.devices.host_memory import HostPools
from kvcr_actors.devices.host_transfers import PITCHED_PAGES
from kvcr_actors.devices.row_mover import PlaneTable, TorchMover, TritonMover
from kvcr_actors.errors import ConfigError, DeadlineError
from kvcr_actors.testing.services import open_services
from tests.devices.engine_bench import PAGES, RING, SLOTS, Bench, MakeMover, layers_of
from tests.devices.harness import LAYOUTS, expected_device, expected_host, random_bytes, random_plan
from tests.devices.scheduled_runtime import Event, ScheduledRuntime, Stream

pytestmark = [pytest.mark.anyio, pytest.mark.real_clock]

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
MOVERS = [pytest.param(TorchMover, id="torch"), pytest.param(TritonMover, id="triton", marks=needs_triton)]


@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("count", "run"), [(1, 1), (5, 1), (12, 12)])
async def test_both_directions_move_exactly_the_pages_of_the_plan(
    name: str, mover: MakeMover, count: int, run: int
) -> None:
    layout, rng = LAYOUTS[name], random.Random(count)
    bench = Bench(layout, seed=count, mover=mover, layers=layers_of(layout))
    async with open_services() as services:
        await bench.device.open(services)
        for direction in Direction:
            plan = random_plan(rng, layout, direction, count, PAGES, SLOTS, run=run)
            expected = bench.expect(plan)
            outcome = await bench.device.submit(plan).outcome()
            assert outcome.failed == {}
            assert outcome.bytes == plan.bytes_for(layout)
            bench.check(expected)
        await bench.device.close(5)
    assert bench.device.submits == 2


@pytest.mark.parametrize("direct_bytes", [4096, 256])
@pytest.mark.parametrize("seed", range(6))
async def test_large_planes_go_without_staging_and_behind_the_fence(seed: int, direct_bytes: int) -> None:
    layout, rng = LAYOUTS["hybrid"], random.Random(seed)
    layers = [[0, 1, 2, 3], [0, 0, 1, 2, 3, 3], [1, 3]]
    bench = Bench(layout, seed=seed, layers=layers, staging_bytes=8000, direct_bytes=direct_bytes)
    async with open_services() as services:
        await bench.device.open(services)
        for direction in Direction:
            plan = random_plan(rng, layout, direction, 5, PAGES, SLOTS, run=2)
            written = [random_bytes(pool.shape) for pool in bench.pools]
            seen = [torch.empty_like(pool) for pool in bench.pools]

            def engine(written: list[torch.Tensor] = written, seen: list[torch.Tensor] = seen) -> None:
                for pool, new, old in zip(bench.pools, written, seen, strict=True):
                    pool.copy_(new)
                    old.copy_(pool)

            bench.runtime.engine_runs(engine)
            operation = bench.device.submit(plan, (bench.runtime.engine,))
            assert (await operation.outcome()).failed == {}
            pools = range(len(layout.pools))
            assert all(torch.equal(seen[pool], written[pool]) for pool in pools)
            hosts = [bench.host.tensor(pool) for pool in pools]
            if direction is Direction.TO_HOST:
                assert all(torch.equal(hosts[p], expected_host(hosts[p], written[p], plan, p)) for p in pools)
            else:
                assert all(torch.equal(bench.pools[p], expected_device(written[p], hosts[p], plan, p)) for p in pools)
        await bench.device.close(5)


async def test_a_plan_of_large_planes_alone_launches_no_kernel() -> None:
    bench = Bench(LAYOUTS["hybrid"], direct_bytes=4096)
    async with open_services() as services:
        await bench.device.open(services)
        bench.runtime.calls.clear()
        plan = plan_copy(Direction.TO_HOST, [(([-1], [-1], [3]), ([-1], [-1], [7]))])
        assert (await bench.device.submit(plan).outcome()).failed == {}
        await bench.device.close(5)
    assert (bench.runtime.calls["launch"], bench.runtime.calls["copy"]) == (0, 1)
    assert torch.equal(bench.host.tensor(2)[7], bench.pools[2][:, 3].flatten())


@pytest.mark.parametrize("nodes", [1, 7, 30])
async def test_a_step_is_one_submit_one_upload_one_launch_and_one_batch(nodes: int) -> None:
    layout = LAYOUTS["hybrid"]
    bench = Bench(layout, staging_bytes=1 << 20)
    parts = [(([node % PAGES], [0], [node % 3]), ([node], [node], [node])) for node in range(nodes)]
    async with open_services() as services:
        await bench.device.open(services)
        bench.runtime.calls.clear()
        outcome = await bench.device.submit(plan_copy(Direction.TO_HOST, parts)).outcome()
        await bench.device.close(5)
    assert bench.device.submits == 1
    assert outcome.slices == 1
    assert {name: bench.runtime.calls[name] for name in ("upload", "launch", "copy")} == {
        "upload": 1,
        "launch": 1,
        "copy": 1,
    }


@pytest.mark.parametrize("direction", list(Direction))
async def test_a_plan_larger_than_the_ring_goes_in_slices(direction: Direction) -> None:
    layout = LAYOUTS["hybrid"]
    bench = Bench(layout, staging_bytes=20_000)
    plan = random_plan(random.Random(3), layout, direction, PAGES, PAGES, SLOTS, run=4)
    assert plan.bytes_for(layout) > 60_000
    async with open_services() as services:
        await bench.device.open(services)
        bench.runtime.calls.clear()
        expected = bench.expect(plan)
        outcome = await bench.device.submit(plan).outcome()
        bench.check(expected)
        await bench.device.close(5)
    assert outcome.slices == bench.runtime.calls["launch"] > 10
    assert bench.runtime.calls["upload"] == 1


@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize("chunk_bytes", [8192, 1 << 30])
@pytest.mark.parametrize("run", [1, 3, 9, 12])
async def test_layer_groups_bring_their_part_of_each_page_over_runs_of_any_length(
    mover: MakeMover, chunk_bytes: int, run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcr_actors.devices.layer_groups.GROUP_BYTES", 1)
    for layout in (LAYOUTS["hybrid"], LAYOUTS["odd"]):
        bench = Bench(layout, mover=mover, layers=layers_of(layout), chunk_bytes=chunk_bytes)
        plan = random_plan(random.Random(run), layout, Direction.TO_DEVICE, PAGES, PAGES, SLOTS, run=run)
        async with open_services() as services:
            await bench.device.open(services)
            bench.runtime.calls.clear()
            expected = bench.expect(plan)
            assert (await bench.device.submit(plan).outcome()).failed == {}
            bench.check(expected)
            await bench.device.close(5)
        if chunk_bytes > 8192:
            assert bool(bench.runtime.calls["copy_pitched"]) == (run >= PITCHED_PAGES)


async def test_layer_groups_that_fit_the_ring_together_are_one_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcr_actors.devices.layer_groups.GROUP_BYTES", 1)
    bench = Bench(LAYOUTS["hybrid"], layers=layers_of(LAYOUTS["hybrid"]))
    plan = random_plan(random.Random(3), bench.layout, Direction.TO_DEVICE, 2, PAGES, SLOTS)
    async with open_services() as services:
        await bench.device.open(services)
        bench.runtime.calls.clear()
        outcome = await bench.device.submit(plan).outcome()
        await bench.device.close(5)
    assert bench.runtime.calls["launch"] > 1
    assert outcome.slices == 1


@pytest.mark.parametrize("seed", range(20))
async def test_many_submits_of_both_directions_in_any_legal_order_move_the_right_bytes(seed: int) -> None:
    layout, rng = LAYOUTS["hybrid"], random.Random(seed)
    bench = Bench(layout, seed=seed, layers=layers_of(layout), staging_bytes=25_000)
    async with open_services() as services:
        await bench.device.open(services)
        for _ in range(4):
            out = random_plan(rng, layout, Direction.TO_HOST, 4, PAGES // 2, SLOTS // 2, run=2)
            back = random_plan(rng, layout, Direction.TO_DEVICE, 4, PAGES // 2, SLOTS // 2 - 1, run=2)
            # The halves of both pools that the other direction uses: their copies may overlap freely.
            back = CopyPlan(
                back.direction,
                tuple(
                    PoolCopy(
                        copy.pool,
                        array("q", [page + PAGES // 2 for page in copy.device_pages]),
                        array("q", [slot + SLOTS // 2 for slot in copy.host_slots]),
                    )
                    for copy in back.pools
                ),
            )
            hosts, _ = bench.expect(out)
            _, pools = bench.expect(back)
            operations = [bench.device.submit(plan) for plan in (out, back)]
            assert [(await operation.outcome()).failed for operation in operations] == [{}, {}]
            bench.check((hosts, pools))
        await bench.device.close(5)


async def backup_behind_a_late_writer(seed: int, *, fenced: bool, by_stream: bool = False) -> bool:
    """Whether the host has what the engine wrote just before the submit."""
    layout = LAYOUTS["one_plane"]
    bench = Bench(layout, seed=seed)
    plan = plan_copy(Direction.TO_HOST, [((range(PAGES),), (range(PAGES),))])
    written = random_bytes(bench.pools[0].shape)
    async with open_services() as services:
        await bench.device.open(services)
        bench.runtime.engine_runs(lambda: bench.pools[0].copy_(written))
        fence = bench.runtime.engine if by_stream else bench.runtime.record(bench.runtime.engine)
        early = bench.runtime.record(bench.runtime.stream())
        await bench.device.submit(plan, (early, fence) if fenced else (early,)).outcome()
        bench.runtime.finish()
        await bench.device.close(5)
    return torch.equal(bench.host.tensor(0)[:PAGES], written[0])


@pytest.mark.parametrize("by_stream", [False, True])
async def test_scenario_01_a_backup_waits_for_the_writer_of_its_pages(by_stream: bool) -> None:
    assert all([await backup_behind_a_late_writer(seed, fenced=True, by_stream=by_stream) for seed in range(8)])
    assert not all([await backup_behind_a_late_writer(seed, fenced=False) for seed in range(8)])


async def restore_over_a_late_reader(seed: int, *, fenced: bool) -> bool:
    """Whether a reader that was queued before the restore saw the old pages."""
    layout = LAYOUTS["one_plane"]
    bench = Bench(layout, seed=seed)
    plan = plan_copy(Direction.TO_DEVICE, [((range(PAGES),), (range(PAGES),))])
    old, seen = bench.pools[0].clone(), torch.zeros_like(bench.pools[0])
    async with open_services() as services:
        await bench.device.open(services)
        bench.runtime.engine_runs(lambda: seen.copy_(bench.pools[0]))
        fence = bench.runtime.record(bench.runtime.engine)
        await bench.device.submit(plan, (fence,) if fenced else ()).outcome()
        bench.runtime.finish()
        await bench.device.close(5)
    return torch.equal(old, seen)


async def test_a_restore_waits_for_the_last_reader_of_its_pages() -> None:
    assert all([await restore_over_a_late_reader(seed, fenced=True) for seed in range(8)])
    assert not all([await restore_over_a_late_reader(seed, fenced=False) for seed in range(8)])


async def test_a_staging_region_is_not_filled_before_its_last_user_is_through(monkeypatch: pytest.MonkeyPatch) -> None:
    async def slices_are_right(seed: int) -> bool:
        layout = LAYOUTS["one_plane"]
        bench = Bench(layout, seed=seed, staging_bytes=2048)
        plan = random_plan(random.Random(seed), layout, Direction.TO_HOST, PAGES, PAGES, SLOTS)
        async with open_services() as services:
            await bench.device.open(services)
            hosts, _ = bench.expect(plan)
            await bench.device.submit(plan).outcome()
            await bench.device.close(5)
        return torch.equal(bench.host.tensor(0), hosts[0])

    assert all([await slices_are_right(seed) for seed in range(8)])
    monkeypatch.setattr("kvcr_actors.devices.staging_ring.Region.events_before", lambda _: [])
    assert not all([await slices_are_right(seed) for seed in range(8)])


async def test_an_engine_that_waits_for_a_layer_reads_restored_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcr_actors.devices.layer_groups.GROUP_BYTES", 1)
    layout = LAYOUTS["hybrid"]

    async def layers_are_right(seed: int, *, waits: bool) -> bool:
        bench = Bench(layout, seed=seed, layers=[[0, 1, 2, 3], [0, 0, 1, 2, 3, 3], [1, 3]])
        plan = random_plan(random.Random(seed), layout, Direction.TO_DEVICE, 6, PAGES, SLOTS, run=3)
        _, expected = bench.expect(plan)
        right: list[bool] = []

        def read(layer: int) -> None:
            planes = {0: [layer], 1: [[0, 1], [2], [3], [4, 5]][layer], 2: [[], [0], [], [1]][layer]}
            right.extend(
                torch.equal(bench.pools[pool][of_pool], expected[pool][of_pool]) for pool, of_pool in planes.items()
            )

        async with open_services() as services:
            await bench.device.open(services)
            operation = bench.device.submit(plan)
            for layer in range(4):
                if waits:
                    bench.device.wait_layer(layer)
                bench.runtime.engine_runs(lambda layer=layer: read(layer))
            await operation.outcome()
            bench.runtime.finish()
            await bench.device.close(5)
        return all(right)

    assert all([await layers_are_right(seed, waits=True) for seed in range(10)])
    assert not all([await layers_are_right(seed, waits=False) for seed in range(10)])


@pytest.mark.parametrize("direct_bytes", [4096, 1 << 30])
@pytest.mark.parametrize("direction", list(Direction))
async def test_one_pools_refused_copy_fails_that_pool_and_moves_the_others(
    direction: Direction, direct_bytes: int
) -> None:
    layout = LAYOUTS["hybrid"]
    bench = Bench(layout, direct_bytes=direct_bytes)
    start = bench.host.address(1)
    bench.runtime.refused.append((start, start + SLOTS * layout.pools[1].page_bytes))
    plan = random_plan(random.Random(2), layout, direction, 5, PAGES, SLOTS)
    hosts, pools = bench.expect(plan)
    async with open_services() as services:
        await bench.device.open(services)
        outcome = await bench.device.submit(plan).outcome()
        await bench.device.close(5)
    assert set(outcome.failed) == {1}
    assert "pool swa: copy: cudaErrorInvalidValue" in outcome.failed[1]
    assert outcome.bytes == plan.bytes_for(layout) - 5 * layout.pools[1].page_bytes
    for pool in (0, 2):
        assert torch.equal(bench.host.tensor(pool), hosts[pool])
        assert torch.equal(bench.pools[pool], pools[pool])


async def test_a_pool_with_a_page_that_does_not_exist_fails_alone() -> None:
    layout = LAYOUTS["hybrid"]
    bench = Bench(layout)
    plan = plan_copy(Direction.TO_HOST, [(([1], [PAGES], [2]), ([1], [1], [1]))])
    async with open_services() as services:
        await bench.device.open(services)
        outcome = await bench.device.submit(plan).outcome()
        await bench.device.close(5)
    assert set(outcome.failed) == {1}
    assert torch.equal(bench.host.tensor(0)[1], bench.pools[0][:, 1].flatten())


async def test_a_kernel_that_cannot_be_launched_fails_the_submit_and_the_next_one_works() -> None:
    layout = LAYOUTS["one_plane"]
    bench = Bench(layout)
    plan = random_plan(random.Random(2), layout, Direction.TO_HOST, 5, PAGES, SLOTS)
    async with open_services() as services:
        await bench.device.open(services)
        launch = bench.runtime.launch

        def refuse(stream: Stream, call: Callable[[], None]) -> None:
            bench.runtime.launch = launch  # type: ignore[method-assign]
            raise RuntimeError("out of resources")

        bench.runtime.launch = refuse  # type: ignore[method-assign]
        operation = bench.device.submit(plan)
        assert "out of resources" in (await operation.outcome()).failed[0]
        assert operation.is_quiet
        expected = bench.expect(plan)
        assert (await bench.device.submit(plan).outcome()).failed == {}
        bench.check(expected)
        await bench.device.close(5)


async def test_a_lost_device_ends_every_submit_and_close() -> None:
    bench = Bench(LAYOUTS["one_plane"])
    plan = random_plan(random.Random(2), bench.layout, Direction.TO_DEVICE, 5, PAGES, SLOTS)
    async with open_services() as services:
        await bench.device.open(services)
        bench.runtime.lost = True
        bench.runtime.engine_runs(lambda: None)
        operations = [bench.device.submit(plan, (bench.runtime.record(bench.runtime.engine),)) for _ in range(3)]
        for operation in operations:
            assert "lost" in (await operation.outcome()).failed[0]
        await bench.device.close(5)


async def test_close_names_copies_that_do_not_end_and_leaves_their_memory_not_quiet() -> None:
    bench = Bench(LAYOUTS["one_plane"])
    plan = random_plan(random.Random(2), bench.layout, Direction.TO_HOST, 5, PAGES, SLOTS)
    async with open_services() as services:
        await bench.device.open(services)
        never = Event()
        operation = bench.device.submit(plan, (never,))
        with pytest.raises(DeadlineError, match="kvcr-wait-to_host"):
            await bench.device.close(0.05)
        assert operation.is_settled
        assert not operation.is_quiet
        never.is_over = True
        bench.runtime.engine_runs(lambda: None)  # wakes whoever waits
        with anyio.fail_after(15):
            await operation.quiet()


async def test_runs_end_at_the_borders_of_registered_chunks() -> None:
    layout = LAYOUTS["hybrid"]
    bench = Bench(layout, chunk_bytes=8192, staging_bytes=1 << 20)
    assert bench.host.chunk_slots(0) < SLOTS
    async with open_services() as services:
        await bench.device.open(services)
        for direction in Direction:
            plan = plan_copy(direction, [((range(12),) * 3, (range(12),) * 3)])
            expected = bench.expect(plan)
            assert (await bench.device.submit(plan).outcome()).failed == {}
            bench.check(expected)
        await bench.device.close(5)


async def test_planes_may_be_any_tensors_of_the_engines() -> None:
    layout = LAYOUTS["mla_and_indexer"]
    runtime = ScheduledRuntime(0)
    host = HostPools(layout, SLOTS, registrar=runtime)
    # Pages of two planes lie side by side, as in engines that keep K and V of a page together.
    latent = [random_bytes((PAGES, 2, 1152)).view(torch.bfloat16) for _ in range(2)]
    planes = [
        [pair[:, half] for pair in latent for half in range(2)],
        [random_bytes((PAGES, 132)).view(torch.float32).view(PAGES, 11, 3) for _ in range(4)],
    ]
    device = CopyEngine(layout, planes, host, runtime, staging_bytes=RING, mover=TorchMover(PlaneTable(layout, planes)))
    async with open_services() as services:
        await device.open(services)
        plan = plan_copy(Direction.TO_HOST, [(([3], [4]), ([5], [6]))])
        assert (await device.submit(plan).outcome()).failed == {}
        await device.close(5)
    rows = [plane[3].contiguous().view(torch.uint8) for plane in planes[0]]
    assert torch.equal(host.tensor(0)[5], torch.cat(rows))
    rows = [plane[4].contiguous().view(torch.uint8).flatten() for plane in planes[1]]
    assert torch.equal(host.tensor(1)[6], torch.cat(rows))


def test_misfits_are_refused_by_name_before_anything_is_taken() -> None:
    layout = LAYOUTS["hybrid"]
    runtime = ScheduledRuntime(0)
    host = HostPools(layout, SLOTS, registrar=runtime)
    pools = [random_bytes((pool.planes, PAGES, pool.plane_bytes)) for pool in layout.pools]
    planes = [pool.unbind(0) for pool in pools]
    with pytest.raises(ConfigError, match="not registered"):
        CopyEngine(layout, planes, HostPools(layout, SLOTS), runtime)
    with pytest.raises(ConfigError, match="another layout"):
        CopyEngine(LAYOUTS["odd"], planes, host, runtime)
    with pytest.raises(ConfigError, match="staging_bytes"):
        CopyEngine(layout, planes, host, runtime, staging_bytes=16_000)
    with pytest.raises(ConfigError, match="index_bytes: 100"):
        CopyEngine(layout, planes, host, runtime, index_bytes=100)
    with pytest.raises(ConfigError, match="planes: 2 lists for 3 pools"):
        CopyEngine(layout, planes[:2], host, runtime)
    with pytest.raises(ConfigError, match="pool swa: a plane is on meta, the first on cpu"):
        CopyEngine(layout, [planes[0], [plane.to("meta") for plane in planes[1]], planes[2]], host, runtime)
    on_meta = [[plane.to("meta") for plane in of_pool] for of_pool in planes]
    with pytest.raises(ConfigError, match="the planes are on meta, the runtime is for cpu"):
        CopyEngine(layout, on_meta, host, runtime)
    with pytest.raises(ConfigError, match="pool swa: 5 planes"):
        CopyEngine(layout, [planes[0], planes[1][:5], planes[2]], host, runtime)
    with pytest.raises(ConfigError, match="no contiguous pages"):
        CopyEngine(layout, [[plane[:, ::2] for plane in planes[0]], *planes[1:]], host, runtime)
    with pytest.raises(ConfigError, match="ascending"):
        CopyEngine(layout, planes, host, runtime, layers=[[0, 1, 3, 2], [0] * 6, [0, 0]])
    with pytest.raises(ConfigError, match="GPU"):
        CudaDevice(layout, planes, host)
    with pytest.raises(ConfigError, match="planes: 0 lists"):
        CudaDevice(layout, [], host)


async def test_the_engine_never_waits_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the index buffer's reuse may block the launching thread, and that only after a whole lap."""
    bench = Bench(LAYOUTS["one_plane"])
    launched = CopyLane.launch
    waits: list[Event] = []

    def launch(self: CopyLane[Stream, Event], job: object) -> None:
        synchronize = bench.runtime.synchronize
        bench.runtime.synchronize = waits.append  # type: ignore[method-assign,assignment]
        launched(self, job)  # type: ignore[arg-type]
        bench.runtime.synchronize = synchronize  # type: ignore[method-assign]

    monkeypatch.setattr(CopyLane, "launch", launch)
    plan = random_plan(random.Random(2), bench.layout, Direction.TO_HOST, 5, PAGES, SLOTS)
    async with open_services() as services:
        await bench.device.open(services)
        for _ in range(20):
            await bench.device.submit(plan).outcome()
        await bench.device.close(5)
    assert waits == []
