"""What a run leaves: its files, its table, its exit status."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from kvcr_actors.cli.app import run
from kvcr_actors.errors import DeviceError
from kvcr_actors.replay import session
from kvcr_actors.replay.options import ReplayOptions, option_name
from kvcr_actors.replay.report import ReplayReport
from kvcr_actors.stores.disk import DiskMedium
from kvcr_actors.stores.disk_folder import StoreFolder

PROGRAM = [sys.executable, "-m", "kvcr_actors", "replay", "--limit", "60", "--page-bytes", "64"]
SMALL = ["replay", "--limit", "60", "--page-bytes", "64", "--no-progress"]


def test_a_healthy_run_writes_its_files_prints_its_table_and_ends_with_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, plot = tmp_path / "report.json", tmp_path / "hits.svg"
    assert run([*SMALL, "--json", str(report), "--plot", str(plot)]) == 0
    made = json.loads(report.read_text())
    assert made["requests"] == 60
    assert made["blocks"] == sum(made["hits"].values()) + sum(made["reasons"].values())
    assert made["options"] == ReplayOptions(limit=60, page_bytes=64, progress=False, json=report, plot=plot).to_json()
    # Python and torch alone take more than 50 MiB, and no machine has the limit.
    assert 50 << 20 < made["memory"]["peak_bytes"] < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert plot.read_text().startswith("<?xml")
    assert sorted(tmp_path.iterdir()) == [plot, report]
    output = capsys.readouterr()
    assert f"60 requests asked for {made['blocks']:,} blocks" in output.out
    assert ["--limit", "60", "command", "line"] in [line.split() for line in output.err.splitlines()]
    assert ["--store", "memory", "default"] in [line.split() for line in output.err.splitlines()]


def test_scenario_56_the_effective_configuration_is_printed_once_with_the_source_of_each_value(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run([*SMALL, "--host-blocks", "64"]) == 0
    lines = [line.split() for line in capsys.readouterr().err.splitlines()]
    assert lines.count(["effective", "configuration"]) == 1
    for field in attrs.fields(ReplayOptions):
        (line,) = [line for line in lines if line and line[0] == option_name(field.name)]
        given = option_name(field.name) in ("--limit", "--page-bytes", "--host-blocks", "--progress")
        assert (line[-2:] == ["command", "line"]) if given else (line[-1] == "default")


def test_the_report_names_the_folder_of_a_store_that_stays_and_none_for_a_temporary_one(tmp_path: Path) -> None:
    kept, lent = tmp_path / "kept.json", tmp_path / "lent.json"
    assert run([*SMALL, "--store", "disk", "--store-path", str(tmp_path / "store"), "--json", str(kept)]) == 0
    assert run([*SMALL, "--store", "disk", "--json", str(lent)]) == 0
    assert json.loads(kept.read_text())["options"]["store_path"] == str(tmp_path / "store")
    assert json.loads(lent.read_text())["options"]["store_path"] is None


def test_an_unhealthy_run_still_reports_and_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "report.json"

    def replay_with_wrong_bytes(*_arguments: object) -> ReplayReport:
        made = ReplayReport()
        made.verify.mismatches = 3
        made.events.index_matches = True
        return made

    monkeypatch.setattr(session, "run_replay", replay_with_wrong_bytes)
    assert run([*SMALL, "--json", str(report)]) == 1
    assert json.loads(report.read_text())["verify"]["mismatches"] == 3
    assert "unhealthy: 3 restored pages held wrong bytes" in capsys.readouterr().out


def test_a_failure_inside_the_run_is_one_line_and_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object) -> ReplayReport:
        raise DeviceError("the copy engine\nstopped")

    monkeypatch.setattr(session, "run_replay", fail)
    assert run([*SMALL, "--json", str(tmp_path / "report.json")]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "kvcr-actors replay: DeviceError: the copy engine stopped"
    assert list(tmp_path.iterdir()) == []


def test_a_store_folder_in_use_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = StoreFolder(tmp_path / "store")
    folder.open()
    try:
        assert run([*SMALL, "--store", "disk", "--store-path", str(folder.path)]) == 2
    finally:
        folder.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"kvcr-actors replay: store folder {folder.path} is in use")
    assert run([*SMALL, "--store", "disk", "--store-path", str(folder.path)]) == 0


def test_a_store_of_another_format_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk = [*SMALL, "--store", "disk", "--store-path", str(tmp_path / "store")]
    assert run(disk) == 0
    capsys.readouterr()
    (tmp_path / "store" / "format").write_text("nonsense")
    assert run(disk) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvcr-actors replay: ")


def test_a_store_that_fails_at_its_close_is_no_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_medium: DiskMedium) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(DiskMedium, "close", fail)
    assert run([*SMALL, "--store", "disk", "--store-path", str(tmp_path / "store")]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("kvcr-actors replay: the replay failed: StoreError: store disk did not close cleanly")


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    process = subprocess.Popen(PROGRAM, stdout=write_end, stderr=subprocess.PIPE, text=True)
    os.close(write_end)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Traceback" not in errors
    assert "BrokenPipe" not in errors


@pytest.mark.parametrize(("more", "shown"), [([], True), (["--no-progress"], False)])
def test_the_progress_bar_is_for_terminals_and_can_be_left_out(more: list[str], *, shown: bool) -> None:
    terminal, device = pty.openpty()
    process = subprocess.Popen([*PROGRAM, *more], stdout=subprocess.DEVNULL, stderr=device)
    os.close(device)
    text = read_terminal(terminal)
    assert process.wait(timeout=60) == 0
    assert (b"replaying" in text) is shown


def read_terminal(terminal: int) -> bytes:
    """Read until the other side is closed, which a terminal tells by an error."""
    text = b""
    with os.fdopen(terminal, "rb", buffering=0) as file:
        while True:
            try:
                piece = file.read(65_536)
            except OSError:
                return text
            if not piece:
                return text
            text += piece
