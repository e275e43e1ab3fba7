"""Interrupt an async operation at its k-th checkpoint, for every k, on asyncio and trio.

    k = 1
    while await cancelled_at(k, operation):
        check_what_must_hold()
        k += 1

A checkpoint is a place where the operation really suspends. What runs in tasks of its own is not counted here; for an
actor's tasks there is `count_tasks`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

import anyio

from kvcr_actors.runtime.foreign import Tasks


class Interruption:
    """Calls `act` once, right before the k-th suspension (from 1) that it counts. `act` must not raise."""

    def __init__(self, k: int, act: Callable[[], object]) -> None:
        if k < 1:
            raise ValueError(f"checkpoint {k}: they count from 1")
        self.seen = 0
        """Suspensions so far."""
        self._k = k
        self._act = act

    @property
    def happened(self) -> bool:
        """Whether there were as many suspensions as that."""
        return self.seen >= self._k

    def note(self) -> None:
        """Count one suspension."""
        self.seen += 1
        if self.seen == self._k:
            self._act()


class _Counted(Awaitable[Any]):
    """Awaits a coroutine, and tells an interruption of each of its suspensions."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], interruption: Interruption) -> None:
        self._coroutine = coroutine
        self._interruption = interruption

    def __await__(self) -> Generator[Any, Any, Any]:
        step: Callable[[], Any] = lambda: self._coroutine.send(None)  # noqa: E731 - replaced in the loop
        while True:
            try:
                request = step()
            except StopIteration as end:
                return end.value
            self._interruption.note()
            try:
                answer = yield request
            except BaseException as error:  # noqa: BLE001 - passed on to the coroutine
                step = _throwing(self._coroutine, error)
            else:
                step = _sending(self._coroutine, answer)


def _throwing(coroutine: Coroutine[Any, Any, Any], error: BaseException) -> Callable[[], Any]:
    return lambda: coroutine.throw(error)


def _sending(coroutine: Coroutine[Any, Any, Any], answer: Any) -> Callable[[], Any]:
    return lambda: coroutine.send(answer)


async def cancelled_at(k: int, operation: Callable[[], Coroutine[Any, Any, Any]]) -> bool:
    """Run an operation and cancel it at its k-th checkpoint; False if it ended before it came to that one."""
    with anyio.CancelScope() as scope:
        interruption = Interruption(k, scope.cancel)
        await _Counted(operation(), interruption)
        return interruption.happened
    return True


def count_tasks(tasks: Tasks, interruption: Interruption) -> Tasks:
    """From now on the suspensions of all tasks that the group starts are counted together; returns the group."""
    start_soon = tasks.start_soon

    def start_counted(func: Callable[..., Coroutine[Any, Any, Any]], *args: Any, name: object = None) -> Any:
        async def counted() -> None:
            await _Counted(func(*args), interruption)

        return start_soon(counted, name=name)

    tasks.start_soon = start_counted  # pyright: ignore[reportAttributeAccessIssue]
    return tasks
