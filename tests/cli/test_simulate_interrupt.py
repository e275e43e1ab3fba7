"""Ctrl-C in a simulation: what ran until then is told, and no process is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from multiprocessing import active_children
from pathlib import Path

import pytest

from kvcr_actors.cli.app import run
from kvcr_actors.simulation.report import SimulationReport
from kvcr_actors.simulation.run import SeedResult
from kvcr_actors.simulation.world import MOST_RANKS

PROGRAM = (sys.executable, "-m", "kvcr_actors", "simulate")
ENDLESS = ("--seeds", "0..9", "--steps", "100000000")
PATIENCE_S = 60.0


def children(process: int) -> set[int]:
    """The processes that a process has started; they come and go while one looks."""
    found: set[int] = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == process:
            found.add(int(status.parent.name))
    return found


def is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def interrupt(*words: str, sent: signal.Signals, started: int) -> tuple[int, str, str, set[int]]:
    """Send a signal, to all as a terminal does, once so many processes were started; give those that stay."""
    process = subprocess.Popen(
        [*PROGRAM, *ENDLESS, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell's background job hands an ignored SIGINT down.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while len(found := children(process.pid)) < started:
            assert time.monotonic() < deadline, "the processes did not start"
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        time.sleep(0.0 if started else 3.0)
        os.killpg(process.pid, sent)
        output, errors = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    deadline = time.monotonic() + PATIENCE_S
    while (left := {child for child in found if is_alive(child)}) and time.monotonic() < deadline:
        time.sleep(0.01)
    return process.returncode, output, errors, left


@pytest.mark.parametrize(
    ("sent", "word", "status"),
    [(signal.SIGINT, "interrupted", 130), (signal.SIGTERM, "terminated", 143)],
)
def test_a_signal_ends_seeds_in_the_middle_and_takes_every_process_along(
    sent: signal.Signals, word: str, status: int
) -> None:
    # The two that work, and the one that Python starts to tidy up after them.
    returned, output, errors, left = interrupt("--jobs", "2", sent=sent, started=3)
    assert errors == f"kvcr-actors simulate: {word}; 0 of 10 seeds ran\n"
    assert returned == status
    assert re.search(r"seeds\s+│\s+0 of 10 ", output)
    assert "never fired" not in output
    assert left == set()


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_a_signal_ends_the_one_seed_of_a_single_process(loop: str) -> None:
    returned, output, errors, _ = interrupt("--loop", loop, sent=signal.SIGINT, started=0)
    assert errors == "kvcr-actors simulate: interrupted; 0 of 10 seeds ran\n"
    assert returned == 130
    assert re.search(r"seeds\s+│\s+0 of 10 ", output)


def test_a_signal_ends_the_most_ranks_that_there_may_be() -> None:
    returned, _, errors, _ = interrupt("--ranks", str(MOST_RANKS), sent=signal.SIGINT, started=0)
    assert errors == "kvcr-actors simulate: interrupted; 0 of 10 seeds ran\n"
    assert returned == 130


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--ranks", "65"), "--ranks 65: give 1 to 64; all of them run in one thread"),
        (("--ranks", "100000"), "--ranks 100000: give 1 to 64"),
        (("--ranks", "0"), "--ranks 0: give 1 to 64"),
        (("--steps", "9" * 30), "give 1 to 1000000000"),
        (("--jobs", "100000"), "--jobs 100000: seeds need processes to run in; give 1 to 1024"),
        (("--jobs", "0"), "--jobs 0: seeds need processes to run in"),
        (("--seeds", "9" * 5_000), "--seeds: '9999999999999999999999999999999999999999' is no range of seeds"),
        (("--ranks", "9" * 5_000), "--ranks"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_line(
    words: tuple[str, str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["simulate", *words]) == 2
    errors = capsys.readouterr().err
    assert complaint in errors
    assert len(errors) < 1_200
    assert errors.count("\n") == 1


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_the_summary_counts_the_seeds_that_ran_before_the_interrupt(
    jobs: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    add = SimulationReport.add

    def interrupted_at_the_third(report: SimulationReport, result: SeedResult) -> None:
        add(report, result)
        if report.seeds == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(SimulationReport, "add", interrupted_at_the_third)
    assert run(["simulate", "--seeds", "0..199", "--steps", "2", "--faults", "none", "--jobs", jobs]) == 130
    output = capsys.readouterr()
    assert output.err == "kvcr-actors simulate: interrupted; 3 of 200 seeds ran\n"
    assert re.search(r"seeds\s+│\s+3 of 200 ", output.out)
    assert active_children() == []
