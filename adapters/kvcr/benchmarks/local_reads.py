"""Local reads through the store, against the runner's calls by hand and against plain torch copies.

By hand is the fastest way that the runner offers: fetch, copy from the pool's view, release, in calls of 64 blocks.
Also: what an idle store costs, with the progress thread calm and not, and how long after its delivery a page is ready.

    python benchmarks/local_reads.py [--seconds S] [--json FILE]

Figures are medians over rounds; the three ways take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import torch
from kvcr.types import BlockKey

from kvcr_actors import CacheLayout, Namespace, PoolSpec, layout_name, router_key
from kvcr_actors.ports import PageBatch, PageOutcome
from kvcr_actors.testing.services import open_services
from kvcr_actors.testing.store_driver import chain
from kvcr_actors_kvcr import FetchHint, KvcrOptions, KvcrStore

SIZES = (64 << 10, 1 << 20)
BATCHES = (1, 16, 128)
PAGES = 128
CALL = 64
PORTS = (17_311, 17_312)


class TorchHostMemory:
    """Host slots in one tensor."""

    def __init__(self, layout: CacheLayout, slots: int) -> None:
        self.layout, self.slots = layout, slots
        self.rows = torch.zeros((slots, layout.page_bytes), dtype=torch.uint8)
        self._view = memoryview(self.rows.numpy()).cast("B")

    def buffer(self, pool: int) -> memoryview:
        return self._view

    def poison(self, pool: int, slots: Sequence[int]) -> None:
        self.rows[list(slots)] = 0xDB


class Rig:
    """A store that holds `PAGES` pages, and the ways to bring some of them to host slots."""

    def __init__(self, store: KvcrStore, host: TorchHostMemory, size: int) -> None:
        self.store, self.host, self.size = store, host, size
        self.keys = chain("bench", PAGES)
        self.slots = list(range(PAGES))
        self.source = torch.randint(0, 256, (PAGES, size), dtype=torch.uint8)

    async def fill(self) -> None:
        self.host.rows.copy_(self.source)
        for start in range(0, PAGES, CALL):
            await self._moved(self.store.write, range(start, min(PAGES, start + CALL)))

    def check(self, count: int) -> None:
        assert torch.equal(self.host.rows[:count], self.source[:count])

    async def by_store(self, count: int) -> None:
        await self._moved(self.store.read, range(count), "bench")

    async def _moved(self, move: Callable[..., Any], pages: range, *request: object) -> None:
        batch = PageBatch(tuple(self.keys[i] for i in pages), (tuple(pages),))
        outcome = await move(batch, *request).outcome()
        assert set(outcome.pages) == {PageOutcome.OK}, outcome.error

    async def by_hand(self, count: int) -> None:
        """The same calls of the runner, on its owner thread, with nothing around them."""
        done = anyio.Event()
        runner, services = self.store._runner, self.store._services
        assert runner is not None
        assert services is not None
        runner.post(lambda: (self._fetch_and_copy(count), services.post(done.set)))
        await done.wait()

    def _fetch_and_copy(self, count: int) -> None:
        kvcr = self.store._runner.kvcr
        index, instance = self.store._index, self.store._instance
        pool = instance._pools["kv"]
        view = torch.frombuffer(pool._mapping, dtype=torch.uint8)[: PAGES * self.size].view(PAGES, self.size)
        for start in range(0, count, CALL):
            keys: list[BlockKey] = [
                index.page(key).blocks[0].key for key in self.keys[start : min(count, start + CALL)]
            ]
            handle = kvcr.fetch(keys, expected_layout=["kv"])
            done: dict[int, Any] = {}
            while handle not in done:
                done.update(kvcr.poll_completed())
            entries = done[handle]
            for offset, key in enumerate(keys):
                self.host.rows[start + offset].copy_(view[entries[key].descriptors[0].element_index])
            kvcr.release([entries[key].release_handle for key in keys])

    async def by_torch(self, count: int) -> None:
        """A plain copy of the same bytes, row by row as slots are."""
        for page in range(count):
            self.host.rows[page].copy_(self.source[page])


async def timed(way: Callable[[int], Awaitable[None]], count: int) -> float:
    started = time.perf_counter()
    await way(count)
    return time.perf_counter() - started


async def measure(size: int, seconds: float) -> list[dict[str, float]]:
    """One row a batch size: seconds and bytes a second of each way."""
    layout = CacheLayout((PoolSpec("kv", 2, size // 2),))
    namespace = Namespace("bench", "1", "uint8", layout_name(layout), layout.page_bytes)
    rows: list[dict[str, float]] = []
    async with open_services() as services:
        store, host = KvcrStore(KvcrOptions(), PAGES, namespace), TorchHostMemory(layout, PAGES)
        await store.open(services, host)
        rig = Rig(store, host, size)
        await rig.fill()
        for count in BATCHES:
            ways = {"store": rig.by_store, "hand": rig.by_hand, "torch": rig.by_torch}
            taken: dict[str, list[float]] = {name: [] for name in ways}
            for way in ways.values():
                host.poison(0, rig.slots[:count])
                await way(count)
                rig.check(count)
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                for name, way in ways.items():
                    taken[name].append(await timed(way, count))
            medians = {name: statistics.median(times) for name, times in taken.items()}
            row = {"page_bytes": size, "batch": count, "share_of_hand": _paired(taken["hand"], taken["store"])}
            row |= {f"{name}_us": value * 1e6 for name, value in medians.items()}
            row |= {f"{name}_gb_s": count * size / value / 1e9 for name, value in medians.items()}
            rows.append(row)
        await store.close(20.0)
    return rows


def _paired(hand: Sequence[float], store: Sequence[float]) -> float:
    """The median over rounds of one way's time to the other's, so that a busy moment counts for both."""
    return statistics.median(by_hand / by_store for by_hand, by_store in zip(hand, store, strict=True))


async def idle(*, calm: bool, seconds: float) -> float:
    """Share of a core that an idle store takes."""
    layout = CacheLayout((PoolSpec("kv", 1, 4_096),))
    namespace = Namespace("bench", "1", "uint8", layout_name(layout), layout.page_bytes)
    async with open_services() as services:
        store = KvcrStore(KvcrOptions(calm_progress_thread=calm), 4, namespace)
        await store.open(services, TorchHostMemory(layout, 4))
        before = time.process_time()
        await anyio.sleep(seconds)
        share = (time.process_time() - before) / seconds
        await store.close(20.0)
    return share


class StampedQueue:
    """The runner's queue of completions, with the time of the last one that its progress thread put in."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.stamp = inner, 0.0
        self.get_nowait = inner.get_nowait

    def put(self, item: object) -> None:
        self.stamp = time.perf_counter()
        self._inner.put(item)


