"""Loops whose clock jumps to the next timer when nothing can run: days pass in milliseconds, the same way each time.

A virtual clock knows nothing of threads: it jumps while one works. Programs with threads need the real clock.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import selectors
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeAlias, TypeVar

import anyio
import trio
from trio.testing import MockClock

T = TypeVar("T")

BackendName: TypeAlias = Literal["asyncio-virtual", "trio-virtual", "asyncio", "trio"]

VIRTUAL: tuple[BackendName, ...] = ("asyncio-virtual", "trio-virtual")
REAL: tuple[BackendName, ...] = ("asyncio", "trio")

_DEADLOCK_S = 10.0


class _JumpingSelector(selectors.DefaultSelector):
    """Where a loop would sleep until its next timer, move the clock instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:  # no timer: only another thread can still wake the loop
            events = super().select(_DEADLOCK_S)
            if not events:
                raise RuntimeError(
                    f"virtual time: all tasks wait, there is no timer, no thread woke the loop in {_DEADLOCK_S:g} s"
                )
            return events
        events = super().select(0)
        if not events and timeout > 0:
            self.now += timeout
        return events


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An asyncio loop that starts at time 0 and sleeps by moving its clock."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jumping.now

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Schedule as every loop does, but a timer at infinity (`sleep_forever`) never: it is none to jump to."""
        if math.isinf(when):
            return asyncio.TimerHandle(when, callback, args, self, context)
        return super().call_at(when, callback, *args, context=context)


def seed_trio_scheduler(seed: int) -> None:
    """Make trio's shuffling of runnable tasks the same in every run. For this process, until seeded again."""
    trio._core._run._r.seed(seed)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]


def backend_options(name: BackendName, *, seed: int = 0) -> tuple[str, dict[str, Any]]:
    """What `anyio.run` and anyio's pytest fixture `anyio_backend` need for one run; build it anew for each.

    `asyncio-virtual` and `trio-virtual` have a virtual clock; trio's scheduler is seeded with `seed`.
    """
    match name:
        case "asyncio":
            return "asyncio", {}
        case "asyncio-virtual":
            return "asyncio", {"loop_factory": VirtualClockLoop}
        case "trio":
            return "trio", {}
        case "trio-virtual":
            seed_trio_scheduler(seed)
            return "trio", {"clock": MockClock(autojump_threshold=0)}


def run_virtual(program: Callable[[], Awaitable[T]], *, backend: BackendName = "asyncio-virtual", seed: int = 0) -> T:
    """Run an async program to its end, on virtual time unless `backend` says otherwise."""
    name, options = backend_options(backend, seed=seed)
    return anyio.run(program, backend=name, backend_options=options)
