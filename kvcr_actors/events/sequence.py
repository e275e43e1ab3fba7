"""Sequence numbers that only move forward, over restarts too: readers ignore a publisher that starts again below."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvcr_actors.errors import ConfigError

_RESERVE: Final = 1 << 16
"""Numbers that one write of the file covers; a restart skips what is left of them."""
_END: Final = (1 << 64) - 1
"""The number that ends a replay; no batch has it."""


def _microseconds() -> int:
    return time.time_ns() // 1_000


class SequenceCounter:
    """Gives the numbers of one publisher, each once. `reserve` blocks on the file once in 65,536 numbers.

    With a `path`, the file keeps the first number that was never promised; one publisher uses it at a time. Without,
    numbers start at the clock's microseconds, so that a clock set back over a restart makes the publisher stale.
    """

    def __init__(self, path: Path | None = None, clock: Callable[[], int] = _microseconds) -> None:
        self._path = path
        self._next = clock() if path is None else _read(path)
        self._promised = self._next if path is not None else _END

    @property
    def next(self) -> int:
        """The number that the next `take` gives."""
        return self._next

    def reserve(self, count: int) -> None:
        """Make the next `count` takes (65,536 at most) free of the file. OSError if it cannot be written."""
        if self._path is not None and self._next + count > self._promised:
            _write(self._path, self._next + _RESERVE)
            self._promised = self._next + _RESERVE

    def take(self) -> int:
        """Take the next number, reserved or not; OSError as `reserve`, and the number is not used then."""
        self.reserve(1)
        number = self._next
        self._next += 1
        return number


def _read(path: Path) -> int:
    try:
        text = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return 0
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"sequence file {path} cannot be read ({error}); correct it, or name another") from error
    if not text.isdigit() or int(text) >= _END - _RESERVE:
        raise ConfigError(
            f"sequence file {path} holds {text[:40]!r}, not a sequence number; delete it, or name another"
        )
    return int(text)


def _write(path: Path, number: int) -> None:
    """Replace the file whole and durably: a number given out must not come again after a crash."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    with draft.open("w", encoding="ascii") as file:
        file.write(f"{number}\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
