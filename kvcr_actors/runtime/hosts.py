"""Where a controller's program runs: on a thread of its own, as a task of a running loop, or pumped by its caller.

All three run one async `main(started, stop)`: it calls `started()` when it is ready, and ends soon after `stop` is set.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Callable
from time import monotonic
from typing import Literal, TypeAlias

import anyio

from kvcr_actors.errors import ConfigError, DeadlineError
from kvcr_actors.runtime.bell import LoopAccess
from kvcr_actors.runtime.program import Main, Program

Backend: TypeAlias = Literal["asyncio", "trio"]

_CANCEL_S = 5.0


class ThreadHost:
    """Runs `main` on a daemon thread. For synchronous callers: an engine's scheduler loop, a script."""

    def __init__(self, main: Main, *, backend: Backend = "asyncio", name: str = "kvcr-actors") -> None:
        self._program = Program(main, name)
        self._backend = backend
        self._access: LoopAccess | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_running(self) -> bool:
        """Whether `main` runs."""
        return self._thread.is_alive()

    def check(self) -> None:
        """RuntimeError in a forked child, which has no copy of the thread. Costs about a system call."""
        self._program.check_process()

    def start(self, timeout_s: float) -> None:
        """Start the thread and wait until `main` has started.

        Raises what `main` fails with before that; DeadlineError after `timeout_s`, and `main` is cancelled.
        """
        self.check()
        self._thread.start()
        if not self._ready.wait(timeout_s):
            self._program.ask_cancel()
            self._wake()
            self._thread.join(_CANCEL_S)
            raise DeadlineError(f"{self._program.name} did not start within {timeout_s:g} s")
        if not self._program.has_started:
            self._thread.join(_CANCEL_S)
            self._program.check_started()

    def stop(self, timeout_s: float) -> None:
        """Ask `main` to end, and wait. A second call has nothing to do.

        Raises what `main` failed with, once; DeadlineError after `timeout_s`, and `main` is cancelled.
        """
        self.check()
        if self._thread is threading.current_thread():
            raise RuntimeError(f"{self._program.name}: stop() blocks; call it from a thread that does not run the loop")
        if self._thread.ident is None:
            return
        self._program.ask_stop()
        self._wake()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._program.ask_cancel()
            self._wake()
            raise DeadlineError(f"{self._program.name} did not end within {timeout_s:g} s")
        self._program.raise_failure()

    def _wake(self) -> None:
        if self._access is None:  # the thread is not that far; `run` looks itself
            return
        try:
            self._access.wake(self._program.apply)
        except RuntimeError:  # the loop ended meanwhile
            return

    def _run(self) -> None:
        try:
            anyio.run(self._enter, backend=self._backend)
        except BaseException as error:  # noqa: BLE001 - a thread's end: start() or stop() raises it
            self._program.failure = error
        finally:
            self._ready.set()

    async def _enter(self) -> None:
        self._access = LoopAccess.of_running_loop()
        await self._program.run(self._ready.set)


class TaskHost:
    """Runs `main` as one background task of the loop that is running, asyncio or trio.

    Start and stop may happen in different tasks: no scope or task group is left open in between.
    """

    def __init__(self, main: Main, *, name: str = "kvcr-actors") -> None:
        self._program = Program(main, name)
        self._access: LoopAccess | None = None
        self._task: object = None
        self._ready = anyio.Event()
        self._ended = anyio.Event()

    @property
    def is_running(self) -> bool:
        """Whether `main` runs."""
        return self._task is not None and not self._ended.is_set()

    async def start(self, timeout_s: float) -> None:
        """Start the task and wait until `main` has started.

        Raises what `main` fails with before that; DeadlineError after `timeout_s`. `main` is cancelled when this
        does not return.
        """
        if self._task is not None:
            raise RuntimeError(f"{self._program.name} was started already")
        self._access = LoopAccess.of_running_loop()
        self._ready, self._ended = anyio.Event(), anyio.Event()
        self._task = self._spawn(self._access)
        try:
            with anyio.move_on_after(timeout_s):
                await self._ready.wait()
        except BaseException:
            self._cancel()
            raise
        if not self._ready.is_set():
            self._cancel()
            await self._wait_for_end(_CANCEL_S)
            raise DeadlineError(f"{self._program.name} did not start within {timeout_s:g} s")
        if not self._program.has_started:
            self._program.check_started()

    async def stop(self, timeout_s: float) -> None:
        """Ask `main` to end, and wait. A second call has nothing to do.

        Raises what `main` failed with, once; DeadlineError after `timeout_s`, and `main` is cancelled.
        """
        if self._access is None:
            return
        if self._access.token is not LoopAccess.of_running_loop().token:
            raise RuntimeError(f"{self._program.name} was started on another loop; stop it there")
        if not self._ended.is_set():
            self._program.ask_stop()
            self._program.apply()
            if not await self._wait_for_end(timeout_s):
                self._cancel()
                await self._wait_for_end(_CANCEL_S)
                raise DeadlineError(f"{self._program.name} did not end within {timeout_s:g} s")
        self._program.raise_failure()

    def _cancel(self) -> None:
        self._program.ask_cancel()
        self._program.apply()

    async def _wait_for_end(self, timeout_s: float) -> bool:
        with anyio.move_on_after(timeout_s):
            await self._ended.wait()
        return self._ended.is_set()

    def _spawn(self, access: LoopAccess) -> object:
        if isinstance(access.token, asyncio.AbstractEventLoop):
            return access.token.create_task(self._run(), name=self._program.name)
        from trio.lowlevel import spawn_system_task  # an asyncio program need not load trio

        return spawn_system_task(self._run, name=self._program.name)

    async def _run(self) -> None:
        try:
            await self._program.run(self._ready.set)
        finally:
            self._ready.set()
            self._ended.set()


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

    def __init__(self, main: Main, *, backend: Backend = "asyncio", name: str = "kvcr-actors") -> None:
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

        Raises what `main` fails with before that; DeadlineError after `timeout_s`, and `main` is cancelled.
        """
        self._check()
        if self._task is not None:
            raise RuntimeError(f"{self._program.name} was started already")
        task = self._task = self._loop.create_task(self._program.run(), name=self._program.name)
        try:
            self.pump_until(lambda: self._program.has_started or task.done(), timeout_s)
        except DeadlineError:
            self._end(task)
            raise DeadlineError(f"{self._program.name} did not start within {timeout_s:g} s") from None
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
            self.pump_until(task.done, _CANCEL_S)
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
