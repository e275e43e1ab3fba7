"""How long a sweep of a trace takes, beside kvcache-simulator on what both have, in one run and fresh processes.

`python -m benchmarks.sweep TRACE --other PYTHON --json sweep.json`; PYTHON is that of an environment with
kvcache-simulator, which is built before it is timed. Both read the trace, count LRU and the optimum at eight capacities
over the second half of the requests, and must agree on every count.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcr_actors.replay.trace import read_trace, shipped_trace

ROOT = Path(__file__).parents[1]
CAPACITIES = (500, 1_000, 2_000, 5_859, 10_000, 20_000, 30_000, 50_000)
NAMES = {"lru": "lru", "belady": "optimal"}
"""What both have, by our name and theirs."""

OTHER = """
import json, sys
from kvcache_sim.cpp_backend import ensure_cpp_simulator, run_cpp_sweep
from kvcache_sim.trace import parse_trace_file
ensure_cpp_simulator()
if sys.argv[1:]:
    path, first, capacities, policies = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4])
    trace = parse_trace_file(path, block_size=None, max_records=0, max_events=0)
    found = run_cpp_sweep(trace, capacities=capacities, policies=policies, warmup_requests=first)
    print(json.dumps([[policy, size, found.results[policy, size].hitTokens, found.results[policy, size].measurementMode]
                      for policy in policies for size in capacities]))
"""


def main() -> None:
    arguments = _arguments()
    requests = read_trace(arguments.trace)
    first = len(requests) // 2
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        whole = _timed(arguments.rounds, _ours(arguments, rows, []))
        report: dict[str, Any] = {
            "machine": {"cores": os.cpu_count(), "load": round(load, 2), "python": sys.version.split()[0]},
            "capacities": list(CAPACITIES),
            "all": whole | {"points": len(json.loads(rows.read_text())["rows"])},
        }
        report["shared"] = {
            "ours": _timed(
                arguments.rounds, _ours(arguments, rows, ["--policies", ",".join(NAMES), "--first", str(first)])
            )
        }
        if arguments.other is not None:
            counted = {
                (row["policy"], row["capacity_pages"]): row["hits"] for row in json.loads(rows.read_text())["rows"]
            }
            report |= _other(arguments, Path(folder), first, report["shared"], counted)
    text = json.dumps(report, indent=2)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")
    print(text)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, nargs="?", default=shipped_trace())
    parser.add_argument("--other", help="the Python of an environment with kvcache-simulator")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _ours(arguments: argparse.Namespace, rows: Path, more: Sequence[str]) -> list[str]:
    points = ",".join(map(str, CAPACITIES))
    return [
        *(sys.executable, "-m", "kvcr_actors", "sweep", str(arguments.trace)),
        *("--capacities", points, "--json", str(rows), *more),
    ]


def _other(
    arguments: argparse.Namespace, folder: Path, first: int, shared: dict[str, Any], ours: dict[tuple[str, int], int]
) -> dict[str, Any]:
    """Time the other on the same work, and compare every count. A block is one token, so that tokens are blocks."""
    converted = folder / "trace.jsonl"
    with converted.open("w") as file:
        for request in read_trace(arguments.trace):
            blocks = list(request.hash_ids)
            file.write(json.dumps({"block_size": 1, "hash_ids": blocks, "input_length": len(blocks)}) + "\n")
    subprocess.run([arguments.other, "-c", OTHER], check=True)  # noqa: S603 - the Python that the user names
    words = [str(converted), str(first), json.dumps(CAPACITIES), json.dumps(list(NAMES.values()))]
    shared["other"] = _timed(arguments.rounds, [arguments.other, "-c", OTHER, *words])
    found = {
        (policy, size): hits
        for policy, size, hits, mode in json.loads(shared["other"].pop("output"))
        if "fixed" in mode
    }
    differ = [
        f"{ours_name} at {size}: {ours[ours_name, size]} here, {found[name, size]} there"
        for ours_name, name in NAMES.items()
        for size in CAPACITIES
        if (name, size) in found and found[name, size] != ours[ours_name, size]
    ]
    return {"compared": len(found), "differ": differ}


def _timed(rounds: int, command: Sequence[str]) -> dict[str, Any]:
    """Run a command some times: the fastest in wall time, and the processor time of it and its children."""
    best: dict[str, Any] = {}
    for _ in range(rounds):
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)  # noqa: S603
        wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        if not best or wall < best["wall_s"]:
            best = {"wall_s": round(wall, 2), "cpu_s": round(cpu, 2), "output": done.stdout}
    if "kvcr_actors" in command:
        best.pop("output")
    return best


if __name__ == "__main__":
    main()
