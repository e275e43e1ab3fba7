"""From a store's read to the scheduler: how soon a ready prefix is seen, how fast prefixes come, what a miss costs.

- ready: a step asks for one prefix, or for 64 at once, one read each. A sample is the time from the moment at which a
  read's bytes are in host memory to the return of the `take` that has its `PrefetchReady`. `takes` counts the takes
  that began since then, 1 being the first that could see it. The scheduler either waits for completions (`idle`), or
  takes once after each step of 2 ms: one that leaves the GIL alone (`busy`) or one of pure Python (`python`).
- throughput: bytes a second of prefixes brought to host memory, against the same reads asked of the store alone.
- miss: prefixes that nobody has: the scheduler's own cost, and the time until their answer.

    python -m benchmarks.prefetch [--rounds N] [--loop asyncio trio] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from itertools import product
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Literal, TypeAlias

import anyio
import attrs

from benchmarks.handoff import machine
from kvcr_actors import (
    BackupNode,
    CacheController,
    CacheLayout,
    ControllerConfig,
    PoolSpec,
    PrefetchReady,
    PrefetchRequest,
)
from kvcr_actors.devices.cpu import CpuDevice
from kvcr_actors.devices.host_memory import HostPools
from kvcr_actors.ports import BatchOutcome, HostMemory, PageBatch, PageOutcome
from kvcr_actors.stores.bounded import BoundedBackend
from kvcr_actors.stores.memory import MemoryMedium
from kvcr_actors.stores.threaded import ThreadedStore
from kvcr_actors.testing.services import open_services
from kvcr_actors.types import PageKey

Loop: TypeAlias = Literal["asyncio", "trio"]
LOOPS: tuple[Loop, ...] = ("asyncio", "trio")

LAYOUT = CacheLayout((PoolSpec("kv", 32, 4096),))
REQUESTS = 64
PAGES = 16
"""Pages of a request: one read of the store."""
STEP_NS = 2_000_000
_WAIT_S = 60.0


class TimedBackend(BoundedBackend):
    """A memory store that notes when each read's bytes were in place, by the read's last key."""

    def __init__(self, capacity_pages: int) -> None:
        super().__init__(capacity_pages, MemoryMedium())
        self.read_at: dict[PageKey, int] = {}

    def read(self, batch: PageBatch, host: HostMemory) -> BatchOutcome:
        """Read, then note the time."""
        outcome = super().read(batch, host)
        self.read_at[batch.keys[-1]] = perf_counter_ns()
        return outcome


@attrs.frozen
class Ready:
    """One prefix: where it stood in the queue, microseconds from its bytes to the scheduler, and takes in between."""

    position: int
    delay_us: float
    takes: int


def prefix(name: str) -> tuple[PageKey, ...]:
    """The keys of one request."""
    return tuple(sha256(f"{name}/{index}".encode()).digest() for index in range(PAGES))


PREFIXES = [prefix(f"held {index}") for index in range(REQUESTS)]


class Bench:
    """A controller over a store that holds every prefix, with a host that is empty before each sample."""

    def __init__(self, cache: CacheController, backend: TimedBackend) -> None:
        self.cache = cache
        self.backend = backend
        self._round = 0

    def fill(self) -> None:
        """Bring the prefixes to the store."""
        pages = (tuple(range(PAGES)),)
        self.cache.write_back([BackupNode(index, keys, pages) for index, keys in enumerate(PREFIXES)])
        self.cache.wait_quiet(_WAIT_S)

    def ask(self, prefixes: Sequence[tuple[PageKey, ...]]) -> dict[str, int]:
        """One step that asks for prefixes; returns each request's position."""
        self._round += 1
        names = {f"{self._round}/{index}": index for index in range(len(prefixes))}
        for name, keys in zip(names, prefixes, strict=True):
            self.cache.prefetch(PrefetchRequest(name, keys))
        self.cache.flush_pending_backups()
        return names

    def end(self, names: Sequence[str]) -> None:
        """Let go of the prefixes, and push them out of the host by others."""
        for name in names:
            self.cache.cancel(name)
        self.cache.flush_pending_backups()
        self.cache.wait_quiet(_WAIT_S)
        self.cache.take()
        self.cache.clear_host()

    def ready(self, between: Callable[[], None], requests: int) -> list[Ready]:
        """Ask for prefixes in one step, then take once after each `between` until all are there."""
        self.backend.read_at.clear()
        names = self.ask(PREFIXES[:requests])
        takes: list[int] = []
        found: list[Ready] = []
        while len(found) < len(names):
            between()
            takes.append(perf_counter_ns())
            answers = self.cache.take()
            seen = perf_counter_ns()
            for answer in answers:
                assert isinstance(answer, PrefetchReady), answer
                assert answer.pages == PAGES, answer
                position = names[str(answer.request_id)]
                read_at = self.backend.read_at[PREFIXES[position][-1]]
                since = sum(took >= read_at for took in takes)
                found.append(Ready(position, (seen - read_at) / 1e3, since))
        self.end(list(names))
        return found

    def wait(self) -> None:
        """An idle scheduler."""
        self.cache.wait(_WAIT_S)

    def throughput(self) -> float:
        """Bytes a second from the hand-over to the last ready prefix."""
        started = perf_counter_ns()
        names = self.ask(PREFIXES)
        left = len(names)
        while left:
            self.cache.wait(_WAIT_S)
            left -= len(self.cache.take())
        spent = perf_counter_ns() - started
        self.end(list(names))
        return REQUESTS * PAGES * LAYOUT.page_bytes / spent * 1e9

    def miss(self) -> tuple[float, float]:
        """Microseconds a request of a step that finds nothing: on the scheduler's thread, and until the answer."""
        self._round += 1
        absent = [prefix(f"absent {self._round}/{index}") for index in range(REQUESTS)]
        requests = [PrefetchRequest(f"miss {self._round}/{index}", keys) for index, keys in enumerate(absent)]
        started = perf_counter_ns()
        for request in requests:
            self.cache.prefetch(request)
        self.cache.flush_pending_backups()
        handed_over = perf_counter_ns()
        left = len(requests)
        while left:
            self.cache.wait(_WAIT_S)
            left -= len(self.cache.take())
        answered = perf_counter_ns()
        return (handed_over - started) / 1e3 / REQUESTS, (answered - started) / 1e3 / REQUESTS


