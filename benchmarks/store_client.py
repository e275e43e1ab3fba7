"""What bounce slots cost: reads and writes of a store over the caller's memory, and through a client, in turns.

usage: python benchmarks/store_client.py [--rounds N] [--pages N] [--folder PATH]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

import anyio

from kvcr_actors import (
    CacheLayout,
    HostBuffers,
    Namespace,
    PoolSpec,
    Store,
    StoreClient,
    layout_name,
    open_store,
    open_store_client,
)
from kvcr_actors.ports import PageBatch, PageOutcome
from kvcr_actors.testing.services import open_services
from kvcr_actors.testing.store_driver import chain

Times: TypeAlias = dict[str, list[float]]


def make(kind: str, layout: CacheLayout, pages: int, folder: Path) -> Store:
    """A fresh store with room for all pages."""
    namespace = Namespace("m", "1", "bfloat16", layout_name(layout), layout.page_bytes)
    return open_store(kind, {}, 4 * pages, folder if kind == "disk" else None, namespace)


async def timed(call: Callable[[], Awaitable[object]], times: list[float]) -> None:
    """Note the milliseconds of one call."""
    began = time.perf_counter()
    await call()
    times.append((time.perf_counter() - began) * 1e3)


async def over_callers_memory(store: Store, host: HostBuffers, batches: list[PageBatch], times: Times) -> None:
    """The store reads and writes the caller's slots itself, as it does below a controller."""
    async with open_services() as services:
        await store.open(services, host)
        for batch in batches:
            await timed(lambda batch=batch: store.write(batch).outcome(), times["write"])
            await timed(lambda batch=batch: store.read(batch, 0).outcome(), times["read"])
        await store.close(10)


async def through_async_client(store: Store, host: HostBuffers, batches: list[PageBatch], times: Times) -> None:
    """Through bounce slots, on the caller's loop."""
    async with open_store_client(store, host) as client:
        for batch in batches:
            await timed(lambda batch=batch: client.write(batch), times["write"])
            await timed(lambda batch=batch: client.read(batch), times["read"])


async def through_client(store: Store, host: HostBuffers, batches: list[PageBatch], times: Times) -> None:
    """Through bounce slots, from a thread that waits."""
    with StoreClient(store, host) as client:
        for batch in batches:
            for verb, call in (("write", client.write), ("read", client.read)):
                began = time.perf_counter()
                outcome = call(batch)
                times[verb].append((time.perf_counter() - began) * 1e3)
                if set(outcome.pages) != {PageOutcome.OK}:
                    raise RuntimeError(f"{verb}: {outcome}")


WAYS = {"caller's memory": over_callers_memory, "async client": through_async_client, "client": through_client}


def main() -> None:
    """Print medians of all rounds, one line a store, page size and way."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pages", type=int, default=64)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    print(f"{options.pages} pages a call; medians in ms")
    print("| store | KiB a page | way | write | read |\n|---|---|---|---|---|")
    for kind in ("memory", "disk"):
        for page_kib in (16, 256):
            layout = CacheLayout((PoolSpec("kv", 4, page_kib << 8),))
            host = HostBuffers.mapped(layout, options.pages)
            times: dict[str, Times] = {way: {"write": [], "read": []} for way in WAYS}
            slots = tuple(range(options.pages))
            for turn in range(options.rounds):
                batches = [PageBatch(chain(f"{turn}/{call}", options.pages), (slots,)) for call in range(5)]
                for way, run in WAYS.items():
                    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                        store = make(kind, layout, options.pages, Path(folder) / "store")
                        called: Times = {"write": [], "read": []}
                        anyio.run(run, store, host, batches, called)
                        for verb, own in called.items():
                            times[way][verb] += own[1:]  # the first call finds memory that is not there yet
            for way, own in times.items():
                medians = " | ".join(f"{statistics.median(own[verb]):.2f}" for verb in ("write", "read"))
                print(f"| {kind} | {page_kib} | {way} | {medians} |")


if __name__ == "__main__":
    main()
