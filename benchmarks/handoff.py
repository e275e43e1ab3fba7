"""What a step costs the scheduler's thread, from the first `write` to the return of `flush_pending_backups`.

A sample is one step of prebuilt nodes, new ones each time, with a page in each of three pools; the next step begins
when the actors have copied them to host memory and acknowledged them. Three ways feed the same actors in turn:

- handoff: the controller's own, on the calling thread;
- native: one `call_soon_threadsafe` (asyncio) or `run_sync_soon` (trio) a node;
- portal: one `BlockingPortal.start_task_soon` a node.

`idle` sleeps before each step, with nothing else running; `contended` shares the interpreter with a thread of pure
Python that wants the GIL all the time.

    python benchmarks/handoff.py [--rounds N] [--steps N] [--loop asyncio trio] [--markdown] [--json FILE]

A p50 is the median over the rounds of each round's median; a p99 is over all samples (the largest where they are few).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Literal, TypeAlias

import anyio
import attrs
from anyio.from_thread import BlockingPortal
from anyio.lowlevel import current_token
from rich import box
from rich.console import Console
from rich.table import Table
from trio.lowlevel import TrioToken

from kvcr_actors import BackupAck, BackupNode, CacheController, CacheLayout, PoolSpec, PrefetchRequest, TrailingPages
from kvcr_actors.devices.cpu import CpuDevice, CpuFence
from kvcr_actors.devices.host_memory import HostPools
from kvcr_actors.ports import Services

Loop: TypeAlias = Literal["asyncio", "trio"]
Condition: TypeAlias = Literal["idle", "contended"]
Way: TypeAlias = Literal["handoff", "native", "portal"]
HandOver: TypeAlias = Callable[[Sequence[BackupNode], CpuFence], None]

LOOPS: tuple[Loop, ...] = ("asyncio", "trio")
CONDITIONS: tuple[Condition, ...] = ("idle", "contended")
WAYS: tuple[Way, ...] = ("handoff", "native", "portal")
NODES = (1, 64, 512)
STEP_TARGET_US = 25.0
NODE_TARGET_US = 0.2

_LAYOUT = CacheLayout(
    (PoolSpec("kv", 2, 256), PoolSpec("swa", 2, 128, TrailingPages(2)), PoolSpec("mamba", 1, 512, TrailingPages(1)))
)
_HOST_PAGES = 8 * max(NODES)
_ACK_S = 60.0
_IDLE_S = 0.002
_PORTAL_MESSAGES = {"idle": 512, "contended": 32}
"""About how many messages a round may send by portal: beside a busy thread each takes a switch interval or two."""


@attrs.frozen
class Cost:
    """What one thing costs on the calling thread, in microseconds; `rounds_us` has each round's median."""

    loop: Loop
    condition: Condition
    way: str
    nodes: int
    p50_us: float
    p99_us: float
    samples: int
    rounds_us: tuple[float, ...]


class LentLoopDevice(CpuDevice):
    """A device that shows the rivals the way onto the loop of the actors."""

    portal: BlockingPortal
    call_soon: Callable[..., object]

    async def open(self, services: Services) -> None:
        """Start the copy thread and a portal on the same loop."""
        await super().open(services)
        token = current_token().native_token
        if isinstance(token, asyncio.AbstractEventLoop):
            self.call_soon = token.call_soon_threadsafe
        else:
            assert isinstance(token, TrioToken)
            self.call_soon = token.run_sync_soon
        ready = anyio.Event()

        async def serve() -> None:
            async with BlockingPortal() as self.portal:
                ready.set()
                await self.portal.sleep_until_stopped()

        services.spawn(serve, "rival portal")
        await ready.wait()


