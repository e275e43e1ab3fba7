"""What is no `Exception`, raised by foreign code on the loop, becomes one before it leaves its task.

asyncio lets SystemExit and KeyboardInterrupt of any task break out of the whole loop: whoever waits on it would never
be told. Stores, devices, ranks and sinks call libraries that may raise either.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVarTuple, cast

import anyio
from anyio.abc import TaskGroup

from kvcr_actors.errors import ForeignExitError

Ts = TypeVarTuple("Ts")


def contained(error: BaseException) -> Exception:
    """The error itself, or a ForeignExitError that is caused by it; for what a call raised that cannot be cancelled."""
    if isinstance(error, Exception):
        return error
    exit_ = ForeignExitError(f"{error!r} was raised by a library that a store, a device, ranks or a sink called")
    exit_.__cause__ = error
    return exit_


@contextmanager
def containing() -> Generator[None]:
    """Raise what is no exception as one, around code of a task; its cancellation passes.

    So does a GeneratorExit that comes alone: it says that the coroutine is being thrown away.
    """
    cancelled = anyio.get_cancelled_exc_class()
    try:
        yield
    except (Exception, GeneratorExit, cancelled):
        raise
    except BaseExceptionGroup as group:
        found = _first_exit(group, cancelled)
        if found is None:
            raise
        raise contained(found) from found
    except BaseException as error:
        raise contained(error) from error


class Tasks(Protocol):
    """Where an actor or a port starts its tasks."""

    def start_soon(self, func: Callable[[*Ts], Awaitable[Any]], *args: *Ts, name: object = None) -> None:
        """Start a task, as a task group does."""
        ...


class ContainedTasks:
    """The `Tasks` of a task group, which end with exceptions only."""

    def __init__(self, tasks: TaskGroup) -> None:
        self._tasks = tasks

    def start_soon(self, func: Callable[[*Ts], Awaitable[Any]], *args: *Ts, name: object = None) -> None:
        """Start a task, as the group does."""
        self._tasks.start_soon(_run, func, args, name=name)


async def _run(func: Callable[..., Awaitable[Any]], args: tuple[object, ...]) -> None:
    with containing():
        await func(*args)


def _first_exit(group: BaseExceptionGroup[BaseException], cancelled: type[BaseException]) -> BaseException | None:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            inner = _first_exit(cast("BaseExceptionGroup[BaseException]", error), cancelled)
            if inner is not None:
                return inner
        elif not isinstance(error, Exception | cancelled):
            return error
    return None
