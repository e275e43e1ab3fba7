"""One run of an async `main(started, stop)`, as the hosts handle it: started, stopped, cancelled, failed."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import anyio

from kvcr_actors.runtime.foreign import containing

Main: TypeAlias = Callable[[Callable[[], None], anyio.Event], Awaitable[None]]
"""It calls `started()` when it is ready, and ends soon after `stop` is set."""

PROGRAM_NAME = "kvcr-actors"
"""What a controller's program is called, also its thread."""


def wrong_process(name: str, process: int) -> RuntimeError:
    """The error of a forked child that uses its parent's program."""
    return RuntimeError(f"{name} belongs to process {process}; make a new one after a fork")


class Program:
    """One run of `main` on its loop: what it waits for, how it ended, and how to end it.

    `ask_stop` and `ask_cancel` are for any thread, at any time; they take effect with the next `apply` on the loop.
    """

    def __init__(self, main: Main, name: str) -> None:
        self.name = name
        self.has_started = False
        self.failure: BaseException | None = None
        self._main = main
        self._on_started: Callable[[], None] | None = None
        self._stop: anyio.Event | None = None
        self._scope: anyio.CancelScope | None = None
        self._stop_asked = False
        self._cancel_asked = False
        self._process = os.getpid()

    async def run(self, on_started: Callable[[], None] | None = None) -> None:
        """Run `main` to its end; its failure is kept and not raised. `on_started` follows its `started()`."""
        self._on_started = on_started
        try:
            with anyio.CancelScope() as self._scope:
                stop = self._stop = anyio.Event()
                self.apply()
                with containing():
                    await self._main(self._note_started, stop)
        except Exception as error:  # noqa: BLE001 - raised again by the host's start or stop
            self.failure = error

    def ask_stop(self) -> None:
        """Ask `main` to end."""
        self._stop_asked = True

    def ask_cancel(self) -> None:
        """Have `main` cancelled."""
        self._cancel_asked = True

    def apply(self) -> None:
        """Do what was asked so far. On the loop."""
        if self._stop is not None and self._stop_asked:
            self._stop.set()
        if self._scope is not None and self._cancel_asked:
            self._scope.cancel()

    def check_process(self) -> None:
        """Refuse a forked child: its copy of the loop has no thread."""
        if os.getpid() != self._process:
            raise wrong_process(self.name, self._process)

    def was_started(self) -> RuntimeError:
        """The error of a second start: one run is all that a program has."""
        return RuntimeError(f"{self.name} was started or closed already, and runs once; make a new one")

    def raise_failure(self) -> None:
        """Raise what `main` failed with, the first time."""
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def check_started(self) -> None:
        """Raise what kept `main` from starting."""
        self.raise_failure()
        if not self.has_started:
            raise RuntimeError(f"{self.name} ended before it had started")

    def _note_started(self) -> None:
        self.has_started = True
        if self._on_started is not None:
            self._on_started()
