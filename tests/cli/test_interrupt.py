"""Ctrl-C and SIGTERM in a real process: status, one line, and nothing half written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LONG = 200_000
"""Requests that no machine replays before the signal arrives."""


def long_trace(folder: Path) -> Path:
    path = folder / "long.jsonl"
    with path.open("w") as file:
        for number in range(LONG):
            record = {"timestamp": number, "input_length": 900, "output_length": 3, "hash_ids": [0, number + 1]}
            file.write(f"{json.dumps(record)}\n")
    return path


@pytest.mark.parametrize("seconds_after_start", [0.0, 3.0], ids=["while it starts", "while it runs"])
@pytest.mark.parametrize(
    ("sent", "loop", "word", "status"),
    [
        (signal.SIGINT, "asyncio", "interrupted", 130),
        (signal.SIGINT, "trio", "interrupted", 130),
        (signal.SIGTERM, "asyncio", "terminated", 143),
    ],
)
def test_scenario_54_a_signal_during_io_ends_the_run_in_time_and_withdraws_its_own_data_alone(
    tmp_path: Path, sent: signal.Signals, loop: str, word: str, status: int, seconds_after_start: float
) -> None:
    trace = long_trace(tmp_path)
    outputs, temporary = tmp_path / "outputs", tmp_path / "temporary"
    outputs.mkdir()
    (temporary / "kvcr-actors-of-another").mkdir(parents=True)
    arguments = ["--loop", loop, "--store", "disk", "--json", outputs / "report.json", "--plot", outputs / "hits.png"]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvcr_actors", "replay", trace, *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(temporary)},
        # A shell's background job hands an ignored SIGINT down.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stderr is not None
        assert "effective configuration" in process.stderr.readline()
        time.sleep(seconds_after_start)
        process.send_signal(sent)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == status
    assert output == ""
    assert errors.splitlines()[-1] == f"kvcr-actors replay: {word}; no output was written"
    assert "Traceback" not in errors
    assert list(outputs.iterdir()) == []
    left = [path.name for path in temporary.iterdir() if path.name.startswith("kvcr-actors-")]
    assert left == ["kvcr-actors-of-another"]
