# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
"""What the GPU benchmarks share: page pools of a shape, the device under test with its launches timed, byte checks."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from statistics import median
from typing import Any

import attrs
import torch

from kvcr_actors.core.copy_plan import CopyPlan, Direction, plan_copy
from kvcr_actors.devices.copy_lane import CopyJob
from kvcr_actors.devices.cuda import CopyEngine
from kvcr_actors.devices.cuda_runtime import CudaRuntime
from kvcr_actors.devices.host_memory import POISON_BYTE, HostPools
from kvcr_actors.testing.services import open_services
from kvcr_actors.types import CacheLayout, Components, PoolSpec

Row = dict[str, Any]

MIB = 1 << 20
NODES = 64
STAGING = 352 * MIB
BOTH = ((Direction.TO_HOST, "device to host"), (Direction.TO_DEVICE, "host to device"))
CYCLES_A_MS = 1_900_000
"""For `torch.cuda._sleep`: about a millisecond."""


@attrs.frozen
class Shape:
    """A model's pools: `per_node[pool]` pages a node, `layers[pool][plane]` the layer that reads a plane first."""

    name: str
    layout: CacheLayout
    per_node: tuple[int, ...]
    layers: tuple[tuple[int, ...], ...]

    def node_bytes(self) -> int:
        return sum(pool.page_bytes * count for pool, count in zip(self.layout.pools, self.per_node, strict=True))


def hybrid_shape() -> Shape:
    """7 full and 35 sliding-window layers, every sixth full, and two layers with a recurrent state of 1 MiB each."""
    layout = CacheLayout((PoolSpec("kv", 14, 16 << 10), PoolSpec("swa", 70, 16 << 10), PoolSpec("mamba", 2, MIB)))
    recurrent = (15, 30)
    attention = [layer for layer in range(44) if layer not in recurrent]
    full = attention[5::6]
    window = [layer for layer in attention if layer not in full]
    layers = (tuple(sorted(full * 2)), tuple(sorted(window * 2)), recurrent)
    return Shape("hybrid", layout, (4, 2, 1), layers)


def uniform_shape() -> Shape:
    """42 full-attention layers, 32 KiB a page and layer."""
    layout = CacheLayout((PoolSpec("kv", 84, 16 << 10),))
    return Shape("uniform", layout, (4,), (tuple(sorted(list(range(42)) * 2)),))


class TimedRuntime(CudaRuntime):
    """The product's runtime with events that carry times; `ends` has those that a submit or a layer group ends with."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.ends: list[torch.cuda.Event] = []
        self.reference: torch.cuda.Event | None = None
        """The last end once more, as an event that a thread spins on."""
        self.woken = 0.0
        """When a waiting thread came back from the driver last."""

    def record(self, stream: torch.cuda.Stream, *, blocking: bool = False) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True, blocking=blocking)
        event.record(stream)
        if blocking:
            self.ends.append(event)
            self.reference = torch.cuda.Event()
            self.reference.record(stream)
        return event

    def synchronize(self, event: torch.cuda.Event) -> None:
        super().synchronize(event)
        self.woken = time.perf_counter()


@attrs.frozen
class Timing:
    """Medians over the repetitions of one way of copying; times in microseconds, rates in GB/s."""

    caller_us: float
    """In `submit`, on the loop's thread."""
    launch_us: float
    """On the launching thread."""
    device_gbs: float
    """From the fence to the last byte, with the launch done while the device was busy: the copy engine's view."""
    wall_gbs: float
    """From the call of `submit` on an idle device to the outcome on the loop."""


