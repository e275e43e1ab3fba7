"""The disk store: a file a page in a folder of its own; the order of use survives a restart."""

from __future__ import annotations

import contextlib
import sqlite3
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from kvcr_actors.core.keys import Namespace
from kvcr_actors.errors import ConfigError, StoreError
from kvcr_actors.ports import Store, StoreTraits
from kvcr_actors.stores.bounded import BoundedBackend
from kvcr_actors.stores.disk_clear import ClearMark
from kvcr_actors.stores.disk_files import PageFiles
from kvcr_actors.stores.disk_folder import FoundFile, StoreFolder
from kvcr_actors.stores.disk_index import DiskIndex, IndexRow
from kvcr_actors.stores.disk_page import MAX_BYTES, MAX_POOLS, PageHeader, encode_header, header_bytes, is_sound
from kvcr_actors.stores.medium import HeldPage, Parts
from kvcr_actors.stores.options import boolean, check_known
from kvcr_actors.stores.threaded import ThreadedStore
from kvcr_actors.types import CacheLayout, PageKey

FLUSH_PAGES = 4096
"""Index rows that wait for a transaction at most: a crash loses the order of use of so many pages, but no page."""

_COUNTS = ("adopted", "unfinished", "unsound", "unreadable", "lost", "index_rebuilt", "index_failures")
"""What was found at open: files without a good row, unfinished, unsound and unreadable files, rows without a file."""


