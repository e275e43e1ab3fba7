"""A host without a thread: the program's loop moves only while its caller pumps it."""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Callable
from time import monotonic

from kvcr_actors.errors import ConfigError, DeadlineError
from kvcr_actors.runtime.hosts import CANCEL_S, Backend
from kvcr_actors.runtime.program import PROGRAM_NAME, Main, Program


class _PumpSelector(selectors.DefaultSelector):
    """Ends every turn of its loop after one look at it, and never sleeps longer than `patience_s`."""

    def __init__(self) -> None:
        super().__init__()
        self.patience_s: float | None = None
        self.was_idle = False
        self.end_turn: Callable[[], None] = _nothing

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.was_idle = timeout is None or timeout > 0
        if self.patience_s is not None:
            timeout = self.patience_s if timeout is None else min(timeout, self.patience_s)
            self.end_turn()
        return super().select(timeout)


class InlineHost:
    """Runs `main` on a private asyncio loop without a thread: it moves only while its caller pumps it.

    For measuring, and for engines that forbid threads. All calls belong to the thread that made it.
    """

    def __init__(self, main: Main, *, backend: Backend = "asyncio", name: str = PROGRAM_NAME) -> None:
        if backend != "asyncio":
            raise ConfigError(f"the inline host runs on asyncio only, not on {backend!r}; trio needs a thread or task")
        self._program = Program(main, name)
        self._thread = threading.get_ident()
        self._selector = _PumpSelector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        self._selector.end_turn = self._loop.stop
        self._task: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        """Whether `main` runs (while it is pumped)."""
        return self._task is not None and not self._task.done()

    def start(self, timeout_s: float) -> None:
        """Pump until `main` has started.

        Raises what `main` fails with before that; DeadlineError after `timeout_s`. `main` is cancelled, and waited for,
        when this does not return, whatever interrupts it.
        """
        self._check()
        if self._task is not None or self._loop.is_closed():
            raise self._program.was_started()
        task = self._task = self._loop.create_task(self._program.run(), name=self._program.name)
        try:
            self.pump_until(lambda: self._program.has_started or task.done(), timeout_s)
        except DeadlineError:
            self._end(task)
            raise DeadlineError(f"{self._program.name} did not start within {timeout_s:g} s") from None
        except BaseException:
            self._end(task)
            raise
        if not self._program.has_started:
            self._end(task)
            self._program.check_started()

    def pump(self, turns: int = 1) -> bool:
        """Run up to `turns` turns of the loop without waiting; whether something is left to run at once."""
        self._check()
        for _ in range(turns):
            self._turn(0.0)
            if self._selector.was_idle:
                return False
        return True

    def pump_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Run the loop until `condition()`, looked at after every turn; DeadlineError after `timeout_s`."""
        self._check()
        deadline = monotonic() + timeout_s
        while not condition():
            remaining = deadline - monotonic()
            if remaining <= 0:
                raise DeadlineError(f"{self._program.name}: the condition did not hold within {timeout_s:g} s")
            self._turn(remaining)

    def stop(self, timeout_s: float) -> None:
        """Ask `main` to end, pump until it has, and close the loop. A second call has nothing to do.

        Raises what `main` failed with, once; DeadlineError after `timeout_s`, and `main` is cancelled.
        """
        self._check()
        task = self._task
        if self._loop.is_closed():
            return
        if task is None:
            self._loop.close()
            return
        if not task.done():
            self._program.ask_stop()
            self._loop.call_soon(self._program.apply)
        try:
            self.pump_until(task.done, timeout_s)
        except DeadlineError:
            raise DeadlineError(f"{self._program.name} did not end within {timeout_s:g} s") from None
        finally:
            self._end(task)
        self._program.raise_failure()

    def _turn(self, patience_s: float) -> None:
        self._selector.patience_s = patience_s
        try:
            self._loop.run_forever()
        finally:
            self._selector.patience_s = None

    def _end(self, task: asyncio.Task[None]) -> None:
        if not task.done():
            self._program.ask_cancel()
            self._loop.call_soon(self._program.apply)
            self.pump_until(task.done, CANCEL_S)
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _check(self) -> None:
        self._program.check_process()
        if threading.get_ident() != self._thread:
            raise RuntimeError(f"{self._program.name}: only the thread that made an inline host may use it")
        if self._loop.is_running():
            raise RuntimeError(f"{self._program.name}: the inline host is being pumped already")
        if _is_in_asyncio():
            raise RuntimeError(f"{self._program.name}: another loop runs on this thread; use the task host there")


def _is_in_asyncio() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _nothing() -> None:
    pass
