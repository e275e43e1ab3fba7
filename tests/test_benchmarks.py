"""The benchmarks run and report what their documents show; the figures themselves are not looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_the_hand_off_benchmark_measures_every_way_size_and_condition(tmp_path: Path):
    report = tmp_path / "handoff.json"
    words = ["--rounds", "1", "--steps", "1", "--loop", "asyncio", "--markdown", "--json", report]
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "handoff.py", *words], check=False, capture_output=True, text=True, timeout=110
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(report.read_text())
    cells = {(cost["loop"], cost["condition"], cost["way"], cost["nodes"]) for cost in found["costs"]}
    steps = set(product(["asyncio"], ["idle", "contended"], ["handoff", "native", "portal"], [1, 64, 512]))
    takes = set(product(["asyncio"], ["idle", "contended"], ["take"], [0, 64]))
    assert cells == steps | takes
    assert len(found["costs"]) == len(cells)
    assert all(0 < cost["p50_us"] <= cost["p99_us"] for cost in found["costs"])
    assert [(row["loop"], row["condition"]) for row in found["summary"]] == [
        ("asyncio", "idle"),
        ("asyncio", "contended"),
    ]
    assert {"cpu", "cores", "load", "python"} == set(found["machine"])
    rows = [line for line in done.stdout.splitlines() if line.startswith("| asyncio")]
    assert len(rows) == len(cells) + len(found["summary"])


def test_the_event_benchmark_measures_our_publisher_with_both_readers(tmp_path: Path):
    report = tmp_path / "events.json"
    words = ["--rounds", "1", "--blocks", "51200", "--markdown", "--json", report]
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "events.py", *words], check=False, capture_output=True, text=True, timeout=110
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(report.read_text())
    assert [(cell["who"], cell["reader"]) for cell in found["cells"]] == [("ours", "reads"), ("ours", "stalled")]
    for cell in found["cells"]:
        (run,) = cell["rounds"]
        assert run["dropped"] == 0
        assert 0 < run["publish_us"] <= run["publish_max_us"]
    assert len([line for line in done.stdout.splitlines() if line.lstrip().startswith("| ours")]) == 2


def test_the_store_client_benchmark_measures_every_store_size_and_way():
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "store_client.py", "--rounds", "1", "--pages", "4"],
        check=False,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith(("| memory", "| disk"))]
    assert len(rows) == 12
    assert all(float(cell.strip(" |")) > 0 for row in rows for cell in row[3:])


def test_the_sweep_benchmark_times_all_policies_and_what_others_have(tmp_path: Path):
    report = tmp_path / "sweep.json"
    words = ["-m", "benchmarks.sweep", "--rounds", "1", "--json", report]
    done = subprocess.run(
        [sys.executable, *words], check=False, capture_output=True, text=True, timeout=110, cwd=BENCHMARKS.parent
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(report.read_text())
    assert found["all"]["points"] == 9 * len(found["capacities"])
    assert found["all"]["wall_s"] > 0 < found["shared"]["ours"]["cpu_s"]
