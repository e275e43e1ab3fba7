"""Whatever happens to a page's file, it is a miss, and the page is no longer held."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcr_actors.testing.store_driver import chain
from tests.stores.pages import open_disk, page_file, page_files

KEYS = chain("a", 3)


def test_scenario_31_a_flip_of_any_bit_of_any_byte_is_a_miss(tmp_path: Path) -> None:
    pages = open_disk(tmp_path / "store")
    key = KEYS[:1]
    pages.write(key)
    path = page_file(tmp_path / "store", key[0])
    sound = path.read_bytes()
    for position in range(len(sound)):
        damaged = bytearray(sound)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        assert pages.read(key) == "m", position
        assert pages.backend.lookup(key[0]) == 0
        assert not path.exists()
        assert pages.write(key) == "o"
        assert path.read_bytes() == sound
    assert pages.count("damaged") == len(sound)
    pages.close()


def _missing(path: Path, other: Path) -> None:
    path.unlink()


def _short(path: Path, other: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _empty(path: Path, other: Path) -> None:
    os.truncate(path, 0)


def _long(path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def _another_page(path: Path, other: Path) -> None:
    shutil.copy(other, path)


def _a_link(path: Path, other: Path) -> None:
    moved = path.with_name("elsewhere")
    path.rename(moved)
    path.symlink_to(moved)


def _a_pipe(path: Path, other: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _a_folder(path: Path, other: Path) -> None:
    path.unlink()
    path.mkdir()


HARMS = [_missing, _short, _empty, _long, _another_page, _a_link, _a_pipe, _a_folder]
each_harm = pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__.strip("_"))


@each_harm
def test_scenario_31_a_harmed_file_is_a_miss_and_the_others_are_read(
    tmp_path: Path, harm: Callable[[Path, Path], None]
) -> None:
    folder = tmp_path / "store"
    pages = open_disk(folder)
    pages.write(KEYS)
    harm(page_file(folder, KEYS[1]), page_file(folder, KEYS[0]))
    assert pages.read(KEYS) == "omo"
    assert pages.backend.contents() == {KEYS[0], KEYS[2]}
    assert pages.count("damaged") == 1
    pages.close()


@each_harm
def test_scenario_31_a_file_harmed_between_runs_is_never_served(
    tmp_path: Path, harm: Callable[[Path, Path], None]
) -> None:
    folder = tmp_path / "store"
    pages = open_disk(folder)
    pages.write(KEYS)
    pages.close()
    harm(page_file(folder, KEYS[1]), page_file(folder, KEYS[0]))
    pages = open_disk(folder)
    assert pages.read(KEYS) == "omo"
    pages.close()


def test_a_merge_with_a_damaged_page_keeps_only_what_is_new(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    pages = open_disk(folder)
    pages.write(KEYS[:1], pools=0b001)
    os.truncate(page_file(folder, KEYS[0]), 10)
    assert pages.write(KEYS[:1], pools=0b110) == "o"
    assert pages.backend.lookup(KEYS[0]) == 0b110
    assert pages.read(KEYS[:1], pools=0b110) == "o"
    pages.close()


def test_a_deleted_folder_fails_writes_and_misses_reads_without_an_exception(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    pages = open_disk(folder)
    pages.write(KEYS)
    shutil.rmtree(folder)
    assert pages.read(KEYS) == "mmm"
    assert pages.write(KEYS) == "fff"
    assert pages.last.error is not None
    assert "No such file" in pages.last.error
    assert pages.backend.contents() == frozenset()
    pages.close()


def test_a_deleted_subfolder_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    pages = open_disk(folder)
    pages.write(KEYS[:1])
    shutil.rmtree(page_file(folder, KEYS[0]).parent)
    assert pages.read(KEYS[:1]) == "m"
    assert pages.write(KEYS[:1]) == "o"
    assert pages.read(KEYS[:1]) == "o"
    pages.close()


def test_a_lack_of_descriptors_fails_a_read_but_drops_no_page(tmp_path: Path) -> None:
    pages = open_disk(tmp_path / "store")
    pages.write(KEYS)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        read, written = pages.read(KEYS), pages.write(chain("b", 1))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (read, written) == ("fff", "f")
    assert pages.read(KEYS) == "ooo"
    assert len(page_files(tmp_path / "store")) == 3
    pages.close()
