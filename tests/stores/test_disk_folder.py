"""A store's folder is private and checked before it is used; what is damaged in it costs its page, never the store."""

from __future__ import annotations

import os
import sqlite3
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from kvcr_actors.errors import StoreError
from kvcr_actors.testing.store_driver import chain
from tests.stores.pages import Pages, open_disk, page_file

KEYS = chain("a", 4)
SOMEBODY = 1000
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="another user's files take root")


def filled(folder: Path) -> None:
    pages = open_disk(folder)
    assert pages.write(KEYS) == "oooo"
    pages.close()


def listing(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Everything below a folder, with what any use of it would change."""
    found = [folder, *folder.rglob("*")]
    return {str(path): (one.st_mode, one.st_size, one.st_mtime_ns) for path in found for one in [path.lstat()]}


@as_root
def test_a_folder_of_another_user_is_refused_also_for_root_and_nothing_in_it_is_touched(tmp_path: Path) -> None:
    folder, precious = tmp_path / "store", tmp_path / "precious"
    folder.mkdir(0o700)
    precious.write_text("precious")
    (folder / "format.tmp").symlink_to(precious)
    (folder / "lock").symlink_to(tmp_path / "made")
    os.chown(folder, SOMEBODY, SOMEBODY)
    before = listing(tmp_path)
    with pytest.raises(StoreError, match=r"belongs to user 1000, and this process is user 0: choose another folder"):
        open_disk(folder)
    assert listing(tmp_path) == before


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777, 0o720, 0o702])
def test_a_folder_that_others_can_write_to_is_refused_before_anything_is_changed(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "store"
    filled(folder)
    folder.chmod(mode)
    before = listing(tmp_path)
    with pytest.raises(StoreError, match=rf"store can be written to by others \(mode 0*{mode:o}\).*chmod 700"):
        open_disk(folder)
    assert listing(tmp_path) == before
    folder.chmod(0o755)
    pages = open_disk(folder)
    assert pages.read(KEYS) == "oooo"
    assert folder.stat().st_mode & 0o777 == 0o700
    pages.close()


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir(0o700)
    (tmp_path / "store").symlink_to(tmp_path / "there")
    with pytest.raises(StoreError, match="store is a symbolic link: give the folder that it points to"):
        open_disk(tmp_path / "store")
    assert not list((tmp_path / "there").iterdir())


@pytest.mark.parametrize("name", ["format", "lock"])
def test_a_link_in_place_of_a_file_of_the_store_is_not_followed(tmp_path: Path, name: str) -> None:
    folder, precious = tmp_path / "store", tmp_path / "precious"
    filled(folder)
    precious.write_text("precious")
    (folder / name).unlink()
    (folder / name).symlink_to(precious)
    with pytest.raises(StoreError):
        open_disk(folder)
    assert precious.read_text() == "precious"


def test_an_unfinished_format_that_is_a_link_is_replaced(tmp_path: Path) -> None:
    folder, precious = tmp_path / "store", tmp_path / "precious"
    folder.mkdir(0o700)
    precious.write_text("precious")
    (folder / "format.tmp").symlink_to(precious)
    filled(folder)
    assert precious.read_text() == "precious"


@pytest.mark.parametrize("name", ["format", "lock"])
def test_a_pipe_or_an_endless_device_in_place_of_a_file_is_refused_at_once(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "store"
    filled(folder)
    for plant in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        (folder / name).unlink()
        plant(folder / name)
        with pytest.raises(StoreError, match=f"'{name}' is a link, a pipe or another user's file"):
            open_disk(folder)


def test_what_is_no_folder_of_pages_is_set_aside_and_not_followed(tmp_path: Path) -> None:
    folder, outside = tmp_path / "store", tmp_path / "outside"
    filled(folder)
    outside.mkdir()
    shard = page_file(folder, KEYS[2]).parent
    for file in shard.iterdir():
        file.rename(outside / file.name)
    stray = outside / (shard.name + "0" * 62)
    stray.write_text("a user's file")
    shard.rmdir()
    shard.symlink_to(outside)
    pages = open_disk(folder)
    assert pages.read(KEYS) == "oomo"
    assert pages.write(KEYS) == "oooo", "its place is free again"
    pages.close()
    assert stray.read_text() == "a user's file"
    assert page_file(folder, KEYS[2]).exists()
    assert (outside / page_file(folder, KEYS[2]).name).exists()


def _folder(index: Path) -> None:
    index.unlink()
    (index / "something").mkdir(parents=True)


def _link(index: Path) -> None:
    index.rename(index.parent.parent / "elsewhere")
    index.symlink_to(index.parent.parent / "elsewhere")


def _pipe(index: Path) -> None:
    index.unlink()
    os.mkfifo(index)


def _sql(*statements: str) -> Callable[[Path], None]:
    def change(index: Path) -> None:
        with closing(sqlite3.connect(index)) as db:
            for statement in statements:
                db.execute(statement)
            db.commit()

    return change


HARMS = {
    "a folder": _folder,
    "a link": _link,
    "a pipe": _pipe,
    "nothing": Path.unlink,
    "another table": _sql("CREATE TABLE more (x)"),
    "a trigger": _sql("CREATE TRIGGER t AFTER INSERT ON pages BEGIN SELECT RAISE(ABORT, 'no'); END"),
    "a view": _sql("DROP TABLE pages", "CREATE VIEW pages AS SELECT x'00' AS name"),
    "another schema": _sql("DROP TABLE pages", "CREATE TABLE pages (name, key, parent, mask, bytes, used)"),
    "the latest use": _sql("UPDATE pages SET used = 9223372036854775807"),
    "a use before the first": _sql("UPDATE pages SET used = -1"),
    "no pools": _sql("UPDATE pages SET mask = -1"),
    "text for a number": _sql("UPDATE pages SET used = 'x', mask = 'y', bytes = 'z'"),
    "a short key": _sql("UPDATE pages SET key = x'00'"),
    "a short parent": _sql("UPDATE pages SET parent = x'00'"),
    "another length": _sql("UPDATE pages SET bytes = 9223372036854775807"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_index_costs_at_most_the_order_of_use(tmp_path: Path, harm: str) -> None:
    folder = tmp_path / "store"
    filled(folder)
    HARMS[harm](folder / "index.sqlite3")
    for _ in range(2):
        pages = open_disk(folder)
        assert pages.read(KEYS) == "oooo"
        assert pages.write(chain("b", 2)) == "oo"
        pages.close()
        assert pages.count("index_failures") == 0
    assert pages.count("adopted") == 0, "what was made anew is sound"


@pytest.mark.parametrize("bytes_claimed", [1 << 40, (1 << 63) - 1, (1 << 30) + 1, 1 << 29])
def test_a_file_is_not_read_at_the_length_that_it_claims(
    tmp_path: Path, bytes_claimed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "store"
    filled(folder)
    path = page_file(folder, KEYS[1])
    raw = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(8 + 2 + 2 + 4 + 96)
        file.write(struct.pack("<Q", bytes_claimed))
        file.truncate(min(len(raw) + bytes_claimed, 1 << 40))
    pread, asked = os.pread, list[int]()

    def noted(fd: int, length: int, at: int) -> bytes:
        asked.append(length)
        return pread(fd, length, at)

    monkeypatch.setattr(os, "pread", noted)
    pages = open_disk(folder)
    assert pages.read(KEYS) == "omoo"
    assert max(asked, default=0) <= 1 << 20
    assert sum(asked) < 1 << 30
    pages.close()


def test_a_short_read_is_finished_or_retried_and_never_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "store"
    filled(folder)
    pages = open_disk(folder)
    readv, pread = os.readv, os.pread

    def cut(fd: int, buffers: list[memoryview]) -> int:
        return readv(fd, [memoryview(buffers[0]), memoryview(buffers[1])[:1]])

    monkeypatch.setattr(os, "readv", cut)
    assert pages.read(KEYS) == "oooo", "the rest is read and lies where it belongs"
    monkeypatch.setattr(os, "pread", lambda fd, length, at: b"")
    assert pages.read(KEYS) == "ffff"
    assert pages.last.error is not None
    assert "a short read" in pages.last.error
    assert pages.backend.contents() == set(KEYS)
    monkeypatch.setattr(os, "pread", pread)
    assert pages.read(KEYS) == "oooo"
    assert pages.count("damaged") == 0
    pages.close()


def test_a_file_that_cannot_be_read_at_open_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "store"
    filled(folder)
    (folder / "index.sqlite3").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", lambda fd, length, at: b"")
        pages = open_disk(folder)
        assert (pages.count("unreadable"), pages.count("unsound")) == (4, 0)
        pages.close()
    pages: Pages = open_disk(folder)
    assert pages.read(KEYS) == "oooo"
    pages.close()
