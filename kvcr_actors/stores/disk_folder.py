"""The folder of a disk store: its lock, its format, and where the file of a page lies in it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
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
_BEFORE_FORMAT = frozenset({_LOCK, _FORMAT + UNFINISHED})
"""What a process may leave that ended before it wrote the format file."""
_SHARD = re.compile(r"[0-9a-f]{2}")
_PAGE = re.compile(r"[0-9a-f]{64}")


@attrs.frozen
class FoundFile:
    """A page file by its path in the folder; `name` is None while it is unfinished, `written` in ns."""

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
        """Where the index lies."""
        return self.path / _INDEX

    def open(self) -> None:
        """Make the folder if need be, lock it and check its format; StoreError says what is wrong."""
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            try:
                self.path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
                self._refuse_foreign()
                self._lock()
                self._check_format()
                self.path.chmod(FOLDER_MODE)
                self._root_fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
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
        with os.scandir(self.path) as shards:
            names = sorted(shard.name for shard in shards if _SHARD.fullmatch(shard.name))
        for shard in names:
            with os.scandir(self.path / shard) as files:
                for file in files:
                    text = file.name.removesuffix(UNFINISHED)
                    if _PAGE.fullmatch(text) and text[:2] == shard:
                        name = bytes.fromhex(text) if text == file.name else None
                        status = file.stat(follow_symlinks=False)
                        yield FoundFile(f"{shard}/{file.name}", name, status.st_size, status.st_mtime_ns)

    def _refuse_foreign(self) -> None:
        if (self.path / _FORMAT).exists():
            return
        others = sorted({entry.name for entry in self.path.iterdir()} - _BEFORE_FORMAT)
        # Another process may have written the format file since the first look.
        if others and _FORMAT not in others:
            raise StoreFormatError(
                f"folder {self.path} is not a store, and holds other files ({others[0]}, ...): choose an empty folder"
            )

    def _lock(self) -> None:
        self._lock_fd = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreLockedError(
                f"store folder {self.path} is in use by another store: close that one, or choose another folder"
            ) from error

    def _check_format(self) -> None:
        path = self.path / _FORMAT
        try:
            found = path.read_text(errors="replace")
        except FileNotFoundError:
            unfinished = self.path / (_FORMAT + UNFINISHED)
            unfinished.touch(FILE_MODE)
            unfinished.write_text(FORMAT)
            unfinished.replace(path)
            return
        if found != FORMAT:
            raise StoreFormatError(
                f"store folder {self.path} has {found.strip()[:80]!r}, and this version reads {FORMAT.strip()!r}: "
                "open it with the version that wrote it, or delete it (a cache fills again)"
            )
