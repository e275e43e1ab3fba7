"""What other threads want of the loop: calls and tasks that run there, each answered once, at the latest by the end."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

import anyio.abc

from kvcr_actors.errors import ControllerClosedError, InboxClosedError
from kvcr_actors.runtime.bell import LoopBell
from kvcr_actors.runtime.foreign import contained, containing
from kvcr_actors.runtime.inbox import Inbox

T = TypeVar("T")

Errand: TypeAlias = Callable[[], Coroutine[Any, Any, None]]
"""A task that another thread wants done on the loop."""


class Questions:
    """The questions to one loop. `ask`, `run` and `send` are for any thread, the rest belongs to the loop.

    No question stays open: who asks enters it first and looks for the loop second, the end takes the loop away first
    and answers what was entered second.
    """

    def __init__(self, owner: str = "the controller") -> None:
        self._owner = owner
        self._bell: LoopBell | None = None
        self._errands: Inbox[Errand] = Inbox("errands", sys.maxsize)
        self._open: set[Future[Any]] = set()
        self._failure: Exception | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is a loop."""
        return self._bell is not None

    def ask(self, question: Callable[[], T]) -> Future[T]:
        """Call `question` on the loop; the future has what it returned or raised.

        ControllerClosedError is the answer where there is no loop, or it ends first.
        """
        answer, bell = self._enter(Future[T]()), self._bell

        def reply() -> None:
            try:
                answer.set_result(question())
            except BaseException as error:  # noqa: BLE001 - raised again where the caller waits
                _refuse(answer, contained(error))

        if bell is None:
            _refuse(answer, self._closed())
        else:
            bell.post(reply)
        return answer

    def run(self, task: Callable[[], Awaitable[T]]) -> Future[T]:
        """Run `task` on the loop, beside the actors; answered like `ask`, and refused once the actors failed."""
        answer = self._enter(Future[T]())

        async def errand() -> None:
            try:
                with containing():
                    result = await task()
                answer.set_result(result)
            except Exception as error:  # noqa: BLE001 - raised again where the caller waits
                _refuse(answer, error)

        if self._bell is None or not self.send(errand):
            _refuse(answer, self._closed())
        return answer

    def send(self, errand: Errand) -> bool:
        """Have an errand run, now or once there is a loop; False after the end."""
        try:
            self._errands.post(errand)
        except InboxClosedError:
            return False
        bell = self._bell
        if bell is not None:
            bell.ring()
        return True

    def start(self, bell: LoopBell, tasks: anyio.abc.TaskGroup) -> None:
        """Answer from now on; errands run in `tasks`."""
        bell.attach(self._errands)
        self._bell = bell
        tasks.start_soon(self._run_errands, tasks, name="errands")

    def fail(self, failure: Exception) -> None:
        """Take no more tasks, and tell who asks why."""
        self._failure = failure
        self._errands.close()

    def end(self) -> None:
        """The loop is over: answer what is still open."""
        self._bell = None
        self._errands.close()
        for answer in list(self._open):
            _refuse(answer, self._closed())

    async def _run_errands(self, tasks: anyio.abc.TaskGroup) -> None:
        while batch := await self._errands.take():
            for errand in batch:
                tasks.start_soon(errand, name="errand")

    def _enter(self, answer: Future[T]) -> Future[T]:
        self._open.add(answer)
        answer.add_done_callback(self._open.discard)
        return answer

    def _closed(self) -> ControllerClosedError:
        if self._failure is None:
            return ControllerClosedError(f"{self._owner} is not running; start it first")
        error = ControllerClosedError(f"{self._owner} failed: {self._failure}")
        error.__cause__ = self._failure
        return error


def _refuse(answer: Future[Any], error: Exception) -> None:
    """Answer with an error, unless the other side was faster."""
    with suppress(InvalidStateError):
        answer.set_exception(error)