class Bench:
    """One controller on one loop, and the three ways to feed it. Steps never overlap."""

    def __init__(self, cache: CacheController, device: LentLoopDevice) -> None:
        self.cache = cache
        self._device = device
        self._made = 0
        self._missing = 0
        self._fence: CpuFence | None = None

    def sample(self, way: Way, count: int) -> float:
        """Microseconds on this thread for one step of `count` new nodes, which is then waited for."""
        hand_over: HandOver = {"handoff": self._handoff, "native": self._native, "portal": self._portal}[way]
        nodes = [self._new_node(page) for page in range(count)]
        fence = CpuFence()
        fence.set()
        self._missing, self._fence = count, fence
        started = perf_counter_ns()
        hand_over(nodes, fence)
        cost = perf_counter_ns() - started
        self._wait_for_ack(count)
        return cost / 1e3

    def sample_take(self, completions: int) -> float:
        """Microseconds of one `take` that finds so many completions."""
        if completions:
            for _ in range(completions):
                self._made += 1
                self.cache.prefetch(PrefetchRequest(self._made, (self._new_key(),)))
            self.cache.flush_pending_backups()
            self.cache.wait_quiet(_ACK_S)
        started = perf_counter_ns()
        taken = self.cache.take()
        cost = perf_counter_ns() - started
        assert len(taken) == completions
        return cost / 1e3

    def _handoff(self, nodes: Sequence[BackupNode], fence: CpuFence) -> None:
        write = self.cache.write
        for node in nodes:
            write(node, flush=False)
        self.cache.flush_pending_backups(fence)

    def _native(self, nodes: Sequence[BackupNode], fence: CpuFence) -> None:
        call_soon, receive = self._device.call_soon, self._receive
        for node in nodes:
            call_soon(receive, node)

    def _portal(self, nodes: Sequence[BackupNode], fence: CpuFence) -> None:
        start_task_soon, receive = self._device.portal.start_task_soon, self._receive
        for node in nodes:
            start_task_soon(receive, node)

    def _receive(self, node: BackupNode) -> None:
        """On the loop: the rivals' messages arrive one by one, the last of a step flushes."""
        self.cache.write(node, flush=False)
        self._missing -= 1
        if not self._missing:
            self.cache.flush_pending_backups(self._fence)

    def _wait_for_ack(self, count: int) -> None:
        while self.cache.wait(_ACK_S):
            for completion in self.cache.take():
                assert isinstance(completion, BackupAck), completion
                assert len(completion.node_ids) == count, completion.failed
                return
        raise TimeoutError(f"a step of {count} nodes was not acknowledged in {_ACK_S:g} s")

    def _new_key(self) -> bytes:
        self._made += 1
        return self._made.to_bytes(32, "big")

    def _new_node(self, page: int) -> BackupNode:
        key = self._new_key()
        return BackupNode(self._made, (key,), ((page,), (page,), (page,)))


@contextmanager
def surroundings(condition: Condition) -> Generator[None]:
    """Nothing, or a thread that computes in pure Python until the block ends."""
    done = False

    def spin() -> None:
        turns = 0
        while not done:
            turns += 1

    if condition == "idle":
        yield
        return
    spinner = threading.Thread(target=spin, name="spinner")
    spinner.start()
    try:
        yield
    finally:
        done = True
        spinner.join()


