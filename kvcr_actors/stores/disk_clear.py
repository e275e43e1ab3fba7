"""A disk store's clear survives any end of its process: the folder is marked before the first page file goes.

Whoever opens a marked folder finishes the clear. The mark goes last, once the deletions are on the disk; a page that
was written in between and is deleted with the others is a miss.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from kvcr_actors.errors import StoreError
from kvcr_actors.stores.disk_folder import FILE_MODE, StoreFolder

MARK = "clearing"
_SET = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class ClearMark:
    """The mark in an open folder."""

    __slots__ = ("_folder", "is_set")

    def __init__(self, folder: StoreFolder) -> None:
        self._folder = folder
        self.is_set = False
        """Whether a clear is under way."""

    def set(self) -> None:
        """Mark the folder; StoreError, with nothing deleted yet, if the disk refuses."""
        root = self._folder.root_fd
        try:
            fd = os.open(MARK, _SET, FILE_MODE, dir_fd=root)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            os.fsync(root)
        except OSError as error:
            raise StoreError(
                f"store folder {self._folder.path} cannot be marked for a clear: {error}; its pages may come back "
                "after a restart: delete the folder, or give the store another namespace"
            ) from error
        self.is_set = True

    def unset(self, names: Iterable[bytes]) -> None:
        """The files of these pages are deleted: wait until the disk knows it, then take the mark away.

        What fails leaves the mark: the next open clears again.
        """
        root = self._folder.root_fd
        with contextlib.suppress(OSError):
            for shard in {self._folder.page_path(name)[:2] for name in names}:
                _sync(shard, root)
            os.unlink(MARK, dir_fd=root)
            os.fsync(root)
            self.is_set = False

    def finish(self) -> None:
        """At open, before anything is read: if the folder is marked, delete its pages and its index, or OSError."""
        folder = self._folder
        try:
            os.stat(MARK, dir_fd=folder.root_fd, follow_symlinks=False)
        except FileNotFoundError:
            return
        names: list[bytes] = []
        for found in list(folder.scan()):
            os.unlink(found.path, dir_fd=folder.root_fd)
            if found.name is not None:
                names.append(found.name)
        for ending in ("", "-wal", "-shm", "-journal"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{folder.index_path.name}{ending}", dir_fd=folder.root_fd)
        self.unset(names)


def _sync(shard: str, root: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        fd = os.open(shard, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=root)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
