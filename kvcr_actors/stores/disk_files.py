"""Page files: written whole under another name and renamed, read in one call, deleted now or later."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence

import attrs

from kvcr_actors.stores.disk_folder import FILE_MODE, UNFINISHED, StoreFolder
from kvcr_actors.stores.disk_page import PageHeader, read_into, read_whole

# Something that replaced a page file may be a link or a pipe: do not follow the one, nor wait for the other.
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW


@attrs.define
class PageFiles:
    """The page files of an open folder, by their paths in it. OSError means that one file failed.

    With `durable` a file that was written survives a loss of power; without, what is torn then fails its checksum.
    """

    folder: StoreFolder
    durable: bool
    undeletable: int = 0
    """Files that could not be deleted when they should have been, ever."""
    _waiting: dict[str, None] = attrs.field(factory=dict[str, None], init=False)

    @property
    def waiting(self) -> int:
        """Files whose deletion failed and will be tried again."""
        return len(self._waiting)

    def write(self, path: str, buffers: Sequence[bytes | memoryview]) -> None:
        """Make a file of the buffers, or replace it, at once; after an OSError an earlier file is as it was."""
        unfinished = path + UNFINISHED
        root = self.folder.root_fd
        try:
            fd = self._create(unfinished)
            try:
                _write_all(fd, buffers)
                if self.durable:
                    os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(unfinished, path, src_dir_fd=root, dst_dir_fd=root)
        except OSError:
            # What stays behind is written over by the next try, or removed at the next open.
            with contextlib.suppress(OSError):
                os.unlink(unfinished, dir_fd=root)
            raise
        self._waiting.pop(path, None)
        if self.durable:
            try:
                self._sync(path[:2])
            except OSError:
                self.remove(path)
                raise

    def read(self, path: str, buffers: Sequence[bytearray | memoryview]) -> bool:
        """Fill the buffers; False if the file is not as long as they are together, OSError if a read is short."""
        fd = os.open(path, _READ, dir_fd=self.folder.root_fd)
        try:
            return read_into(fd, buffers)
        finally:
            os.close(fd)

    def examine(self, path: str) -> PageHeader | None:
        """Read and check a file of which nothing is known; None if it is no sound page, OSError if nobody can tell."""
        status = os.stat(path, dir_fd=self.folder.root_fd, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            return None
        fd = os.open(path, _READ, dir_fd=self.folder.root_fd)
        try:
            return read_whole(fd)
        finally:
            os.close(fd)

    def remove(self, path: str) -> None:
        """Delete a file, or remember to; one that is gone already is fine."""
        if not self._try_remove(path):
            self.undeletable += 1
            self._waiting[path] = None

    def retry_removal(self) -> None:
        """Try once more to delete the file that waits the longest."""
        if self._waiting:
            path = next(iter(self._waiting))
            del self._waiting[path]
            if not self._try_remove(path):
                self._waiting[path] = None

    def _try_remove(self, path: str) -> bool:
        try:
            os.unlink(path, dir_fd=self.folder.root_fd)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def _create(self, path: str) -> int:
        try:
            return os.open(path, _WRITE, FILE_MODE, dir_fd=self.folder.root_fd)
        except FileNotFoundError:
            self.folder.add_shard(path)
            if self.durable:
                os.fsync(self.folder.root_fd)
            return os.open(path, _WRITE, FILE_MODE, dir_fd=self.folder.root_fd)

    def _sync(self, shard: str) -> None:
        fd = os.open(shard, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.folder.root_fd)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _write_all(fd: int, buffers: Sequence[bytes | memoryview]) -> None:
    """Write every byte. A short write is continued, so that the error which cut it short is raised."""
    total = sum(map(len, buffers))
    written = os.writev(fd, buffers)
    if written < total:
        rest = memoryview(b"".join(buffers))
        while written < total:
            written += os.write(fd, rest[written:])
