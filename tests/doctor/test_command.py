"""The doctor on the real machine: facts are what the system says, planted faults are found, the status says so."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
import torch

from kvcr_actors.cli.app import run
from kvcr_actors.doctor.machine import read_machine


def findings(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, dict[str, str]]]:
    status = run(["doctor", "--json", *options])
    rows = json.loads(capsys.readouterr().out)
    return status, {row["about"]: row for row in rows}


def test_the_facts_are_those_of_this_machine(tmp_path: Path) -> None:
    machine = read_machine(folder=tmp_path / "kv" / "store")
    assert machine.system == "Linux"
    assert machine.cores == len(os.sched_getaffinity(0))
    assert machine.packages["torch"] == torch.__version__
    assert bool(machine.gpus) == torch.cuda.is_available()
    assert bool(machine.gpu_error) != torch.cuda.is_available()
    assert machine.limits[0].free > 0
    folder = machine.folder
    assert folder is not None
    assert (folder.path, folder.exists, folder.owner) == (tmp_path / "kv" / "store", False, os.getuid())
    assert folder.free_bytes > 0


def test_nothing_in_the_way_is_status_0_and_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    assert run(["doctor", "--store-path", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "problems: none" in out
    assert "torch" in out


def test_planted_faults_are_found(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        options = ("--host-gib", "900000", "--ports", str(port), "--store-path", str(tmp_path))
        status, found = findings(capsys, *options)
    assert status == 1
    bad = {about for about, row in found.items() if row["verdict"] == "problem"}
    assert bad == {"host memory", f"port {port}", f"store folder {tmp_path}"}
    assert "fewer slots" in found["host memory"]["remedy"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_wanted_and_not_there_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = findings(capsys, "--gpu")
    assert (status, found["GPU"]["verdict"]) == (1, "problem")


@pytest.mark.parametrize("options", [("--ports", "70000"), ("--host-gib", "-1"), ("--store-gib", "nan")])
def test_bad_input_is_one_line(options: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", *options]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
