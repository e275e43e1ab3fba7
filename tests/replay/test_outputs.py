from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvcr_actors.errors import ConfigError
from kvcr_actors.replay.outputs import check_output, whole_file


def test_a_file_takes_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    with whole_file(target) as temporary:
        temporary.write_text("half")
        assert not target.exists()
        temporary.write_text("whole")
    assert target.read_text() == "whole"
    assert list(tmp_path.iterdir()) == [target]


def write_half(target: Path) -> None:
    with whole_file(target) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt


def test_an_interrupted_file_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    target.write_text("old")
    with pytest.raises(KeyboardInterrupt):
        write_half(target)
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_target_that_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    check_output("--json", target)
    assert list(tmp_path.iterdir()) == []
    target.write_text("old")
    check_output("--json", target)
    assert target.read_text() == "old"


def test_folders_missing_folders_devices_and_unwritable_places_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--json: {tmp_path} is a folder"):
        check_output("--json", tmp_path)
    with pytest.raises(ConfigError, match=r"--json: the folder .*absent does not exist"):
        check_output("--json", tmp_path / "absent" / "report.json")
    with pytest.raises(ConfigError, match="--json: /dev/null is a device"):
        check_output("--json", Path(os.devnull))
    with pytest.raises(ConfigError, match=r"--json: /proc/report\.json cannot be written"):
        check_output("--json", Path("/proc/report.json"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_write_protected_file_or_folder_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    target.touch(mode=0o400)
    with pytest.raises(ConfigError, match="write-protected"):
        check_output("--json", target)
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="cannot be written"):
        check_output("--json", tmp_path / "other.json")
