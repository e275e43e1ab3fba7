"""The folder of a disk store: whose it is, its lock, its format, and where the file of a page lies in it.

Before anything is written or locked, the folder is opened without following a link, and it must belong to the user of
the process and be writable for nobody else, whoever the user is. From then on everything is reached through that one
descriptor: whatever becomes of the path, or of the folders above it, no other folder is written to.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import attrs

from kvcr_actors.errors import StoreError, StoreFormatError, StoreLockedError

FORMAT = "kvcr-actors disk store, format 1\n"
FOLDER_MODE = 0o700
FILE_MODE = 0o600
UNFINISHED = ".tmp"
"""The ending of a page file that is being written."""

_LOCK, _FORMAT = "lock", "format"
_INDEX = "index.sqlite3"
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Neither follow a link nor wait for a pipe."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_SQLITE = frozenset({_INDEX, *(_INDEX + ending for ending in ("-wal", "-shm", "-journal"))})
_ASIDE = ".damaged"
_BEFORE_FORMAT = frozenset({_LOCK, _FORMAT + UNFINISHED})
"""What a process may leave that ended before it wrote the format file."""
_SHARD = re.compile(r"[0-9a-f]{2}")
_PAGE = re.compile(r"[0-9a-f]{64}")


@attrs.frozen
class FoundFile:
    """A page file by its path in the folder; `name` is None while it is unfinished, `written` in ns.

    `bytes` is -1 for what has the name of a page file and is no file.
    """

    path: str
    name: bytes | None
    bytes: int
    written: int


class StoreFolder:
    """A folder that this process alone uses, from `open` to `close`.

    Page files lie in 256 subfolders by the first byte of their name, and are reached through one descriptor of the
    folder. The lock is the kernel's: it ends with the process, however that ends.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_fd: int | None = None
        self._root_fd: int | None = None

    @property
    def index_path(self) -> Path:
        """Where the index lies, by the open folder and not by its path, which others may turn elsewhere."""
        return Path(f"/proc/self/fd/{self.root_fd}") / _INDEX

    def open(self) -> None:
        """Make the folder if need be, check that it is private, lock it and check its format; StoreError says why not.

        What is not a file or a folder of the kind that its name says is set aside under another name.
        """
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileExistsError):
                    self.path.mkdir(mode=FOLDER_MODE)
                self._root_fd = self._open_private()
                self._refuse_foreign()
                self._lock()
                self._check_format()
                os.fchmod(self._root_fd, FOLDER_MODE)
                self._set_aside_impostors()
            except OSError as error:
                raise StoreError(f"store folder {self.path} cannot be used: {error}") from error
            undo.pop_all()

    def close(self) -> None:
        """Unlock the folder."""
        for fd in (self._root_fd, self._lock_fd):
            if fd is not None:
                os.close(fd)
        self._root_fd = self._lock_fd = None

    @property
    def root_fd(self) -> int:
        """A descriptor of the folder, for calls that take a `dir_fd`."""
        if self._root_fd is None:
            raise StoreError(f"store folder {self.path} is not open")
        return self._root_fd

    @staticmethod
    def page_path(name: bytes) -> str:
        """A page's file, relative to the folder."""
        text = name.hex()
        return f"{text[:2]}/{text}"

    def add_shard(self, page_path: str) -> None:
        """Make the subfolder of a page's file."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(page_path[:2], FOLDER_MODE, dir_fd=self.root_fd)

    def scan(self) -> Iterator[FoundFile]:
        """Yield the page files, unfinished ones too. Files that are not a store's are left alone."""
        for shard in sorted(filter(_SHARD.fullmatch, self._names())):
            fd = os.open(shard, _FOLDER, dir_fd=self.root_fd)
            try:
                yield from self._scan_shard(shard, fd)
            finally:
                os.close(fd)

    @staticmethod
    def _scan_shard(shard: str, fd: int) -> Iterator[FoundFile]:
        with os.scandir(fd) as files:
            for file in files:
                text = file.name.removesuffix(UNFINISHED)
                if _PAGE.fullmatch(text) and text[:2] == shard:
                    name = bytes.fromhex(text) if text == file.name else None
                    status = file.stat(follow_symlinks=False)
                    size = status.st_size if stat.S_ISREG(status.st_mode) else -1
                    yield FoundFile(f"{shard}/{file.name}", name, size, status.st_mtime_ns)

    def _open_private(self) -> int:
        """Open the folder; StoreError unless it is this user's own and nobody else can write to it."""
        if self.path.is_symlink():
            raise StoreError(f"store folder {self.path} is a symbolic link: give the folder that it points to")
        fd = os.open(self.path, _FOLDER)
        status, user = os.fstat(fd), os.geteuid()
        wrong = None
        if status.st_uid != user:
            wrong = (
                f"belongs to user {status.st_uid}, and this process is user {user}: "
                "choose another folder, run as its owner, or give it to this user (chown -R)"
            )
        elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            wrong = (
                f"can be written to by others (mode {stat.S_IMODE(status.st_mode):03o}), who may have put files there: "
                f"choose another folder, or look through it and take their right away (chmod {FOLDER_MODE:o})"
            )
        if wrong is not None:
            os.close(fd)
            raise StoreError(f"store folder {self.path} {wrong}")
        return fd

    def _names(self) -> set[str]:
        with os.scandir(self.root_fd) as entries:
            return {entry.name for entry in entries}

    def _refuse_foreign(self) -> None:
        found = self._names()
        others = sorted(found - _BEFORE_FORMAT)
        # Another process may have written the format file since.
        if _FORMAT not in found and others and _FORMAT not in self._names():
            raise StoreFormatError(
                f"folder {self.path} is not a store, and holds other files ({others[0]}, ...): choose an empty folder"
            )

    def _set_aside_impostors(self) -> None:
        """What bears a name of the store's and is not this user's file, or folder, gets another name, unopened."""
        for name in self._names():
            is_kind = stat.S_ISDIR if _SHARD.fullmatch(name) else stat.S_ISREG if name in _SQLITE else None
            if is_kind is not None:
                status = os.stat(name, dir_fd=self.root_fd, follow_symlinks=False)
                if not is_kind(status.st_mode) or status.st_uid != os.geteuid():
                    self._set_aside(name)

    def _set_aside(self, name: str) -> None:
        taken = self._names()
        free = next(aside for n in count(1) if (aside := f"{name}{_ASIDE}.{n}") not in taken)
        os.rename(name, free, src_dir_fd=self.root_fd, dst_dir_fd=self.root_fd)

    def _open_file(self, name: str, flags: int) -> int:
        """Open a file of the store's own; StoreFormatError if its name leads to anything else."""
        try:
            status = os.stat(name, dir_fd=self.root_fd, follow_symlinks=False)
        except FileNotFoundError:
            pass
        else:
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise StoreFormatError(
                    f"store folder {self.path}: {name!r} is a link, a pipe or another user's file, and no file of the "
                    "store's: look who put it there, and delete it or choose another folder"
                )
        return os.open(name, flags | _OPEN, FILE_MODE, dir_fd=self.root_fd)

    def _lock(self) -> None:
        self._lock_fd = self._open_file(_LOCK, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreLockedError(
                f"store folder {self.path} is in use by another store: close that one, or choose another folder"
            ) from error

    def _check_format(self) -> None:
        try:
            fd = self._open_file(_FORMAT, os.O_RDONLY)
        except FileNotFoundError:
            self._write_format()
            return
        try:
            found = os.read(fd, 2 * len(FORMAT)).decode(errors="replace")
        finally:
            os.close(fd)
        if found != FORMAT:
            raise StoreFormatError(
                f"store folder {self.path} has {found.strip()[:80]!r}, and this version reads {FORMAT.strip()!r}: "
                "open it with the version that wrote it, or delete it (a cache fills again)"
            )

    def _write_format(self) -> None:
        unfinished, root = _FORMAT + UNFINISHED, self.root_fd
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished, dir_fd=root)
        fd = self._open_file(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            os.write(fd, FORMAT.encode())
        finally:
            os.close(fd)
        os.rename(unfinished, _FORMAT, src_dir_fd=root, dst_dir_fd=root)