async def ready_delay(seconds: float) -> dict[str, float]:
    """Microseconds from the moment when the progress thread knows of a peer's delivery to the waiter's next step."""
    layout = CacheLayout((PoolSpec("kv", 2, 32 << 10),))
    delays: list[float] = []
    namespace = Namespace("bench", "1", "uint8", layout_name(layout), layout.page_bytes)
    async with open_services() as services:
        sides: list[Rig] = []
        for port in PORTS:
            store = KvcrStore(KvcrOptions(control_port=port), PAGES, namespace)
            host = TorchHostMemory(layout, PAGES)
            await store.open(services, host)
            sides.append(Rig(store, host, layout.page_bytes))
        source, target = sides
        await source.fill()
        hint = FetchHint(source.store.endpoint or "", frozenset(map(router_key, source.keys)))
        progress = target.store._runner.kvcr._core._progress
        progress._completed = stamped = StampedQueue(progress._completed)
        target.store.begin_request("bench", hint.envelope("bench"))
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            await target.by_store(1)
            delays.append((time.perf_counter() - stamped.stamp) * 1e6)
        target.store.end_request("bench")
        for side in (target, source):
            await side.store.close(20.0)
    ranked = sorted(delays)
    return {"p50": statistics.median(ranked), "p99": ranked[int(len(ranked) * 0.99)], "samples": len(ranked)}


async def run(seconds: float) -> dict[str, Any]:
    rows = [row for size in SIZES for row in await measure(size, seconds)]
    return {
        "reads": rows,
        "ready_us": await ready_delay(seconds),
        "idle_share_calm": await idle(calm=True, seconds=3.0),
        "idle_share_spinning": await idle(calm=False, seconds=3.0),
    }


def show(result: dict[str, Any]) -> None:
    print("| page | batch | store us | by hand us | torch us | store GB/s | share of by hand |")
    print("|---|---|---|---|---|---|---|")
    for row in result["reads"]:
        print(
            f"| {row['page_bytes'] >> 10} KiB | {row['batch']} | {row['store_us']:,.0f} | {row['hand_us']:,.0f} "
            f"| {row['torch_us']:,.0f} | {row['store_gb_s']:.1f} | {row['share_of_hand']:.0%} |"
        )
    print("delivered to ready: {p50:,.0f} us at p50, {p99:,.0f} at p99, {samples} samples".format(**result["ready_us"]))
    print(f"idle: {result['idle_share_calm']:.1%} of a core, {result['idle_share_spinning']:.0%} without calming")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = anyio.run(run, arguments.seconds)
    show(result)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
