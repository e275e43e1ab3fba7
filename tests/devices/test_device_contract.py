"""The device contract over every device of the package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import anyio
import pytest
import torch

from kvcr_actors.devices.cpu import CpuDevice, CpuFence
from kvcr_actors.devices.cuda import CopyEngine
from kvcr_actors.devices.foreign_host import ForeignHostPools
from kvcr_actors.devices.host_memory import HostPools
from kvcr_actors.testing.device_contract import EVERY_DEVICE, DeviceCheck
from kvcr_actors.testing.device_driver import DeviceBench
from kvcr_actors.testing.devices import LoopDevice
from kvcr_actors.testing.host_memory import BytesHostMemory
from kvcr_actors.testing.store_driver import LAYOUT
from tests.devices.engine_bench import Bench, layers_of

pytestmark = pytest.mark.anyio
each_check = pytest.mark.parametrize("check", EVERY_DEVICE, ids=lambda check: check.__name__)


def tensor_of(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def bench_of_cpu(device: CpuDevice) -> DeviceBench:
    def make_fence() -> tuple[object, Callable[[], None]]:
        fence = CpuFence()
        return fence, fence.set

    return DeviceBench(
        device,
        lambda pool, pages, content: device.load(pool, pages, tensor_of(content)),
        lambda pool, pages: device.gather(pool, pages).numpy().tobytes(),
        make_fence,
    )


def cpu_bench(**options: int) -> DeviceBench:
    return bench_of_cpu(CpuDevice(LAYOUT, [8, 20, 11], HostPools(LAYOUT, 30), **options))


def engines_tensors_bench() -> DeviceBench:
    """The engine's own planes and slots, of another number in each pool."""
    planes = [
        [torch.zeros((9 + pool, spec.plane_bytes), dtype=torch.uint8) for _ in range(spec.planes)]
        for pool, spec in enumerate(LAYOUT.pools)
    ]
    slots = [[torch.zeros((12 - pool, spec.page_bytes), dtype=torch.uint8)] for pool, spec in enumerate(LAYOUT.pools)]
    return bench_of_cpu(CpuDevice(LAYOUT, planes=planes, host=ForeignHostPools(LAYOUT, slots)))


def loop_bench() -> DeviceBench:
    device = LoopDevice(LAYOUT, 9, BytesHostMemory(LAYOUT, 12))

    def make_fence() -> tuple[object, Callable[[], None]]:
        fence = anyio.Event()
        return fence, fence.set

    return DeviceBench(device, device.load, device.gather, make_fence)


def engine_bench(seed: int, **options: int) -> DeviceBench:
    """The CUDA device's whole path, on streams that run late and in any order that their events allow."""
    bench = Bench(LAYOUT, seed=seed, layers=layers_of(LAYOUT), **options)  # type: ignore[arg-type]
    device: CopyEngine = bench.device

    def load(pool: int, pages: Sequence[int], content: bytes) -> None:
        spec = LAYOUT.pools[pool]
        rows = tensor_of(content).view(len(pages), spec.planes, spec.plane_bytes)
        bench.pools[pool][:, list(pages)] = rows.transpose(0, 1)

    def gather(pool: int, pages: Sequence[int]) -> bytes:
        return bench.pools[pool][:, list(pages)].transpose(0, 1).contiguous().numpy().tobytes()

    return DeviceBench(device, load, gather, bench.runtime.gate)


THREADED = {
    "cpu": cpu_bench,
    "cpu in slices": partial(cpu_bench, staging_bytes=1),
    "cpu over an engine's tensors": engines_tensors_bench,
    "copy engine": partial(engine_bench, 1),
    "copy engine, other order": partial(engine_bench, 2),
    "copy engine in slices": partial(engine_bench, 3, staging_bytes=1600),
    "copy engine without staging": partial(engine_bench, 4, direct_bytes=40),
    "copy engine on the caller": partial(engine_bench, 5, launch_on_caller=True),
}


@pytest.mark.real_clock
@each_check
@pytest.mark.parametrize("make", THREADED.values(), ids=THREADED.keys())
async def test_devices_with_threads_keep_the_contract(make: Callable[[], DeviceBench], check: DeviceCheck) -> None:
    await check(make)


@each_check
async def test_the_device_without_threads_keeps_the_contract(check: DeviceCheck) -> None:
    await check(loop_bench)
