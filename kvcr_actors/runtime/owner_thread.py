"""One thread that owns a blocking resource: calls run on it in order, their outcomes come back to the loop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import anyio
import attrs

from kvcr_actors.errors import ControllerClosedError, DeadlineError, ThreadDeadlineError
from kvcr_actors.ports import Services
from kvcr_actors.runtime.foreign import contained
from kvcr_actors.transfers import Operation

T = TypeVar("T")

_JOIN_S = 5.0


@attrs.frozen
class _Job(Generic[T]):
    call: Callable[[], T]
    on_error: Callable[[Exception], T] | None
    operation: Operation[T] | None


class OwnerThread:
    """A daemon thread for blocking calls of one device or store. `submit`, `post` and `close` belong to the loop.

    Outcomes return through `services.post`, each after what its call posted.
    """

    def __init__(self, name: str, services: Services) -> None:
        self.name = name
        self._services = services
        self._jobs: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        self._accepted = 0
        self._finished = 0
        self._closed = False
        self._ended = anyio.Event()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def depth(self) -> int:
        """Calls accepted and not yet finished, the running one included."""
        return self._accepted - self._finished

    def submit(self, call: Callable[[], T], on_error: Callable[[Exception], T]) -> Operation[T]:
        """Run `call` on the thread, after all before it; its result, or `on_error` of its exception, is the outcome.

        `on_error` must not raise, and may run on either thread. After `close` the outcome is at once `on_error` of a
        ControllerClosedError.
        """
        operation: Operation[T] = Operation()
        if self._closed:
            operation.settle(on_error(ControllerClosedError(f"{self.name} is closed")))
            return operation
        self._accepted += 1
        self._jobs.put(_Job(call, on_error, operation))
        return operation

    def post(self, call: Callable[[], None]) -> None:
        """Run `call` on the thread, after all before it. Its exception goes to the loop's error handler.

        Dropped after `close`.
        """
        if not self._closed:
            self._accepted += 1
            self._jobs.put(_Job(call, None, None))

    async def close(self, deadline_s: float) -> None:
        """Refuse new calls, let the accepted ones run, and end the thread.

        DeadlineError after `deadline_s`: calls that did not begin have then ended with that error; the one that runs
        is left alone, its operation stays open, and behind it what was posted still runs. Each `close` waits anew.
        """
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        with anyio.move_on_after(deadline_s):
            if not self._ended.is_set():
                await self._ended.wait()
            self._thread.join(_JOIN_S)  # its last act was to tell; what is left of it takes microseconds
            return
        words = f"{self.name}: a call did not end within {deadline_s:g} s; {self.depth} were accepted"
        error = ThreadDeadlineError(words, (self._thread,))
        self._give_up(error)
        raise error

    def _give_up(self, error: DeadlineError) -> None:
        posted: list[_Job[Any]] = []
        with suppress(Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is None:
                    continue
                if job.operation is None or job.on_error is None:
                    posted.append(job)  # has no outcome that could tell the error
                    continue
                self._accepted -= 1
                job.operation.settle(job.on_error(error))
        for job in (*posted, None):
            self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._run(job)
            self._finished += 1
            del job  # a waiting thread must not keep what its last call referred to
        self._services.post(self._ended.set)

    def _run(self, job: _Job[Any]) -> None:
        try:
            try:
                outcome = job.call()
            except BaseException as error:
                if job.on_error is None:
                    raise
                outcome = job.on_error(contained(error))
        except BaseException as error:  # noqa: BLE001 - raised again on the loop, for its error handler
            self._services.post(partial(_raise, error))
            return
        if job.operation is not None:
            # A post of its own: what the call posted before, such as events, must come before its outcome.
            self._services.post(partial(job.operation.settle, outcome))


async def close_threads(threads: Sequence[OwnerThread], deadline_s: float) -> None:
    """Close all at once, within `deadline_s`; DeadlineError names each that did not end, and no other."""
    late: dict[OwnerThread, ThreadDeadlineError] = {}

    async def close(thread: OwnerThread) -> None:
        try:
            await thread.close(deadline_s)
        except ThreadDeadlineError as error:
            late[thread] = error

    async with anyio.create_task_group() as tasks:
        for thread in threads:
            tasks.start_soon(close, thread)
    if late:
        errors = [late[thread] for thread in threads if thread in late]
        running = [thread for error in errors for thread in error.threads]
        raise ThreadDeadlineError("; ".join(map(str, errors)), running)


def _raise(error: BaseException) -> None:
    raise error
