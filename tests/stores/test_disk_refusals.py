"""A disk that refuses: no room, no right, a limit. Outcomes tell it, nothing is raised, and it passes."""

from __future__ import annotations

import errno
import io
import os
import resource
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvcr_actors.testing.store_driver import chain
from tests.stores.pages import Pages, open_disk, page_file, page_files

NOBODY = 65534


@contextmanager
def _as_ordinary_user(folder: Path) -> Iterator[None]:
    """Root ignores permissions: give the folder to another user and be that user for the block."""
    if os.geteuid() != 0:
        yield
        return
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, NOBODY, NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def _fill(disk: Path) -> Path:
    """Leave not a byte free."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        while _has_room(file):
            pass
    return filler


def _has_room(file: io.FileIO) -> bool:
    try:
        return file.write(bytes(4096)) > 0
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return False


@contextmanager
def _read_only(folder: Path) -> Iterator[None]:
    """Take the right to make and delete files in the subfolders away, and give it back."""
    shards = [path for path in folder.iterdir() if path.is_dir()]
    for shard in shards:
        shard.chmod(0o500)
    try:
        with _as_ordinary_user(folder):
            yield
    finally:
        for shard in shards:
            shard.chmod(0o700)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB of its own."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k,mode=700", "tmpfs", str(tmp_path)]
    try:
        mounted = subprocess.run(mount, check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("mounting a file system takes root")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_is_full_until_there_is_room_again(tiny_disk: Path) -> None:
    folder = tiny_disk / "store"
    pages = open_disk(folder, 1000)
    # The index, its log and one block a page share the file system.
    outcome = "".join(pages.write(chain(str(index), 20)) for index in range(6))
    held = outcome.count("o")
    assert outcome == "o" * held + "F" * (120 - held)
    assert 0 < held < 60
    assert pages.last.error is not None
    assert "No space left" in pages.last.error
    assert pages.count("full") == 120 - held
    assert len(page_files(folder)) == held, "a refused page leaves no file"
    assert pages.read(chain("0", 20))[0] == "o"

    pages.backend.discard(chain("0", 20)[:10])
    pages.publish()
    assert pages.write(chain("new", 1)) == "o"
    pages.close()


def test_a_full_disk_keeps_a_page_that_could_not_be_merged(tiny_disk: Path) -> None:
    pages = open_disk(tiny_disk / "store", 1000)
    key = chain("a", 1)
    pages.write(key, pools=0b001)
    filler = _fill(tiny_disk)
    assert pages.write(key, pools=0b110) == "F"
    assert pages.read(key, pools=0b001) == "o"
    filler.unlink()
    assert pages.write(key, pools=0b110) == "o"
    assert pages.read(key) == "o"
    pages.close()


def test_a_full_disk_at_close_loses_no_page(tiny_disk: Path) -> None:
    folder = tiny_disk / "store"
    pages = open_disk(folder, 1000)
    keys = chain("a", 20)
    held = pages.write(keys)
    filler = _fill(tiny_disk)
    pages.close()
    filler.unlink()
    pages = open_disk(folder, 1000)
    assert pages.read(keys) == held.replace("F", "m")
    pages.close()


def test_a_file_size_limit_fails_pages_that_are_cut_short(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    pages = open_disk(folder)
    small, large = chain("small", 1), chain("large", 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Room for a header and the smallest component, not for a whole page.
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
    try:
        outcomes = pages.write(small, pools=0b100) + pages.write(large) + pages.write(small)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert outcomes == "off"
    assert pages.last.error == "write: [Errno 27] File too large"
    assert pages.read(small, pools=0b100) == "o", "a merge that was cut short leaves the page as it was"
    assert len(page_files(folder)) == 1, "a page that was cut short leaves no file"
    assert pages.write(large) == "o"
    pages.close()


def test_a_folder_that_became_read_only_fails_writes_and_serves_reads(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    pages = open_disk(folder)
    keys = chain("a", 4)
    pages.write(keys)
    with _read_only(folder):
        assert pages.write(keys[:1], version=1) == "o", "a held page needs no write"
        assert pages.write(_in_same_shard(keys[0])) == "f"
        assert pages.last.error is not None
        assert "Permission denied" in pages.last.error
        assert pages.read(keys) == "oooo"
    assert pages.count("failed") == 1
    pages.close()


def test_scenario_34_a_file_that_cannot_be_deleted_is_forgotten_and_deleted_later(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    pages = open_disk(folder, 2)
    keys = chain("a", 2)
    pages.write(keys)
    with _read_only(folder):
        new = _in_same_shard(keys[0])
        pages.write(new)
        assert pages.backend.lookup(keys[1]) == 0, "eviction goes on"
        assert (pages.count("undeletable"), pages.count("undeleted")) == (1, 1)
    assert page_file(folder, keys[1]).exists()
    assert pages.write(new) == "o"
    assert not page_file(folder, keys[1]).exists()
    assert (pages.count("undeletable"), pages.count("undeleted")) == (1, 0)
    pages.close()


def test_scenario_34_the_cap_holds_within_one_page_at_every_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, capacity = tmp_path / "store", 6
    pages, most = open_disk(folder, capacity), 0
    pages.write(chain("one", 1))
    page_bytes = page_file(folder, chain("one", 1)[0]).stat().st_size
    rename = os.rename

    def measured(source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        nonlocal most
        most = max(most, sum(file.stat().st_size for file in page_files(folder)))
        rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "rename", measured)
    for turn in range(20):
        pages.write(chain(str(turn), 1 + turn % 5), pools=0b001)
        pages.write(chain(str(turn), 1 + turn % 5))  # rewrites them with all components
        assert sum(file.stat().st_size for file in page_files(folder)) <= capacity * page_bytes
    assert capacity * page_bytes < most <= (capacity + 1) * page_bytes, "the page that is rewritten is there twice"
    pages.close()


def test_scenario_34_pages_spread_evenly_over_256_folders(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    pages = open_disk(folder, 2)
    keys = chain("many", 25_600)
    shards = Counter(page_file(folder, key).parent for key in keys)
    assert len(shards) == 256
    assert max(shards.values()) < 2 * 100, "ten million pages are 39,000 a folder"
    pages.write(keys[:2])
    assert {file.parent for file in page_files(folder)} == {page_file(folder, key).parent for key in keys[:2]}
    pages.close()


def test_a_page_written_again_is_not_deleted_as_the_old_one(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    pages = open_disk(folder, 2)
    keys = chain("a", 2)
    pages.write(keys)
    with _read_only(folder):
        pages.backend.discard(keys)
        pages.publish()
    assert pages.write(keys) == "oo"
    for _ in range(3):
        pages.backend.align(keys)
    assert pages.read(keys) == "oo"
    assert pages.count("undeleted") == 0
    pages.close()


def test_scenario_31_an_unreadable_file_is_a_miss_and_no_longer_held(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    pages = open_disk(folder)
    keys = chain("a", 2)
    pages.write(keys)
    page_file(folder, keys[1]).chmod(0)
    with _as_ordinary_user(folder):
        assert pages.read(keys) == "om"
    assert pages.backend.contents() == {keys[0]}
    pages.close()


def _in_same_shard(key: bytes) -> tuple[bytes, ...]:
    """A key whose file lies in the same subfolder, so that no new subfolder is needed."""
    for index in range(100_000):
        (other,) = chain(f"other {index}", 1)
        if page_file(Path(), other).parent == page_file(Path(), key).parent:
            return (other,)
    raise AssertionError("256 subfolders, and none in common")


def test_pages_helper_sees_wrong_bytes(tmp_path: Path) -> None:
    pages: Pages = open_disk(tmp_path / "store")
    keys = chain("a", 1)
    pages.write(keys, version=1)
    with pytest.raises(AssertionError):
        pages.read(keys, version=2)
    pages.close()
