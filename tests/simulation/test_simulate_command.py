"""`kvcr-actors simulate`: tables, the trace of a failing seed, and the exit status."""

from __future__ import annotations

import re

import pytest
import structlog

from kvcr_actors.actors.state import LoopState
from kvcr_actors.cli.app import run
from kvcr_actors.core.prefetch_state import HeldPrefix
from kvcr_actors.simulation.run import run_seed
from kvcr_actors.simulation.world import SimulationOptions


def test_a_healthy_run_prints_what_was_done_and_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "--seeds", "0..1", "--steps", "120", "--faults", "lookup.fail"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"seeds\s+│\s+2 ", out)
    assert re.search(r"broken rules\s+│\s+0 ", out)
    assert "never fired" not in out


def test_a_fault_that_never_fires_makes_the_run_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "--seeds", "3", "--steps", "1", "--faults", "to_device.drop"]) == 1
    assert "never fired: to_device.drop" in capsys.readouterr().out


def test_a_failing_seed_prints_its_last_events_and_the_command_to_see_it_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HeldPrefix, "_unpin", lambda self: None)
    command = "kvcr-actors simulate --seeds 0..0 --ranks 2 --faults none --steps 40 --loop trio"
    assert run(["simulate", "--seeds", "0..50", "--steps", "40", "--faults", "none"]) == 1
    first = capsys.readouterr().out
    assert "seed 0 failed after" in first
    assert "rank 1: prefetch" in first
    assert f"to see it again: {command}" in first
    assert run(command.split()[1:]) == 1
    assert _without_wall_time(capsys.readouterr().out) == _without_wall_time(first)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seeds", "5..1"], "--seeds: 5..1 is empty"),
        (["--seeds", "all"], "--seeds: 'all' is no range of seeds"),
        (["--ranks", "0"], "--ranks 0"),
        (["--faults", "rain"], "--faults: 'rain' is no fault"),
        (["--loop", "gevent"], "gevent"),
        (["--steps", "many"], "many"),
        (["--jobs", "0"], "--jobs 0"),
    ],
)
def test_bad_input_is_one_line_and_2(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", *arguments]) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert words in errors


def test_processes_share_the_seeds_and_change_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", "--seeds", "0..19", "--steps", "30"]
    status = run(command)
    alone = capsys.readouterr().out
    assert run([*command, "--jobs", "2"]) == status
    assert _without_wall_time(capsys.readouterr().out) == _without_wall_time(alone)


def test_a_simulation_leaves_the_log_configuration_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    before = structlog.get_config()
    monkeypatch.setattr(LoopState, "commit", None)
    assert run_seed(SimulationOptions(steps=30), 0).failure is not None
    assert structlog.get_config() == before


def test_an_interrupt_in_the_middle_of_an_actor_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LoopState, "commit", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_seed(SimulationOptions(steps=30, loop="trio"), 0)


def _without_wall_time(text: str) -> str:
    return re.sub(r"wall time.*", "", text)
