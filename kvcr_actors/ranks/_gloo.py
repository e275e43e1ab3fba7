"""The few calls of torch.distributed that the ranks need, with types and one kind of error."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from time import monotonic
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage] - torch's own stubs lack it
from torch.distributed import Store as TorchStore  # pyright: ignore[reportPrivateImportUsage]

_SLICE = timedelta(milliseconds=50)
"""How often a waiting collective asks whether it should go on."""

_gloo = cast("Any", dist.ProcessGroupGloo)


class CollectiveError(Exception):
    """A peer is gone or late, the shared store does not answer, or the caller gave up."""


class SharedStore:
    """A `torch.distributed.Store` with typed calls. Each may block as long as its server does."""

    def __init__(self, store: TorchStore) -> None:
        self.raw = store

    def add(self, key: str, amount: int) -> int:
        """Add to a number (0 if there is none yet) and return the sum."""
        return int(self._call(lambda: self.raw.add(key, amount)))

    def put(self, key: str, value: str) -> None:
        """Set a value."""
        self._call(lambda: self.raw.set(key, value))

    def get(self, key: str) -> str | None:
        """The value of a key; None if it has none yet."""
        return self._call(lambda: self.raw.get(key)).decode() if self._call(lambda: self.raw.check([key])) else None

    def swap(self, key: str, expected: str, value: str) -> str:
        """Set a value if the present one is `expected` (empty: there is none), and return the present one."""
        return self._call(lambda: self.raw.compare_set(key, expected, value)).decode()

    @staticmethod
    def _call(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:  # the base of torch's DistError
            raise CollectiveError(f"the shared store: {_first_line(error)}") from error


class GlooGroup:
    """One process group of one epoch. Building it waits for all ranks; a failed call makes it useless.

    Letting go of it waits, without the GIL, for a collective that is still under way.
    """

    def __init__(self, store: SharedStore, name: str, rank: int, size: int, interface: str, deadline_s: float) -> None:
        self._size = size
        self._deadline_s = deadline_s
        try:
            options = _gloo._Options()  # noqa: SLF001 - the public name exists in the stubs only
            options._timeout = timedelta(seconds=deadline_s)  # noqa: SLF001
            options._devices = [_gloo.create_device(interface=interface)]  # noqa: SLF001
            self._group = _gloo(PrefixStore(name, store.raw), rank, size, options)
        except RuntimeError as error:
            raise CollectiveError(f"the group was not joined: {_first_line(error)}") from error

    def gather(self, mine: bytes, goes_on: Callable[[], bool]) -> list[bytes]:
        """One all-gather of equally long values; `goes_on` is asked now and then whether to wait further."""
        tensor = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        theirs = [torch.empty_like(tensor) for _ in range(self._size)]
        end = monotonic() + self._deadline_s
        try:
            work = self._group.allgather([theirs], [tensor])
            while not _is_over(work):
                if monotonic() > end:
                    raise CollectiveError(f"a rank did not join within {self._deadline_s:g} s")
                if not goes_on():
                    raise CollectiveError("given up")
        except RuntimeError as error:
            raise CollectiveError(_first_line(error)) from error
        return [one.numpy().tobytes() for one in theirs]


def _is_over(work: Any) -> bool:
    """Wait for one slice of time; raises RuntimeError if the work failed."""
    try:
        work.wait(_SLICE)
    except RuntimeError:
        if not work.is_completed():
            return False
        # It failed, or it ended well just after the slice: only another wait tells which.
        work.wait(_SLICE)
    return True


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
