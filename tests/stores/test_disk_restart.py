"""What outlives a process: every page, exactly the order of use, and nothing that is half done."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvcr_actors.errors import StoreError, StoreFormatError, StoreLockedError
from kvcr_actors.stores.disk import DiskMedium, disk_backend
from kvcr_actors.testing.store_driver import LAYOUT, chain
from kvcr_actors.types import CacheLayout, PoolSpec, Tier
from tests.stores.pages import NAMESPACE, Pages, oldest_first, open_disk, page_file, page_files

OTHER = attrs.evolve(NAMESPACE, model="another-model")


@pytest.mark.parametrize("flush_pages", [1, 50, 4096])
def test_the_order_of_use_is_exactly_the_same_after_a_restart(tmp_path: Path, flush_pages: int) -> None:
    rng = random.Random(7)
    prefixes = [chain(str(index), 8) for index in range(20)]
    expected = None
    for _ in range(5):
        backend = disk_backend(tmp_path / "store", 60, NAMESPACE, flush_pages=flush_pages)
        pages = Pages(backend)
        assert expected is None or oldest_first(backend) == expected
        for _ in range(25):
            keys = rng.choice(prefixes)
            pages.write(keys[: rng.randint(1, 8)], pools=rng.choice([0b001, 0b111]))
            pages.read(rng.choice(prefixes), pools=0b001)
            backend.align(rng.choice(prefixes))
        expected = oldest_first(backend)
        pages.close()


def test_pages_pools_and_parents_are_announced_again(tmp_path: Path) -> None:
    keys = chain("a", 5)
    pages = open_disk(tmp_path / "store")
    pages.write(keys[:3])
    pages.write(keys[3:4], pools=0b011)
    pages.close()
    pages = open_disk(tmp_path / "store")
    assert [pages.backend.lookup(key) for key in keys] == [0b111, 0b111, 0b111, 0b011, 0]
    assert pages.inventory.parent(Tier.STORE, keys[2]) == keys[1]
    assert pages.read(keys) == "ooomm"
    pages.close()


def test_a_smaller_capacity_keeps_the_most_recent(tmp_path: Path) -> None:
    keys = chain("a", 8)
    pages = open_disk(tmp_path / "store", 8)
    pages.write(keys)
    pages.close()
    pages = open_disk(tmp_path / "store", 3)
    assert pages.backend.contents() == frozenset(keys[:3])
    assert len(page_files(tmp_path / "store")) == 3
    pages.close()


def test_unfinished_and_unsound_files_are_removed_and_sound_ones_adopted(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    keys = chain("a", 4)
    pages = open_disk(folder)
    pages.write(keys[:3])
    pages.close()
    # As a crash leaves them: a page without a row, a row without a page, half a page under each kind of name.
    sound = page_file(folder, keys[0]).read_bytes()
    with sqlite3.connect(folder / "index.sqlite3") as index:
        index.execute("DELETE FROM pages WHERE key = ?", (keys[0],))
    index.close()
    page_file(folder, keys[1]).unlink()
    page_file(folder, keys[3]).parent.mkdir(exist_ok=True)
    page_file(folder, keys[3]).write_bytes(sound[:100])
    page_file(folder, keys[3]).with_suffix(".tmp").write_bytes(sound[:50])
    (page_file(folder, keys[0]).parent / "notes.txt").write_text("not the store's")

    pages = open_disk(folder)
    assert pages.read(keys) == "omom"
    counts = {name: pages.count(name) for name in ("adopted", "unfinished", "unsound", "lost")}
    assert counts == {"adopted": 1, "unfinished": 1, "unsound": 1, "lost": 1}
    assert {file.name for file in page_files(folder)} == {
        page_file(folder, keys[0]).name,
        page_file(folder, keys[2]).name,
        "notes.txt",
    }
    pages.close()
    pages = open_disk(folder)
    assert pages.count("adopted") == 0
    pages.close()


def test_a_page_merged_just_before_a_crash_keeps_all_its_components(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    keys = chain("a", 3)
    pages = Pages(disk_backend(folder, 8, NAMESPACE, flush_pages=3))
    pages.write(keys, pools=0b001)
    pages.write(keys[1:2])
    # What a kill at this moment would leave: the index has been told of the page, and not of the merge.
    shutil.copytree(folder, tmp_path / "killed")
    pages.close()
    pages = open_disk(tmp_path / "killed")
    assert [pages.backend.lookup(key) for key in keys] == [0b001, 0b111, 0b001]
    assert pages.read(keys[1:2]) == "o"
    assert pages.read(keys, pools=0b001) == "ooo"
    pages.close()


def test_a_crash_loses_no_page_and_only_the_latest_order_of_use(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    old, new = chain("old", 4), chain("new", 4)
    pages = Pages(disk_backend(folder, 8, NAMESPACE, flush_pages=4))
    pages.write(old)
    for key in new[:3]:
        pages.write([key])
    shutil.copytree(folder, tmp_path / "killed")
    pages.close()
    backend = disk_backend(tmp_path / "killed", 8, NAMESPACE)
    pages = Pages(backend)
    assert oldest_first(backend) == [*reversed(old), *new[:3]]
    pages.close()


def test_a_merge_keeps_the_parent_in_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    keys = chain("a", 2)
    pages = open_disk(folder)
    pages.write(keys, pools=0b001)
    pages.write(keys[1:])
    pages.close()
    (folder / "index.sqlite3").unlink()
    pages = open_disk(folder)
    assert pages.inventory.parent(Tier.STORE, keys[1]) == keys[0]
    pages.close()


@pytest.mark.parametrize("damage", ["empty", "garbage", "torn", "gone", "another table"])
def test_a_damaged_index_costs_the_order_of_use_and_no_page(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "store"
    keys = chain("a", 40)
    pages = open_disk(folder)
    pages.write(keys)
    pages.close()
    index = folder / "index.sqlite3"
    match damage:
        case "empty":
            index.write_bytes(b"")
        case "garbage":
            index.write_bytes(random.Random(1).randbytes(index.stat().st_size))
        case "torn":
            os.truncate(index, index.stat().st_size // 2)
        case "gone":
            index.unlink()
        case _:
            index.unlink()
            with sqlite3.connect(index) as db:
                db.execute("CREATE TABLE pages (something TEXT)")
            db.close()
    pages = open_disk(folder)
    assert pages.read(keys) == "o" * 40
    pages.close()
    pages = open_disk(folder)
    assert pages.count("adopted") == 0
    assert pages.read(keys) == "o" * 40
    pages.close()


def test_rows_with_wrong_types_are_replaced_from_the_files(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    keys = chain("a", 3)
    pages = open_disk(folder)
    pages.write(keys)
    pages.close()
    with sqlite3.connect(folder / "index.sqlite3") as index:
        index.execute("UPDATE pages SET key = 'text', mask = 'x' WHERE key = ?", (keys[1],))
    index.close()
    pages = open_disk(folder)
    assert pages.read(keys) == "ooo"
    assert pages.count("adopted") == 1
    pages.close()


def test_another_namespace_sees_none_of_the_pages_and_takes_their_room_first(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    keys = chain("a", 6)
    pages = open_disk(folder, 6)
    pages.write(keys)
    pages.close()

    other = open_disk(folder, 6, OTHER)
    assert other.backend.contents() == frozenset()
    assert other.read(keys) == "mmmmmm"
    assert other.count("strangers") == 6
    assert other.write(keys[:2], version=1) == "oo"
    assert other.read(keys[:2], version=1) == "oo"
    assert other.count("strangers") == 4
    assert len(page_files(folder)) == 6
    other.close()

    pages = open_disk(folder, 6)
    assert pages.read(keys) == "oooomm"
    assert pages.count("strangers") == 2
    pages.close()


@pytest.mark.parametrize(
    "change", [{"dtype": "float8_e4m3fn"}, {"weights": "2"}, {"ranks": (("tensor", 1, 2),)}, {"layout": "another"}]
)
def test_scenario_13_pages_written_with_another_dtype_or_other_weights_under_the_same_name_are_misses(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    keys = chain("a", 3)
    pages = open_disk(tmp_path / "store")
    pages.write(keys)
    pages.close()
    other = open_disk(tmp_path / "store", namespace=attrs.evolve(NAMESPACE, **change))
    assert [other.backend.lookup(key) for key in keys] == [0, 0, 0]
    assert other.read(keys) == "mmm"
    other.close()
    pages = open_disk(tmp_path / "store")
    assert pages.read(keys) == "ooo"
    pages.close()


def test_scenario_14_each_rank_reads_the_bytes_that_it_wrote_and_replicas_share_theirs(tmp_path: Path) -> None:
    keys = chain("a", 3)
    shards = [attrs.evolve(NAMESPACE, ranks=(("tensor", rank, 4),)) for rank in range(4)]
    for rank, namespace in enumerate([*shards, NAMESPACE]):
        pages = open_disk(tmp_path / "store", namespace=namespace)
        assert pages.write(keys, version=rank) == "ooo"
        pages.close()
    for rank, namespace in enumerate([*shards, *[NAMESPACE] * 2]):
        pages = open_disk(tmp_path / "store", namespace=namespace)
        assert pages.read(keys, version=min(rank, 4)) == "ooo"
        pages.close()


def test_pages_of_other_sizes_are_never_served(tmp_path: Path) -> None:
    key = chain("a", 1)
    pages = open_disk(tmp_path / "store")
    pages.write(key)
    pages.close()
    backend = disk_backend(tmp_path / "store", 4, NAMESPACE)
    backend.open(CacheLayout((PoolSpec("kv", 2, 100), *LAYOUT.pools[1:])))
    assert backend.lookup(key[0]) == 0
    assert backend.take_events() == []
    backend.close()


def test_too_many_pools_are_refused_before_the_folder_is_touched(tmp_path: Path) -> None:
    backend = disk_backend(tmp_path / "store", 4, NAMESPACE)
    with pytest.raises(StoreError, match="64 pools"):
        backend.open(CacheLayout(tuple(PoolSpec(f"p{index}", 1, 1) for index in range(64))))
    assert not (tmp_path / "store").exists()


def test_folders_and_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir(mode=0o755)
    before = os.umask(0)
    try:
        pages = open_disk(folder, slots=64)
        pages.write(chain("a", 64))
        modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.rglob("*")]}
        pages.close()
    finally:
        os.umask(before)
    assert len(modes) > 64
    assert {path: mode for path, mode in modes.items() if mode != (0o700 if path.is_dir() else 0o600)} == {}


def test_another_format_is_refused_with_what_to_do_and_left_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    open_disk(folder).close()
    (folder / "format").write_text("kvcr-actors disk store, format 2\n")
    before = sorted(folder.rglob("*"))
    with pytest.raises(StoreFormatError, match=r"format 2.*delete it"):
        open_disk(folder)
    assert sorted(folder.rglob("*")) == before


def test_a_folder_with_other_files_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(StoreFormatError, match="choose an empty folder"):
        open_disk(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_folder_left_before_its_format_was_written_is_used(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    (folder / "lock").touch()
    (folder / "format.tmp").write_text("kvcr")
    open_disk(folder).close()
    assert (folder / "format").read_text().startswith("kvcr-actors disk store, format ")
    assert not (folder / "format.tmp").exists()
    open_disk(folder).close()


def test_a_path_that_cannot_be_a_folder_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file/store cannot be used"):
        open_disk(tmp_path / "file" / "store")


def test_a_second_store_is_refused_until_the_first_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    first = open_disk(folder)
    with pytest.raises(StoreLockedError, match=str(folder)):
        open_disk(folder)
    assert first.write(chain("a", 1)) == "o"
    first.close()
    open_disk(folder).close()


def test_a_process_holds_the_folder_until_it_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    command = [sys.executable, "-m", "tests.stores.crash_writer", str(folder), "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        with pytest.raises(StoreLockedError, match=str(folder)):
            open_disk(folder)
        holder.kill()
    open_disk(folder).close()


def test_a_failed_open_leaves_nothing_locked(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    open_disk(folder).close()
    with closing(sqlite3.connect(folder / "index.sqlite3", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreError, match=r"index\.sqlite3"):
            open_disk(folder)
    open_disk(folder).close()


def test_a_durable_store_serves_what_it_wrote(tmp_path: Path) -> None:
    keys = chain("a", 4)
    pages = open_disk(tmp_path / "store", durable=True)
    assert pages.write(keys) == "oooo"
    pages.close()
    pages = open_disk(tmp_path / "store", durable=True)
    assert pages.read(keys) == "oooo"
    pages.close()


def test_an_index_that_cannot_be_written_loses_no_page(tmp_path: Path) -> None:
    keys = chain("a", 6)
    backend = disk_backend(tmp_path / "store", 8, NAMESPACE, flush_pages=2)
    pages = Pages(backend)
    assert isinstance(backend._medium, DiskMedium)
    assert backend._medium._index is not None
    backend._medium._index.close()
    assert pages.write(keys) == "oooooo"
    assert pages.read(keys) == "oooooo"
    assert pages.count("index_failures") > 0
    pages.close()
    pages = open_disk(tmp_path / "store")
    assert pages.read(keys) == "oooooo"
    assert pages.count("adopted") == 6
    pages.close()
