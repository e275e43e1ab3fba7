"""What a mover's step costs the engine's thread, and how long an urgent victim takes.

    python -m benchmarks.mover [--rounds N] [--device cpu|cuda] [--json FILE]

- `orders`: 64 orders over three pools from the first `move` to the return of `flush`, lists as tuples of ints, numpy
  arrays and, on a GPU, CUDA tensors behind a stream that is busy for 50 ms;
- `victim`: one order, from `move` to its ack, urgent and not.

Microseconds, p50 and p99. Orders are made before the clock starts; `order` is what making one costs.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from kvcr_actors import CacheLayout, CpuDevice, CudaDevice, CudaRuntime, HostPools, PoolSpec
from kvcr_actors.core.copy_plan import Direction
from kvcr_actors.movers.mover import PageMover
from kvcr_actors.movers.orders import MoveAck, MoveOrder

LAYOUT = CacheLayout((PoolSpec("kv", 4, 4096), PoolSpec("swa", 2, 4096), PoolSpec("mamba", 1, 8192)))
PAGES, SLOTS, NODES, EACH = 1024, 1024, 64, 4
BUSY_MS = 50.0


def make_device(kind: str) -> CpuDevice | CudaDevice:
    if kind == "cpu":
        return CpuDevice(LAYOUT, PAGES, HostPools(LAYOUT, SLOTS))
    host = HostPools(LAYOUT, SLOTS, registrar=CudaRuntime(0))
    planes = [
        list(torch.zeros((spec.planes, PAGES, spec.plane_bytes), dtype=torch.uint8, device="cuda").unbind(0))
        for spec in LAYOUT.pools
    ]
    return CudaDevice(LAYOUT, planes, host, layers=[list(range(spec.planes)) for spec in LAYOUT.pools])


def make_orders(lists: Callable[[Sequence[int]], Any]) -> list[MoveOrder]:
    orders: list[MoveOrder] = []
    for node in range(NODES):
        ids = list(range(node * EACH, (node + 1) * EACH))
        orders.append(MoveOrder(node, Direction.TO_HOST, [lists(ids)] * 3, [ids] * 3))
    return orders


def wait_for_ack(mover: PageMover) -> None:
    while not any(isinstance(one, MoveAck) for one in mover.take()):
        if not mover.wait(30):
            raise TimeoutError("no ack in 30 s")


def spread(name: str, samples: Sequence[float]) -> dict[str, object]:
    ordered = sorted(samples)
    return {
        "what": name,
        "p50_us": round(statistics.median(ordered), 1),
        "p99_us": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 1),
        "samples": len(ordered),
    }


def measure_orders(
    mover: PageMover, name: str, lists: Callable[[Sequence[int]], Any], rounds: int
) -> list[dict[str, object]]:
    steps: list[float] = []
    flushes: list[float] = []
    made: list[float] = []
    for _ in range(rounds):
        begin = time.perf_counter()
        orders = make_orders(lists)
        made.append((time.perf_counter() - begin) / NODES * 1e6)
        fences: list[object] = []
        if name == "cuda":
            torch.cuda.synchronize()
            torch.cuda._sleep(int(BUSY_MS * 1_500_000))  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
            fences.append(torch.cuda.current_stream())
        begin = time.perf_counter()
        for order in orders:
            mover.move(order)
        middle = time.perf_counter()
        mover.flush(*fences)
        end = time.perf_counter()
        steps.append((end - begin) * 1e6)
        flushes.append((end - middle) * 1e6)
        wait_for_ack(mover)
        time.sleep(0.002)
    return [spread(f"{name}: step", steps), spread(f"{name}: flush", flushes), spread(f"{name}: order", made)]


def measure_victim(mover: PageMover, rounds: int, *, urgent: bool) -> dict[str, object]:
    samples: list[float] = []
    order = MoveOrder(0, Direction.TO_HOST, [[1]] * 3, [[1]] * 3)
    for _ in range(rounds):
        begin = time.perf_counter()
        mover.move(order)
        mover.flush(urgent=urgent)
        wait_for_ack(mover)
        samples.append((time.perf_counter() - begin) * 1e6)
        time.sleep(0.001)
    return spread("victim, urgent" if urgent else "victim", samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    with PageMover(make_device(options.device)) as mover:
        kinds: dict[str, Callable[[Sequence[int]], Any]] = {"ints": tuple, "numpy": np.array}
        if options.device == "cuda":
            kinds["cuda"] = lambda ids: torch.tensor(ids, device="cuda")
        for name, lists in kinds.items():
            rows += measure_orders(mover, name, lists, options.rounds)
        for urgent in (False, True):
            rows.append(measure_victim(mover, options.rounds, urgent=urgent))
    table = Table("what", "p50 us", "p99 us", "samples", title=f"{options.device}, {platform.machine()}")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