class Rig:
    """One device with pools for `nodes` nodes of a shape; every plan uses pages in random order."""

    def __init__(self, shape: Shape, nodes: int, *, staging_bytes: int, spread: int = 1) -> None:
        self.shape = shape
        self.nodes = nodes
        self.rng = random.Random(0)
        self.device = torch.device("cuda", 0)
        self.runtime = TimedRuntime(self.device)
        self.pools = [
            torch.empty((pool.planes, nodes * count, pool.plane_bytes), dtype=torch.uint8, device=self.device)
            for pool, count in zip(shape.layout.pools, shape.per_node, strict=True)
        ]
        slots = spread * nodes * max(shape.per_node)
        self.host = HostPools(shape.layout, slots, registrar=self.runtime)
        self.copier = CopyEngine(
            shape.layout,
            [pool.unbind(0) for pool in self.pools],
            self.host,
            self.runtime,
            layers=shape.layers,
            staging_bytes=staging_bytes,
        )
        self.launch_us: list[float] = []
        self.fill()

    def time_launches(self) -> None:
        """Call after `open`: the launching thread's time of each submit goes to `launch_us`."""
        for lane in self.copier._lanes.values():
            lane.launch = self._timed(lane.launch)  # pyright: ignore[reportAttributeAccessIssue]

    def _timed(
        self, launch: Callable[[CopyJob[torch.cuda.Event]], None]
    ) -> Callable[[CopyJob[torch.cuda.Event]], None]:
        def timed(job: CopyJob[torch.cuda.Event]) -> None:
            begin = time.perf_counter()
            launch(job)
            self.launch_us.append((time.perf_counter() - begin) * 1e6)

        return timed

    def set_groups(self, most_groups: int) -> None:
        """Call after `open`: the most layer groups of later restores."""
        for lane in self.copier._lanes.values():
            lane._shared = attrs.evolve(lane._shared, most_groups=most_groups)

    def fill(self) -> None:
        """Put fresh random bytes into the device pools."""
        for pool in self.pools:
            pool.random_(0, 256)
        torch.cuda.synchronize()

    def plans(
        self, direction: Direction, nodes: int, *, by: str = "step", run_pages: Sequence[int] = ()
    ) -> list[CopyPlan]:
        """The plans of one step of `nodes` nodes: one, one a pool, one a node, or one a node and pool.

        Host slots are one run a pool, or scattered runs of `run_pages[pool]` pages.
        """
        pages: list[list[int]] = []
        slots: list[list[int]] = []
        for pool, count in enumerate(self.shape.per_node):
            wanted = nodes * count
            pages.append(self.rng.sample(range(self.nodes * count), wanted))
            slots.append(self._slots(wanted, run_pages[pool] if run_pages else wanted))
        nothing = [[-1] * 0 for _ in pages]
        parts: list[tuple[Components, Components]] = []
        pools = range(len(pages))
        for node in range(nodes) if "node" in by else range(1):
            for only in pools if "pool" in by else (None,):
                chosen = [
                    (pages[pool], slots[pool]) if only in (None, pool) else (nothing[pool], nothing[pool])
                    for pool in pools
                ]
                if "node" in by:
                    chosen = [
                        (of_pages[node * count : (node + 1) * count], of_slots[node * count : (node + 1) * count])
                        for (of_pages, of_slots), count in zip(chosen, self.shape.per_node, strict=True)
                    ]
                parts.append((tuple(pair[0] for pair in chosen), tuple(pair[1] for pair in chosen)))
        return [plan_copy(direction, [part]) for part in parts]

    def _slots(self, wanted: int, run: int) -> list[int]:
        if run >= wanted:
            return list(range(wanted))
        starts = range(0, self.host.slots - run, run + 1)
        chosen = self.rng.sample(starts, -(-wanted // run))
        return [start + offset for start in chosen for offset in range(run)][:wanted]

    async def check(self, plans: Sequence[CopyPlan]) -> None:
        """Run plans over fresh random bytes, and compare every byte that they name."""
        direction = plans[0].direction
        self.fill()
        for pool in range(len(self.pools)):
            host = self.host.tensor(pool)
            if direction is Direction.TO_DEVICE:
                host.copy_(torch.randint(0, 256, host.shape, dtype=torch.uint8, device=self.device))
            else:
                host.fill_(POISON_BYTE)
        for plan in plans:
            outcome = await self.copier.submit(plan).outcome()
            assert outcome.failed == {}, outcome.failed
        for plan in plans:
            for copy in plan.pools:
                pages = torch.tensor(list(copy.device_pages), device=self.device)
                device = self.pools[copy.pool][:, pages].transpose(0, 1).flatten(1).cpu()
                host = torch.index_select(self.host.tensor(copy.pool), 0, torch.tensor(list(copy.host_slots)))
                assert torch.equal(device, host), "bytes differ"

    async def measure(self, plans: Sequence[CopyPlan], repeats: int) -> Timing:
        """Time the plans of one step together, after a check of their bytes."""
        await self.check(plans)
        size = sum(plan.bytes_for(self.shape.layout) for plan in plans)
        caller: list[float] = []
        launch: list[float] = []
        device: list[float] = []
        wall: list[float] = []
        for _ in range(repeats):
            self.launch_us.clear()
            begin = time.perf_counter()
            operations = [self.copier.submit(plan) for plan in plans]
            caller.append((time.perf_counter() - begin) * 1e6)
            for operation in operations:
                await operation.outcome()
            wall.append(time.perf_counter() - begin)
            launch.append(sum(self.launch_us))
            device.append(await self.device_seconds(plans))
        return Timing(median(caller), median(launch), size / median(device) / 1e9, size / median(wall) / 1e9)

    async def device_seconds(self, plans: Sequence[CopyPlan]) -> float:
        """Seconds from the fence to the last end, with the launch done while the device was busy."""
        fence = self.fence_behind(3.0, plans[0].direction)
        for operation in [self.copier.submit(plan, (fence,)) for plan in plans]:
            await operation.outcome()
        return fence.elapsed_time(self.runtime.ends[-1]) / 1e3

    def fence_behind(self, busy_ms: float, hold: Direction | None = None) -> torch.cuda.Event:
        """Keep the engine's stream busy, and record a fence behind that.

        With `hold` the host copies of that direction wait for it too: those of a restore need not, but then its rate
        would be counted from the fence for bytes copied before.
        """
        self.runtime.ends.clear()
        torch.cuda._sleep(int(busy_ms * CYCLES_A_MS))
        fence = torch.cuda.Event(enable_timing=True)
        fence.record()
        if hold is not None:
            self.copier._lanes[hold]._copies.wait_event(fence)
        return fence

    async def group_seconds(self, plan: CopyPlan) -> tuple[float, float]:
        """Of a restore: seconds from the fence to the first layer group and to the last."""
        fence = self.fence_behind(3.0, plan.direction)
        await self.copier.submit(plan, (fence,)).outcome()
        ends = self.runtime.ends
        return fence.elapsed_time(ends[0]) / 1e3, fence.elapsed_time(ends[-1]) / 1e3


class Limit:
    """One contiguous copy of the same bytes between the same kinds of memory: what nothing can beat."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.runtime = CudaRuntime(0)
        blocks = -(-size // MIB)
        self.host = HostPools(CacheLayout((PoolSpec("block", 1, MIB),)), blocks, registrar=self.runtime)
        self.buffer = torch.empty(size, dtype=torch.uint8, device="cuda").random_(0, 256)
        self.stream = self.runtime.stream()
        torch.cuda.synchronize()

    def close(self) -> None:
        torch.cuda.synchronize()
        self.host.close()

    def start(self, direction: Direction, copies: int) -> None:
        """Queue copies and return."""
        device, host = self.buffer.data_ptr(), self.host.address(0)
        target, source = (host, device) if direction is Direction.TO_HOST else (device, host)
        for _ in range(copies):
            self.runtime.copy(self.stream, [target], [source], [self.size])

    def measure(self, direction: Direction, repeats: int) -> Timing:
        device, host = self.buffer.data_ptr(), self.host.address(0)
        target, source = (host, device) if direction is Direction.TO_HOST else (device, host)
        copy = partial(self.runtime.copy, self.stream, [target], [source], [self.size])
        launch: list[float] = []
        wall: list[float] = []
        seconds: list[float] = []
        for _ in range(repeats):
            begin = time.perf_counter()
            copy()
            launch.append((time.perf_counter() - begin) * 1e6)
            self.runtime.synchronize(self.runtime.record(self.stream, blocking=True))
            wall.append(time.perf_counter() - begin)
            torch.cuda._sleep(3 * CYCLES_A_MS)
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            self.stream.wait_event(first)
            copy()
            last.record(self.stream)
            last.synchronize()
            seconds.append(first.elapsed_time(last) / 1e3)
        mine = median(launch)
        return Timing(mine, mine, self.size / median(seconds) / 1e9, self.size / median(wall) / 1e9)


@asynccontextmanager
async def open_rig(shape: Shape, nodes: int, **options: Any) -> AsyncGenerator[Rig]:
    """A rig whose device is open, closed and unregistered at the end."""
    rig = Rig(shape, nodes, **{"staging_bytes": STAGING, **options})
    async with open_services() as services:
        await rig.copier.open(services)
        rig.time_launches()
        try:
            yield rig
        finally:
            await rig.copier.close(30)
            rig.host.close()
