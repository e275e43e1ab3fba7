"""The doctor on the real machine: facts are what the system says, planted faults are found, the status says so."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
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


def test_what_can_be_no_store_folder_is_a_problem(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    names = {
        "file": "is no folder",
        "file/below": "file is no folder",
        "link": "symbolic link",
        "circle": "symbolic link",
        "circle/below": "symbolic links",
        "x" * 300: "name too long",
    }
    for name, words in names.items():
        status, found = findings(capsys, "--store-path", str(tmp_path / name))
        row = found[f"store folder {tmp_path / name}"]
        assert (status, row["verdict"]) == (1, "problem")
        assert words in row["found"].lower()


@pytest.mark.skipif(os.getuid() == 0, reason="root may look everywhere")
def test_a_folder_that_may_not_be_looked_at_is_a_problem(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tmp_path.chmod(0)
    status, found = findings(capsys, "--store-path", str(tmp_path / "a" / "b"))
    tmp_path.chmod(0o700)
    assert (status, found[f"store folder {tmp_path}/a/b"]["found"]) == (1, "Permission denied")


def test_a_gpu_that_refuses_is_told_in_its_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(index: int) -> tuple[int, int]:
        raise RuntimeError("CUDA-capable device(s) is/are busy or unavailable")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", refuse)
    status, found = findings(capsys, "--gpu")
    assert (status, found["GPU"]["verdict"]) == (1, "problem")
    assert "busy or unavailable" in found["GPU"]["found"]


def test_a_torch_whose_libraries_are_missing_is_told(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcublas.so.13: cannot open shared object file')")
    words = "import kvcr_actors.doctor.machine as machine; print(machine.read_machine().gpu_error)"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    told = subprocess.run([sys.executable, "-c", words], env=environment, capture_output=True, text=True, check=False)
    assert "torch cannot be imported: libcublas.so.13" in told.stdout


@pytest.mark.parametrize("options", [("--ports", "70000"), ("--host-gib", "-1"), ("--store-gib", "nan")])
def test_bad_input_is_one_line(options: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", *options]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
