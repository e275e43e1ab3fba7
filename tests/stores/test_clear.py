"""A clear is for good: no crash in the middle of it, and no file that stays for now, brings an old page back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from kvcr_actors.errors import StoreError
from kvcr_actors.stores import disk_files
from kvcr_actors.stores.disk import disk_backend
from kvcr_actors.stores.disk_clear import MARK
from kvcr_actors.stores.memory import memory_backend
from kvcr_actors.testing.store_driver import chain
from tests.stores.pages import NAMESPACE, Pages, open_disk, page_files

A, B = chain("a", 6), chain("b", 3)

CLEAR = """
import os, signal, sys
from pathlib import Path
from kvcr_actors.stores import disk_clear, disk_files
from kvcr_actors.testing.store_driver import chain
from tests.stores.pages import open_disk

pages = open_disk(Path(sys.argv[1]))
pages.write(chain("a", 6))
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
unlink = disk_files.PageFiles._try_remove
done = []

def remove(files, path):
    if len(done) == int(sys.argv[2]):
        die()
    done.append(path)
    return unlink(files, path)

disk_files.PageFiles._try_remove = remove
disk_clear._sync = lambda shard, root: die()
pages.backend.clear()
"""


@pytest.mark.parametrize("deleted", [0, 3, 6], ids=["before the first file", "half way", "before the mark goes"])
def test_a_process_killed_in_a_clear_brings_no_page_back(tmp_path: Path, deleted: int) -> None:
    folder = tmp_path / "store"
    killed = subprocess.run([sys.executable, "-c", CLEAR, str(folder), str(deleted)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(page_files(folder)) == 6 - deleted
    for _ in range(2):
        pages = open_disk(folder)
        assert pages.backend.contents() == frozenset()
        assert page_files(folder) == []
        assert pages.write(B) == "ooo"
        pages.close()
        assert open_and_close(folder) == frozenset(B)
        for file in page_files(folder):
            file.unlink()


def open_and_close(folder: Path) -> frozenset[bytes]:
    pages = open_disk(folder)
    held = pages.backend.contents()
    pages.close()
    return held


def test_a_cleared_store_is_empty_after_a_restart_and_serves_what_is_written_next(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    pages = open_disk(folder)
    pages.write(A)
    assert pages.backend.clear() == 6
    pages.publish()
    assert not (folder / MARK).exists()
    assert pages.write(A[:2], version=1) == "oo"
    pages.close()
    pages = open_disk(folder)
    assert pages.backend.contents() == frozenset(A[:2])
    assert pages.read(A[:2], version=1) == "oo"
    pages.close()


def test_another_namespace_in_the_folder_keeps_its_pages(tmp_path: Path) -> None:
    folder, other = tmp_path / "store", attrs.evolve(NAMESPACE, weights="2")
    first = open_disk(folder)
    first.write(B)
    first.close()
    second = Pages(disk_backend(folder, 64, other))
    second.write(A)
    assert second.backend.clear() == 6
    second.publish()
    second.close()
    assert open_and_close(folder) == frozenset(B)


def test_a_file_that_cannot_be_deleted_yet_goes_later_or_with_the_next_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "store"
    pages = open_disk(folder)
    pages.write(A)
    with monkeypatch.context() as patch:
        patch.setattr(disk_files.PageFiles, "_try_remove", lambda files, path: False)
        pages.backend.clear()
        pages.publish()
        assert pages.write(B) == "ooo"
    assert (folder / MARK).exists()
    for _ in A:
        assert pages.read(A) == "mmmmmm"  # each batch tries one again
    assert not (folder / MARK).exists()
    assert len(page_files(folder)) == 3
    pages.close()
    assert open_and_close(folder) == frozenset(B)


def test_a_folder_that_cannot_be_marked_is_not_cleared_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "store"
    pages = open_disk(folder)
    pages.write(A)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StoreError, match="its pages may come back after a restart: delete the folder, or give"):
        pages.backend.clear()
    pages.publish()
    assert pages.read(A) == "mmmmmm", "it serves none of them all the same"
    pages.close()


def test_a_marked_folder_that_cannot_be_cleared_does_not_open(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    pages = open_disk(folder)
    pages.write(B)
    pages.close()
    (folder / MARK).touch()
    blocked = page_files(folder)[0]
    blocked.unlink()
    blocked.mkdir()
    with pytest.raises(StoreError, match="cannot be cleared"):
        open_disk(folder)


def test_memory_gives_its_pages_up_at_a_clear() -> None:
    pages = Pages(memory_backend(8))
    pages.write(A)
    assert (pages.backend.clear(), pages.backend.clear()) == (6, 0)
    pages.publish()
    assert pages.count("bytes_held") == 0
    assert pages.write(A, version=1) == "oooooo"
    assert pages.read(A, version=1) == "oooooo"
    pages.close()
