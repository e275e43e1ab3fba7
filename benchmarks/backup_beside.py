"""What the engine feels: kernels beside continuous copies, and how soon and at what cost a completion is noticed."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable
from statistics import mean, median, quantiles, stdev

import attrs
import torch

from benchmarks.gpu_rig import BOTH, NODES, STAGING, Limit, Rig, Row, hybrid_shape, open_rig
from kvcr_actors.core.copy_plan import CopyPlan, Direction

NOTICES = 300
BURST_S = 0.05
ROUNDS = 24
EDGE_MS = 8.0
"""Left out around each change, so that a kernel is counted only where copies ran all the time, or never."""


async def neighbours() -> list[Row]:
    """How much a kernel slows down beside continuous copies: bursts of copies under one unbroken row of kernels.

    Both kinds of time see the same clocks and power, which drift by more than what is sought.
    """
    rows: list[Row] = []
    matrices = [torch.randn((8192, 8192), device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    vectors = [torch.randn(1 << 29, device="cuda", dtype=torch.float32) for _ in range(2)]
    kernels: dict[str, Callable[[], object]] = {
        "GEMM 8192^3 bf16": lambda: torch.matmul(matrices[0], matrices[1], out=matrices[2]),
        "memory-bound (2 GiB read, 2 GiB written)": lambda: torch.mul(vectors[0], 1.5, out=vectors[1]),
    }
    limit = Limit(NODES * hybrid_shape().node_bytes())
    async with open_rig(hybrid_shape(), 128, staging_bytes=2 * STAGING) as rig:
        for direction, name in BOTH:
            plan = rig.plans(direction, NODES)[0]
            for kernel, call in kernels.items():
                product = await _slowdowns(call, lambda plan=plan: _burst(rig, plan))
                plain = await _slowdowns(call, lambda direction=direction: _plain_burst(limit, direction))
                rows.append(
                    {
                        "copies": name,
                        "kernel": kernel,
                        "alone ms": round(product.alone_ms, 4),
                        "slower beside the product": f"{product.slower:+.2%}",
                        "standard error": f"{product.error:.2%}",
                        "copies GB/s": round(product.gbs, 1),
                        "slower beside plain contiguous copies": f"{plain.slower:+.2%}",
                        "their standard error": f"{plain.error:.2%}",
                    }
                )
    limit.close()
    return rows


@attrs.frozen
class Slowdown:
    """Of one kernel: its time alone, and how much longer it took beside copies."""

    alone_ms: float
    slower: float
    error: float
    gbs: float


async def _slowdowns(call: Callable[[], object], burst: Callable[[], Awaitable[int]]) -> Slowdown:
    """Keep the engine's stream full of calls; copy in bursts; compare each burst with the pauses beside it."""
    starts: list[torch.cuda.Event] = []
    stop = asyncio.Event()
    origin = torch.cuda.Event(enable_timing=True)
    origin.record()
    feeder = asyncio.create_task(_feed(call, starts, stop))
    await asyncio.sleep(0.4)
    clock = torch.cuda.Stream()
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    moved, seconds = 0, 0.0
    for _ in range(ROUNDS):
        begin = _mark(clock)
        before = time.perf_counter()
        moved += await burst()
        seconds += time.perf_counter() - before
        marks.append((begin, _mark(clock)))
        await asyncio.sleep(BURST_S)
    stop.set()
    await feeder
    torch.cuda.synchronize()
    times = [origin.elapsed_time(event) for event in starts]
    bounds = [(origin.elapsed_time(begin), origin.elapsed_time(end)) for begin, end in marks]
    beside = [_mean_between(times, begin + EDGE_MS, end - EDGE_MS) for begin, end in bounds]
    pauses = [
        _mean_between(times, end + EDGE_MS, after - EDGE_MS) for (_, end), (after, _) in itertools.pairwise(bounds)
    ]
    ratios = [
        of_burst / ((left + right) / 2) - 1
        for of_burst, (left, right) in zip(beside[1:], itertools.pairwise(pauses), strict=False)
    ]
    return Slowdown(median(pauses), mean(ratios), stdev(ratios) / len(ratios) ** 0.5, moved / seconds / 1e9)


