"""Host pools and page pools of others: any layout that an engine maps gives the bytes of a page-first one."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Sequence

import pytest
import torch

from kvcr_actors.core.copy_plan import CopyPlan, Direction, plan_copy
from kvcr_actors.devices.cpu import CpuDevice
from kvcr_actors.devices.cuda import CopyEngine
from kvcr_actors.devices.foreign_host import ForeignHostPools
from kvcr_actors.devices.row_mover import PlaneTable, TorchMover, TritonMover
from kvcr_actors.errors import ConfigError
from kvcr_actors.testing.services import open_services
from kvcr_actors.types import CacheLayout, PoolSpec
from tests.devices.engine_bench import RING, MakeMover
from tests.devices.harness import LAYOUTS, random_bytes
from tests.devices.scheduled_runtime import ScheduledRuntime

pytestmark = [pytest.mark.anyio, pytest.mark.real_clock]

PAGES = 20
SLOTS = (40, 24, 31)
"""Each pool has a number of its own."""

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
MOVERS = [pytest.param(TorchMover, id="torch"), pytest.param(TritonMover, id="triton", marks=needs_triton)]
FORMS = ["page_first", "page_first_with_gaps", "layer_first", "two_halves"]


class Rig:
    """An engine's page pools (pages first, planes first, or a tensor a plane) and its host memory in one of the forms.

    `borders` are those of registrations of `chunk` bytes, which divide neither pages nor planes.
    """

    def __init__(self, layout: CacheLayout, form: str, seed: int, chunk: int = 0) -> None:
        self.layout = layout
        self.rng = random.Random(seed)
        self.planes = [self._device_planes(spec) for spec in layout.pools]
        self.runs = [_host_runs(spec, form, SLOTS[pool]) for pool, spec in enumerate(layout.pools)]
        self.ranges: list[tuple[int, int]] = []
        for run in [run for of_pool in self.runs for run in of_pool]:
            storage = run.untyped_storage()
            if chunk and (storage.data_ptr(), 0) not in [(start, 0) for start, _ in self.ranges]:
                self.ranges += [
                    (storage.data_ptr() + at, min(chunk, storage.nbytes() - at))
                    for at in range(0, storage.nbytes(), chunk)
                ]
        borders = sorted({address for start, size in self.ranges for address in (start, start + size)})
        self.host = ForeignHostPools(layout, self.runs, borders=borders, registered=True)

    def _device_planes(self, spec: PoolSpec) -> list[torch.Tensor]:
        kind = self.rng.randrange(3)
        if kind == 0:
            return list(random_bytes((PAGES, spec.planes, spec.plane_bytes)).unbind(1))
        if kind == 1:
            return list(random_bytes((spec.planes, PAGES, spec.plane_bytes)).unbind(0))
        return [random_bytes((PAGES, spec.plane_bytes)) for _ in range(spec.planes)]

    def plan(self, direction: Direction, count: int) -> CopyPlan:
        pools = range(len(self.layout.pools))
        pages = tuple(self.rng.sample(range(PAGES), count) for _ in pools)
        slots: list[list[int]] = []
        for pool in pools:
            start = self.rng.randrange(SLOTS[pool] - count)
            neighbours = list(range(start, start + count))
            slots.append(self.rng.choice([neighbours, self.rng.sample(range(SLOTS[pool]), count)]))
        return plan_copy(direction, [(pages, tuple(slots))])

    def host_pages(self, pool: int) -> torch.Tensor:
        """[slots, page_bytes]"""
        return torch.cat([view.flatten(1) for view in self.host.views(pool)], dim=1)

    def device_pages(self, pool: int) -> torch.Tensor:
        return torch.cat([plane.flatten(1) for plane in self.planes[pool]], dim=1)

    async def check(self, device: CpuDevice | CopyEngine[object, object]) -> None:
        for direction in (*Direction, *Direction):
            plan = self.plan(direction, self.rng.choice([1, 7, 15]))
            expected = [(self.host_pages(pool), self.device_pages(pool)) for pool in range(len(self.layout.pools))]
            for copy in plan.pools:
                host, pages = expected[copy.pool]
                for page, slot in zip(copy.device_pages, copy.host_slots, strict=True):
                    if direction is Direction.TO_HOST:
                        host[slot] = pages[page]
                    else:
                        pages[page] = host[slot]
            outcome = await device.submit(plan).outcome()
            assert outcome.failed == {}
            for pool, (host, pages) in enumerate(expected):
                assert torch.equal(self.host_pages(pool), host)
                assert torch.equal(self.device_pages(pool), pages)


def _host_runs(spec: PoolSpec, form: str, slots: int) -> list[torch.Tensor]:
    if form == "page_first":
        return [random_bytes((slots, spec.page_bytes))]
    if form == "page_first_with_gaps":
        return [random_bytes((slots, spec.page_bytes + 64))[:, : spec.page_bytes]]
    if form == "layer_first":
        return list(random_bytes((spec.planes, slots, spec.plane_bytes)).unbind(0))
    half = spec.planes // 2
    return [random_bytes((slots, n * spec.plane_bytes)) for n in (half, spec.planes - half) if n]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(3))
async def test_a_cpu_device_moves_between_an_engines_tensors_and_its_host_memory(
    name: str, form: str, seed: int
) -> None:
    rig = Rig(LAYOUTS[name], form, seed)
    staging = rig.rng.choice([1, 1 << 20])
    device = CpuDevice(rig.layout, host=rig.host, planes=rig.planes, staging_bytes=staging)
    async with open_services() as services:
        await device.open(services)
        await rig.check(device)
        await device.close(5)


@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunk", [0, 1000])
async def test_a_copy_engine_does_so_and_crosses_no_registration(
    name: str, form: str, chunk: int, mover: MakeMover
) -> None:
    rig = Rig(LAYOUTS[name], form, seed=len(name), chunk=chunk)
    runtime = ScheduledRuntime(chunk)
    for start, size in rig.ranges:
        runtime.register(start, size)
    device = CopyEngine(
        rig.layout,
        rig.planes,
        rig.host,
        runtime,
        staging_bytes=RING,
        index_bytes=64 << 10,
        direct_bytes=rig.rng.choice([256, 1 << 30]),
        mover=mover(PlaneTable(rig.layout, rig.planes)),
    )
    async with open_services() as services:
        await device.open(services)
        await rig.check(device)
        await device.close(5)


async def test_without_its_borders_a_copy_across_two_registrations_fails() -> None:
    rig = Rig(LAYOUTS["hybrid"], "layer_first", seed=1, chunk=1000)
    host = ForeignHostPools(rig.layout, rig.runs, registered=True)
    runtime = ScheduledRuntime(1)
    for start, size in rig.ranges:
        runtime.register(start, size)
    device = CopyEngine(rig.layout, rig.planes, host, runtime, staging_bytes=RING, index_bytes=64 << 10)
    async with open_services() as services:
        await device.open(services)
        slots = tuple(list(range(10)) for _ in rig.layout.pools)
        outcome = await device.submit(plan_copy(Direction.TO_HOST, [(slots, slots)])).outcome()
        assert "cudaErrorInvalidValue" in outcome.failed[0]
        await device.close(5)


LAYOUT = CacheLayout((PoolSpec("kv", 2, 8),))


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ([], "0 lists for 1 pools"),
        ([[torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(5, 8, dtype=torch.uint8)]], r"\[4, 5\] slots"),
        ([[torch.zeros(4, 8, dtype=torch.uint8)]], "its runs hold 1 planes, its layout has 2"),
        ([[torch.zeros(4, 12, dtype=torch.uint8)]], "no contiguous slots of whole planes"),
        ([[torch.zeros(16, 4, dtype=torch.uint8).t()]], "no contiguous slots"),
        ([[torch.zeros(4, 16, dtype=torch.uint8, device="meta")]], "is on meta"),
    ],
)
def test_a_misfit_is_refused_by_the_pools_name(runs: Sequence[Sequence[torch.Tensor]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ForeignHostPools(LAYOUT, runs)


def test_only_page_first_memory_has_a_flat_buffer() -> None:
    words = torch.zeros((4, 2), dtype=torch.int64)
    host = ForeignHostPools(LAYOUT, [[words]])
    host.buffer(0)[16:18] = b"\1\2"
    assert words[1, 0] == 0x0201
    host.poison(0, [3])
    assert bytes(host.buffer(0)[48:]) == b"\xdb" * 16
    layers = ForeignHostPools(LAYOUT, [[words[:, 0].contiguous(), words[:, 1].contiguous()]])
    with pytest.raises(ConfigError, match="host pool kv: its pages are not contiguous"):
        layers.buffer(0)


def test_a_device_takes_either_pages_or_planes() -> None:
    host = ForeignHostPools(LAYOUT, [[torch.zeros((4, 16), dtype=torch.uint8)]])
    planes = [[torch.zeros((3, 8), dtype=torch.uint8)] * 2]
    with pytest.raises(ConfigError, match="give either `pages`"):
        CpuDevice(LAYOUT, host=host)
    with pytest.raises(ConfigError, match="give either `pages`"):
        CpuDevice(LAYOUT, 3, host, planes=planes)
    with pytest.raises(ConfigError, match="host: give the host pools"):
        CpuDevice(LAYOUT, planes=planes)
    with pytest.raises(ConfigError, match="the engine's own tensors"):
        CpuDevice(LAYOUT, host=host, planes=planes).pool_view(0)
