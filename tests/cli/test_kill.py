"""SIGKILL in the middle of a run on disk: the next run opens the store and serves no wrong page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ARGUMENTS = [
    "--store",
    "disk",
    "--device-blocks",
    "64",
    "--host-blocks",
    "128",
    "--page-bytes",
    "4096",
    "--no-progress",
]
PATIENCE_S = 60.0


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kvcr_actors", "replay", *ARGUMENTS, *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def bytes_under(folder: Path) -> int:
    """Apparent size of the store so far; files come and go while it is counted."""
    total = 0
    for place, _folders, files in os.walk(folder):
        for name in files:
            try:
                total += (Path(place) / name).stat().st_size
            except FileNotFoundError:
                continue
    return total


def kill_when_it_holds(size: int, store: Path, process: subprocess.Popen[str]) -> bool:
    """Kill the process once the store holds `size` bytes; False if it ended before."""
    deadline = time.monotonic() + PATIENCE_S
    while process.poll() is None and bytes_under(store) < size:
        assert time.monotonic() < deadline, "the store did not grow"
        time.sleep(0.005)
    process.kill()
    process.communicate()
    return process.returncode < 0


def assert_sound(report: dict, served: Sequence[str]) -> None:
    assert report["verify"]["mismatches"] == 0
    assert report["claims"]["open"] == 0
    assert report["events"]["index_matches"]
    assert report["blocks"] == sum(report["hits"].values()) + sum(report["reasons"].values())
    for tier in served:
        assert report["hits"][tier] > 0


def test_scenario_33_a_killed_run_leaves_a_store_that_opens_and_serves_only_right_pages(tmp_path: Path) -> None:
    store, result = tmp_path / "store", tmp_path / "report.json"
    killed = [kill_when_it_holds(size, store, start("--store-path", store)) for size in (40_000, 400_000, 2_000_000)]
    assert all(killed)
    process = start("--store-path", store, "--json", result)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    assert_sound(json.loads(result.read_text()), served=("device", "host", "store"))
    assert not list(tmp_path.glob(".*.partial"))