async def _feed(call: Callable[[], object], starts: list[torch.cuda.Event], stop: asyncio.Event) -> None:
    """Launch calls, each behind an event, at most 30 ahead of the device."""
    while not stop.is_set():
        if len(starts) > 30 and not starts[-30].query():
            await asyncio.sleep(0.002)
            continue
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        call()
        starts.append(event)
        if len(starts) % 10 == 0:
            await asyncio.sleep(0)


def _mark(idle: torch.cuda.Stream) -> torch.cuda.Event:
    """The present moment on the device's clock."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(idle)
    return event


def _mean_between(times: list[float], begin: float, end: float) -> float:
    """Mean milliseconds of the calls that began and ended in an interval."""
    first, last = bisect_left(times, begin), bisect_left(times, end) - 1
    return (times[last] - times[first]) / (last - first)


async def _burst(rig: Rig, plan: CopyPlan) -> int:
    """Two submits in flight for a while; the bytes moved."""
    end = time.perf_counter() + BURST_S
    moved = 0

    async def copy() -> None:
        nonlocal moved
        while time.perf_counter() < end:
            outcome = await rig.copier.submit(plan).outcome()
            assert outcome.failed == {}
            moved += outcome.bytes

    async with asyncio.TaskGroup() as tasks:
        for _ in range(2):
            tasks.create_task(copy())
    return moved


async def _plain_burst(limit: Limit, direction: Direction) -> int:
    copies = round(BURST_S * 55e9 / limit.size)
    limit.start(direction, copies)
    over = torch.cuda.Event()
    over.record(limit.stream)
    await _until(over.query)
    return copies * limit.size


async def idle() -> list[Row]:
    """How soon an idle process notices a completion, on the waiting thread and on the loop, and what waiting costs."""
    rows: list[Row] = []
    async with open_rig(hybrid_shape(), NODES) as rig:
        for nodes in (1, NODES):
            plan = rig.plans(Direction.TO_HOST, nodes)[0]
            delays = [await _notice_us(rig, plan) for _ in range(NOTICES)]
            thread, loop = (sorted(delay[side] for delay in delays) for side in range(2))
            busy, wall = time.process_time(), time.perf_counter()
            for _ in range(10):
                await rig.copier.submit(plan, (rig.fence_behind(100.0),)).outcome()
                await asyncio.sleep(0.1)
            share = (time.process_time() - busy) / (time.perf_counter() - wall)
            rows.append(
                {
                    "nodes": nodes,
                    "notices": NOTICES,
                    "waiting thread knows, us": round(median(thread)),
                    "loop knows, us": round(median(loop)),
                    "p99": round(quantiles(loop, n=100)[98]),
                    "most": round(loop[-1]),
                    "within 1 ms": f"{sum(delay <= 1000 for delay in loop) / len(loop):.1%}",
                    "process, of a core": f"{share:.2%}",
                }
            )
    return rows


async def _notice_us(rig: Rig, plan: CopyPlan) -> tuple[float, float]:
    """Microseconds from the end that a spinning thread sees to the waiting thread, and to the outcome on the loop."""
    seen: list[float] = []
    rig.runtime.reference = None
    operation = rig.copier.submit(plan, (rig.fence_behind(8.0),))
    await _until(lambda: rig.runtime.reference is not None)
    reference = rig.runtime.reference
    assert reference is not None

    def spin() -> None:
        reference.synchronize()
        seen.append(time.perf_counter())

    thread = threading.Thread(target=spin)
    thread.start()
    await operation.outcome()
    told = time.perf_counter()
    thread.join(5)
    return (rig.runtime.woken - seen[0]) * 1e6, (told - seen[0]) * 1e6


async def _until(happened: Callable[[], bool], deadline_s: float = 30.0) -> None:
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if happened():
            return
        await asyncio.sleep(0.0003)
    raise TimeoutError(f"not within {deadline_s} s")