def steps_of(way: Way, condition: Condition, nodes: int, steps: int) -> int:
    """How many steps a round measures: fewer of what is slow."""
    if way == "handoff":
        return steps
    if way == "native":
        return max(1, steps // 4)
    return max(1, min(steps // 4, _PORTAL_MESSAGES[condition] // nodes))


def measure_loop(loop: Loop, rounds: int, steps: int) -> list[Cost]:
    """All costs on one loop; conditions, sizes and ways take turns within each round."""
    device = LentLoopDevice(_LAYOUT, max(NODES), HostPools(_LAYOUT, _HOST_PAGES))
    samples: dict[tuple[Condition, str, int], list[list[float]]] = {}
    with CacheController(device=device, loop=loop) as cache:
        bench = Bench(cache, device)
        for way, nodes in product(WAYS, NODES):
            bench.sample(way, nodes if way != "portal" else 1)  # not counted: code and memory are touched first
        for _, condition in product(range(rounds), CONDITIONS):
            with surroundings(condition):
                for nodes, way in product(NODES, WAYS):
                    count = steps_of(way, condition, nodes, steps)
                    costs = [_after_rest(condition, bench.sample, way, nodes) for _ in range(count)]
                    samples.setdefault((condition, way, nodes), []).append(costs)
                for completions in (0, 64):
                    costs = [_after_rest(condition, bench.sample_take, completions) for _ in range(steps)]
                    samples.setdefault((condition, "take", completions), []).append(costs)
    return [summarise(loop, condition, way, nodes, cell) for (condition, way, nodes), cell in samples.items()]


def _after_rest(condition: Condition, sample: Callable[..., float], *args: object) -> float:
    if condition == "idle":
        time.sleep(_IDLE_S)
    return sample(*args)


def summarise(loop: Loop, condition: Condition, way: str, nodes: int, rounds: Sequence[Sequence[float]]) -> Cost:
    """Reduce the samples of all rounds."""
    medians = tuple(statistics.median(costs) for costs in rounds)
    every = sorted(cost for costs in rounds for cost in costs)
    p99 = every[-(-99 * len(every) // 100) - 1]
    return Cost(loop, condition, way, nodes, statistics.median(medians), p99, len(every), medians)


def verdicts(costs: Sequence[Cost]) -> list[dict[str, Any]]:
    """For each loop and condition: the two figures that have a target, and how many times the rivals cost."""
    p50 = {(cost.loop, cost.condition, cost.way, cost.nodes): cost.p50_us for cost in costs}
    found: list[dict[str, Any]] = []
    for loop, condition in dict.fromkeys((cost.loop, cost.condition) for cost in costs):
        own, few, many = p50[loop, condition, "handoff", 64], *NODES[1:]
        node = (p50[loop, condition, "handoff", many] - own) / (many - few)
        ratios = {f"{way}_ratio": p50[loop, condition, way, 64] / own for way in ("native", "portal")}
        met = own <= STEP_TARGET_US and node <= NODE_TARGET_US
        found.append({"loop": loop, "condition": condition, "step_us": own, "node_us": node, "met": met, **ratios})
    return found


def machine() -> dict[str, Any]:
    """The machine as its operating system names it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU implementer"))]
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    return {"cpu": names[0] if names else platform.machine(), "cores": cores, "load": load, "python": _python()}


def _python() -> str:
    return f"{platform.python_implementation()} {platform.python_version()}"


def show(costs: Sequence[Cost], judged: Sequence[dict[str, Any]], *, markdown: bool) -> None:
    """Print the two tables."""
    style = box.MARKDOWN if markdown else box.SIMPLE_HEAD
    console = Console(width=120 if markdown else None)
    headings = ("loop", "condition", "way", "nodes", "p50 us", "p99 us", "p50 of rounds", "samples")
    table = Table(*headings, box=style)
    for cost in costs:
        name = {"handoff": "**handoff**" if markdown else "[bold]handoff"}.get(cost.way, cost.way)
        spread = f"{min(cost.rounds_us):,.1f} to {max(cost.rounds_us):,.1f}"
        figures = (f"{cost.p50_us:,.1f}", f"{cost.p99_us:,.1f}", spread, str(cost.samples))
        table.add_row(cost.loop, cost.condition, name, str(cost.nodes), *figures)
    console.print(table)
    table = Table("loop", "condition", "64 nodes, us", "further node, us", "target", "native", "portal", box=style)
    for row in judged:
        figures = (f"{row['step_us']:.1f}", f"{row['node_us']:.3f}", "met" if row["met"] else "missed")
        ratios = (f"{row['native_ratio']:.0f} x", f"{row['portal_ratio']:,.0f} x")
        table.add_row(row["loop"], row["condition"], *figures, *ratios)
    console.print(table)


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print, and write the JSON that was asked for."""
    parser = argparse.ArgumentParser(description="The calling thread's cost of a step, against message-a-node ways.")
    parser.add_argument("--rounds", type=int, default=7, help="repetitions of everything; the p50 is their median")
    parser.add_argument("--steps", type=int, default=40, help="steps a round and size for the hand-off")
    parser.add_argument("--loop", nargs="+", choices=LOOPS, default=LOOPS, help="event loops to run the actors on")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args(words)
    if options.rounds < 1 or options.steps < 1:
        parser.error("--rounds and --steps must be 1 or more")
    costs = [cost for loop in options.loop for cost in measure_loop(loop, options.rounds, options.steps)]
    judged = verdicts(costs)
    show(costs, judged, markdown=options.markdown)
    if options.json is not None:
        report = {"machine": machine(), "costs": [attrs.asdict(cost) for cost in costs], "summary": judged}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