class DiskMedium:
    """One file a page, named by the page's storage key, and an index of them that is written by the batch.

    Pages of another namespace stay in the folder until their room is needed; they leave before any of this one.
    """

    def __init__(self, path: Path, namespace: Namespace, *, durable: bool, flush_pages: int) -> None:
        self._folder = StoreFolder(path)
        self._files = PageFiles(self._folder, durable=durable)
        self._mark = ClearMark(self._folder)
        self._cleared: list[bytes] = []
        """The pages of a clear that is marked."""
        self._namespace = namespace
        self._durable = durable
        self._index: DiskIndex | None = None
        self._page_bytes: tuple[int, ...] = ()
        self._strangers: deque[bytes] = deque()
        self._changed: dict[PageKey, HeldPage] = {}
        self._gone: set[bytes] = set()
        self._flush_pages = self._flush_at = flush_pages
        self._counters = dict.fromkeys(_COUNTS, 0)

    @property
    def strangers(self) -> int:
        """Pages of other namespaces in the folder."""
        return len(self._strangers)

    def open(self, layout: CacheLayout) -> Iterable[tuple[PageKey, HeldPage]]:
        """Lock the folder, then make files and index agree."""
        if len(layout.pools) > MAX_POOLS:
            raise StoreError(
                f"store folder {self._folder.path}: {len(layout.pools)} pools, and a page holds {MAX_POOLS}"
            )
        self._page_bytes = tuple(pool.page_bytes for pool in layout.pools)
        if header_bytes(len(layout.pools)) + sum(self._page_bytes) > MAX_BYTES:
            raise StoreError(
                f"store folder {self._folder.path}: a page of {sum(self._page_bytes)} bytes, and a page file holds "
                f"{MAX_BYTES} at most: make pages of fewer tokens"
            )
        with contextlib.ExitStack() as undo:
            self._folder.open()
            undo.callback(self._folder.close)
            try:
                self._mark.finish()
            except OSError as error:
                raise StoreError(f"store folder {self._folder.path} cannot be cleared: {error}") from error
            index = DiskIndex(self._folder.index_path, durable=self._durable)
            undo.callback(index.close)
            self._counters["index_rebuilt"] += index.rebuilt
            try:
                rows = self._reconcile(index)
            except OSError as error:
                raise StoreError(f"store folder {self._folder.path} cannot be read: {error}") from error
            undo.pop_all()
        self._index = index
        return self._own(rows)

    def save(self, key: PageKey, parent: PageKey | None, parts: Parts) -> None:
        """Write one file; it replaces an earlier one at once."""
        bodies = [parts[pool] for pool in sorted(parts)]
        header = self._header(key, parent, sum(1 << pool for pool in parts))
        self._files.write(self._folder.page_path(header.name), [encode_header(header, bodies), *bodies])

    def load(self, key: PageKey, mask: int, parts: Parts) -> bool:
        """Read one file into the components asked for, and check all of it."""
        header = self._header(key, None, mask)
        front = bytearray(header_bytes(len(header.lengths)))
        bodies = [
            parts[pool] if pool in parts else memoryview(bytearray(length))
            for pool, length in enumerate(header.lengths)
            if length
        ]
        whole = self._files.read(self._folder.page_path(header.name), [front, *bodies])
        return whole and is_sound(front, header, bodies)

    def drop(self, key: PageKey) -> None:
        """Delete a page's file."""
        self._changed.pop(key, None)
        self._drop_name(self._namespace.storage_key(key))

    def clear(self, keys: Collection[PageKey]) -> None:
        """Delete the files of all pages of this namespace."""
        self._mark.set()
        self._changed.clear()
        names = [self._namespace.storage_key(key) for key in keys]
        for name in names:
            self._drop_name(name)
        self._flush()
        self._cleared += names
        self._end_clear()

    def drop_stranger(self) -> None:
        """Delete the file of the stranger used the longest ago."""
        self._drop_name(self._strangers.popleft())

    def note(self, key: PageKey, page: HeldPage) -> None:
        """Put a page on the list for the index."""
        self._changed[key] = page

    def end_batch(self) -> None:
        """Write the index when enough has changed, and try again to delete a file that could not be deleted."""
        if len(self._changed) + len(self._gone) >= self._flush_at:
            self._flush()
        self._files.retry_removal()
        self._end_clear()

    def close(self) -> None:
        """Write the index and unlock the folder."""
        self._flush()
        with contextlib.ExitStack() as stack:
            stack.callback(self._folder.close)
            if self._index is not None:
                stack.callback(self._index.close)
                self._index = None

    def counters(self) -> Mapping[str, int]:
        """What was found at open, and what failed since."""
        return {
            **self._counters,
            "strangers": len(self._strangers),
            "undeletable": self._files.undeletable,
            "undeleted": self._files.waiting,
        }

    def _header(self, key: PageKey, parent: PageKey | None, mask: int) -> PageHeader:
        lengths = tuple(size if mask >> pool & 1 else 0 for pool, size in enumerate(self._page_bytes))
        return PageHeader(self._namespace.storage_key(key), key, parent, lengths)

    def _drop_name(self, name: bytes) -> None:
        self._files.remove(self._folder.page_path(name))
        self._gone.add(name)

    def _end_clear(self) -> None:
        """Take the mark away once every file is deleted."""
        if self._mark.is_set and not self._files.waiting:
            self._mark.unset(self._cleared)
            self._cleared = []

    def _flush(self) -> None:
        if self._index is None:
            return
        try:
            self._index.apply([self._row(key, page) for key, page in self._changed.items()], self._gone)
        except sqlite3.Error:
            # What changed is kept and tried again later.
            self._counters["index_failures"] += 1
            self._flush_at = len(self._changed) + self._flush_pages
        else:
            self._changed.clear()
            self._flush_at = self._flush_pages
        # Rows without a file do no harm until the next open finds them.
        self._gone.clear()

    def _row(self, key: PageKey, page: HeldPage) -> IndexRow:
        header = self._header(key, page.parent, page.mask)
        return IndexRow(header.name, key, page.parent, page.mask, header.file_bytes, page.used)

    def _reconcile(self, index: DiskIndex) -> list[IndexRow]:
        """Make rows and files agree, and give the pages of both, least recently used first.

        Unfinished files are removed and rows without a file dropped. A file without a row, or of another length than
        its row says, is adopted as it is, the most recent if it has no row; removed if it is not sound.
        """
        rows = {row.name: row for row in index.take_rows()}
        kept: list[IndexRow] = []
        suspects: list[FoundFile] = []
        for found in self._folder.scan():
            row = None if found.name is None else rows.get(found.name)
            if row is not None and row.bytes == found.bytes:
                kept.append(row)
            else:
                suspects.append(found)
        adopted = self._adopt(suspects, rows)
        gone = rows.keys() - {row.name for row in kept} - {row.name for row in adopted}
        self._counters["lost"] += len(gone)
        try:
            index.apply(adopted, gone)
        except sqlite3.Error:
            self._counters["index_failures"] += 1
        return sorted(kept + adopted, key=lambda row: row.used)

    def _adopt(self, suspects: list[FoundFile], rows: Mapping[bytes, IndexRow]) -> list[IndexRow]:
        used = max((row.used for row in rows.values()), default=0)
        adopted: list[IndexRow] = []
        for found in sorted(suspects, key=lambda found: found.written):
            try:
                header = None if found.name is None else self._files.examine(found.path)
            except OSError:
                # It may be a page, which another open can read.
                self._counters["unreadable"] += 1
                continue
            if header is None or header.name != found.name:
                self._counters["unfinished" if found.name is None else "unsound"] += 1
                self._files.remove(found.path)
                continue
            used += 1
            last_used = rows[header.name].used if header.name in rows else used
            adopted.append(IndexRow(header.name, header.key, header.parent, header.mask, header.file_bytes, last_used))
        self._counters["adopted"] += len(adopted)
        return adopted

    def _own(self, rows: Iterable[IndexRow]) -> Iterable[tuple[PageKey, HeldPage]]:
        """Tell this namespace's pages from strangers; what this layout could not read is a stranger too."""
        own: list[tuple[PageKey, HeldPage]] = []
        for row in rows:
            mine = len(row.key) == len(row.name) and self._namespace.storage_key(row.key) == row.name
            header = self._header(row.key, row.parent, row.mask) if mine else None
            if header is not None and header.file_bytes == row.bytes:
                own.append((row.key, HeldPage(row.parent, header.mask, row.used)))
            else:
                self._strangers.append(row.name)
        return own


def disk_backend(
    path: Path, capacity_pages: int, namespace: Namespace, *, durable: bool = False, flush_pages: int = FLUSH_PAGES
) -> BoundedBackend:
    """The disk store without its loop; nothing is touched on disk before it is opened."""
    medium = DiskMedium(path, namespace, durable=durable, flush_pages=flush_pages)
    return BoundedBackend(capacity_pages, medium)


def open_store(options: Mapping[str, str], capacity_pages: int, path: Path | None, namespace: Namespace) -> Store:
    """Make a disk store of `capacity_pages` in the folder `path`.

    Option `fsync` (`false` unless set): with `true` a page that was written survives a loss of power. Without, pages
    torn by it fail their checksum and are misses, as they are after any other damage.
    """
    check_known("disk", options, ("fsync",))
    durable = boolean("disk", options, "fsync", default=False)
    if path is None:
        raise ConfigError("store disk: it needs a folder; give its path")
    backend = disk_backend(path, capacity_pages, namespace, durable=durable)
    return ThreadedStore("disk", backend, StoreTraits(namespace=namespace.digest))