def compute() -> None:
    """A step of a scheduler that never lets go of the GIL of its own accord."""
    end = perf_counter_ns() + STEP_NS
    while perf_counter_ns() < end:
        pass


def rest() -> None:
    """A step that the scheduler spends in native code, without the GIL."""
    time.sleep(STEP_NS / 1e9)


def store_alone(loop: Loop) -> float:
    """Bytes a second of the same reads, asked of the store alone, all at once."""

    async def read_all() -> float:
        backend, host = TimedBackend(REQUESTS * PAGES), HostPools(LAYOUT, 2 * REQUESTS * PAGES)
        store = ThreadedStore("memory", backend)
        batches = [
            PageBatch(keys, (tuple(range(index * PAGES, (index + 1) * PAGES)),)) for index, keys in enumerate(PREFIXES)
        ]
        try:
            async with open_services() as services:
                await store.open(services, host)
                for batch in batches:
                    await store.write(batch).outcome()
                started = perf_counter_ns()
                reads = [store.read(batch, 0) for batch in batches]
                for read in reads:
                    assert set((await read.outcome()).pages) == {PageOutcome.OK}
                spent = perf_counter_ns() - started
                await store.close(_WAIT_S)
        finally:
            host.close()
        return REQUESTS * PAGES * LAYOUT.page_bytes / spent * 1e9

    return anyio.run(read_all, backend=loop)


@contextmanager
def bench_on(loop: Loop) -> Generator[Bench]:
    """A controller on a loop in a thread of its own."""
    backend = TimedBackend(REQUESTS * PAGES)
    host = HostPools(LAYOUT, 2 * REQUESTS * PAGES)
    config = ControllerConfig(refresh_store=False)
    device = CpuDevice(LAYOUT, PAGES, host)
    try:
        with CacheController(config, device=device, store=ThreadedStore("memory", backend), loop=loop) as cache:
            bench = Bench(cache, backend)
            bench.fill()
            cache.clear_host()
            yield bench
    finally:
        host.close()


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """The median and the 99th of a hundred."""
    ordered = sorted(values)
    return statistics.median(ordered), ordered[-(-99 * len(ordered) // 100) - 1]


def measure(loop: Loop, rounds: int) -> dict[str, Any]:
    """Everything, on one loop."""
    with bench_on(loop) as bench:
        steps = {"idle": bench.wait, "busy": rest, "python": compute}
        ready: dict[tuple[str, int], list[Ready]] = {key: [] for key in product(steps, (1, REQUESTS))}
        rates: list[float] = []
        alone: list[float] = []
        misses: list[tuple[float, float]] = []
        for _ in range(rounds):
            for (condition, requests), samples in ready.items():
                for _ in range(8 if requests == 1 else 1):
                    samples += bench.ready(steps[condition], requests)
            rates.append(bench.throughput())
            alone.append(store_alone(loop))
            before = bench.cache.claims.taken
            misses.append(bench.miss())
            assert bench.cache.claims.taken == before, "a miss takes no claim and no host memory"
    return {"loop": loop, "ready": ready, "rates": rates, "alone": alone, "misses": misses}


def summary(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the report."""
    rows: list[dict[str, Any]] = []
    for (condition, requests), samples in found["ready"].items():
        parts = [("the only one", 0, 1)]
        if requests > 1:
            parts = [("first 8 of 64", 0, 8), ("last 8 of 64", REQUESTS - 8, REQUESTS)]
        for name, low, high in parts:
            chosen = [one for one in samples if low <= one.position < high]
            p50, p99 = percentiles([one.delay_us for one in chosen])
            takes = statistics.median(one.takes for one in chosen)
            rows.append({"what": f"ready, {condition}, {name}", "p50_us": p50, "p99_us": p99, "takes": takes})
    rate, alone = statistics.median(found["rates"]), statistics.median(found["alone"])
    rows.append({"what": "throughput", "GB/s": rate / 1e9, "store alone, GB/s": alone / 1e9, "share": rate / alone})
    own, answer = (statistics.median(one[index] for one in found["misses"]) for index in (0, 1))
    rows.append({"what": "miss, a request", "scheduler_us": own, "answer_us": answer})
    return rows


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print, and write the JSON that was asked for."""
    parser = argparse.ArgumentParser(description="How soon and how fast a store's pages are ready at the scheduler.")
    parser.add_argument("--rounds", type=int, default=15, help="repetitions of everything")
    parser.add_argument("--loop", nargs="+", choices=LOOPS, default=LOOPS, help="event loops to run the actors on")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args(words)
    if options.rounds < 1:
        parser.error("--rounds must be 1 or more")
    report: dict[str, Any] = {"machine": machine(), "loops": {}}
    for loop in options.loop:
        rows = report["loops"][loop] = summary(measure(loop, options.rounds))
        for row in rows:
            figures = "  ".join(f"{key} {value:,.2f}" for key, value in row.items() if key != "what")
            print(f"{loop:8} {row['what']:30} {figures}")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
