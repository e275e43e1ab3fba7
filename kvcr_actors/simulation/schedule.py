"""Schedules that a seed alone decides: neither the addresses of objects nor the process has a say.

Both loops keep tasks in sets and go through them when they cancel. This reaches into private parts of trio and anyio,
for the simulator alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from itertools import count
from typing import Any

import trio
from anyio._backends import _asyncio
from anyio.lowlevel import current_token


@contextmanager
def seeded_schedule() -> Generator[None]:
    """Have trio order runnable tasks by age before it shuffles them, and anyio's scopes on asyncio numbered."""
    core: Any = trio._core._run  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    backend: Any = _asyncio
    _NumberedTask.numbers, _NumberedScope.numbers = count(), count()
    before = core._ALLOW_DETERMINISTIC_SCHEDULING, backend.CancelScope  # noqa: SLF001
    core._ALLOW_DETERMINISTIC_SCHEDULING, backend.CancelScope = True, _NumberedScope  # noqa: SLF001
    try:
        yield
    finally:
        core._ALLOW_DETERMINISTIC_SCHEDULING, backend.CancelScope = before  # noqa: SLF001


def number_tasks() -> None:
    """On asyncio: number the tasks that the running loop makes from now on."""
    loop = current_token().native_token
    if isinstance(loop, asyncio.AbstractEventLoop):
        loop.set_task_factory(_NumberedTask.make)


class _NumberedTask(asyncio.Task[Any]):
    """A task that keeps its place in sets from run to run."""

    numbers = count()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._number = next(self.numbers)
        super().__init__(*args, **kwargs)

    @classmethod
    def make(cls, loop: asyncio.AbstractEventLoop, coroutine: Any, **kwargs: Any) -> _NumberedTask:
        """Be a loop's task factory."""
        return cls(coroutine, loop=loop, **kwargs)

    def __hash__(self) -> int:
        return self._number


class _NumberedScope(_asyncio.CancelScope):
    """A scope that keeps its place in sets from run to run."""

    numbers = count()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        scope = object.__new__(cls)
        scope._number = next(cls.numbers)
        return scope

    _number: int

    def __hash__(self) -> int:
        return self._number
