"""The disk store's index: which page files there are and when each was used, in one SQLite table.

It is a summary of the page files, which name themselves: a lost or damaged index costs a scan and the order of use.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path

import attrs

from kvcr_actors.errors import StoreError
from kvcr_actors.stores.disk_folder import FILE_MODE
from kvcr_actors.types import KEY_BYTES, PageKey

_TABLE = """pages (
    name BLOB PRIMARY KEY, key BLOB NOT NULL, parent BLOB,
    mask INTEGER NOT NULL, bytes INTEGER NOT NULL, used INTEGER NOT NULL
) WITHOUT ROWID"""
_STRANGE = "SELECT count(*) FROM sqlite_master WHERE NOT (type = 'table' AND name = 'pages' AND sql = ?)"
# A row whose values have other types, lengths or sizes is damaged: it is not seen, and its file is adopted anew.
_ROWS = """
SELECT name, key, parent, mask, bytes, used FROM pages
WHERE typeof(name) = 'blob' AND typeof(key) = 'blob' AND typeof(parent) IN ('blob', 'null')
    AND typeof(mask) = 'integer' AND typeof(bytes) = 'integer' AND typeof(used) = 'integer'
    AND length(name) = :key AND length(key) = :key AND length(coalesce(parent, key)) = :key
    AND mask > 0 AND bytes > 0 AND used BETWEEN 0 AND :latest
ORDER BY used
"""
_LIMITS = {"key": KEY_BYTES, "latest": 1 << 61}
"""A count of uses ends far below: there is always room to count on."""
_PUT = "INSERT OR REPLACE INTO pages (name, key, parent, mask, bytes, used) VALUES (?, ?, ?, ?, ?, ?)"
_UNUSABLE = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR})
"""Primary result codes that mean that the file's content is at fault, not the disk or its rights."""


class _StrangeError(Exception):
    """The file is a database of something else, or does more than hold rows."""


@attrs.frozen
class IndexRow:
    """One page: the name of its file, its key and parent, the pools it holds, the file's length, its last use."""

    name: bytes
    key: PageKey
    parent: PageKey | None
    mask: int
    bytes: int
    used: int


class DiskIndex:
    """The table, open from construction to `close`; only the thread that made it may use it."""

    def __init__(self, path: Path, *, durable: bool) -> None:
        """Open or create; StoreError if the disk refuses, an unusable file is replaced by an empty table."""
        self.rebuilt = False
        try:
            self._db, self._rows = self._connect_or_rebuild(path, durable=durable)
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"store index {path} cannot be opened: {error}") from error

    def take_rows(self) -> list[IndexRow]:
        """The rows as they were at open, least recently used first; given once."""
        rows = self._rows
        self._rows = []
        return rows

    def apply(self, rows: Iterable[IndexRow], gone: Iterable[bytes]) -> None:
        """Put rows and delete names in one transaction; sqlite3.Error leaves the table as it was."""
        with self._db:
            self._db.execute("BEGIN")
            self._db.executemany("DELETE FROM pages WHERE name = ?", [(name,) for name in gone])
            self._db.executemany(_PUT, [attrs.astuple(row) for row in rows])

    def close(self) -> None:
        """Close; the write-ahead log is folded into the table."""
        self._db.close()

    def _connect_or_rebuild(self, path: Path, *, durable: bool) -> tuple[sqlite3.Connection, list[IndexRow]]:
        try:
            return _connect(path, durable=durable)
        except _StrangeError:
            pass
        except sqlite3.Error as error:
            if error.sqlite_errorcode & 0xFF not in _UNUSABLE:
                raise
        for ending in ("", "-wal", "-shm", "-journal"):
            Path(f"{path}{ending}").unlink(missing_ok=True)
        self.rebuilt = True
        return _connect(path, durable=durable)


def _connect(path: Path, *, durable: bool) -> tuple[sqlite3.Connection, list[IndexRow]]:
    # SQLite would make the file as the umask says.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE))
    with contextlib.ExitStack() as undo:
        db = sqlite3.connect(path, isolation_level=None)
        undo.callback(db.close)
        # The folder's lock keeps others out; SQLite need not share memory with anybody.
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        db.execute(f"CREATE TABLE IF NOT EXISTS {_TABLE}")
        if db.execute(_STRANGE, (f"CREATE TABLE {_TABLE}",)).fetchone() != (0,):
            raise _StrangeError
        rows = [IndexRow(*row) for row in db.execute(_ROWS, _LIMITS)]
        undo.pop_all()
    return db, rows
