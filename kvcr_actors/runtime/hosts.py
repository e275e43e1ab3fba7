"""Where a controller's program runs: on a thread of its own, or as a task of a running loop.

These, and the inline host, run one async `main(started, stop)`: it calls `started()` when it is ready, and ends soon
after `stop` is set.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Literal, TypeAlias

import anyio

from kvcr_actors.errors import DeadlineError
from kvcr_actors.runtime.bell import LoopAccess
from kvcr_actors.runtime.program import PROGRAM_NAME, Main, Program

Backend: TypeAlias = Literal["asyncio", "trio"]

CANCEL_S = 5.0
"""What a program gets to end once it is cancelled."""


class ThreadHost:
    """Runs `main` on a daemon thread. For synchronous callers: an engine's scheduler loop, a script."""

    def __init__(self, main: Main, *, backend: Backend = "asyncio", name: str = PROGRAM_NAME) -> None:
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

        Raises what `main` fails with before that; DeadlineError after `timeout_s`. `main` is cancelled, and waited for,
        when this does not return, whatever interrupts it.
        """
        self.check()
        if self._thread.ident is not None:
            raise self._program.was_started()
        try:
            self._thread.start()
            in_time = self._ready.wait(timeout_s)
        except BaseException:
            self._cancel()
            raise
        if not in_time:
            self._cancel()
            raise DeadlineError(f"{self._program.name} did not start within {timeout_s:g} s")
        if not self._program.has_started:
            self._thread.join(CANCEL_S)
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

    def _cancel(self) -> None:
        self._program.ask_cancel()
        self._wake()
        if self._thread.is_alive():
            self._thread.join(CANCEL_S)

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

    def __init__(self, main: Main, *, name: str = PROGRAM_NAME) -> None:
        self._program = Program(main, name)
        self._access: LoopAccess | None = None
        self._task: object = None
        self._ready = anyio.Event()
        self._ended = anyio.Event()

    @property
    def is_running(self) -> bool:
        """Whether `main` runs."""
        return self._task is not None and not self._ended.is_set()

    def check(self) -> None:
        """RuntimeError in a forked child, whose copy of the loop is the parent's."""
        self._program.check_process()

    async def start(self, timeout_s: float) -> None:
        """Start the task and wait until `main` has started.

        Raises what `main` fails with before that; DeadlineError after `timeout_s`. `main` is cancelled when this
        does not return.
        """
        self.check()
        if self._task is not None:
            raise self._program.was_started()
        self._access = LoopAccess.of_running_loop()
        self._ready, self._ended = anyio.Event(), anyio.Event()
        self._task = self._spawn(self._access)
        try:
            with anyio.move_on_after(timeout_s):
                await self._ready.wait()
        except BaseException:
            self._cancel()
            with anyio.CancelScope(shield=True):
                await self._wait_for_end(CANCEL_S)
            raise
        if not self._ready.is_set():
            self._cancel()
            await self._wait_for_end(CANCEL_S)
            raise DeadlineError(f"{self._program.name} did not start within {timeout_s:g} s")
        if not self._program.has_started:
            self._program.check_started()

    async def stop(self, timeout_s: float) -> None:
        """Ask `main` to end, and wait. A second call has nothing to do.

        Raises what `main` failed with, once; DeadlineError after `timeout_s`, and `main` is cancelled.
        """
        self.check()
        if self._access is None:
            return
        if self._access.token is not LoopAccess.of_running_loop().token:
            raise RuntimeError(f"{self._program.name} was started on another loop; stop it there")
        if not self._ended.is_set():
            self._program.ask_stop()
            self._program.apply()
            if not await self._wait_for_end(timeout_s):
                self._cancel()
                await self._wait_for_end(CANCEL_S)
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
