"""A port's open and close: each port closes within a budget, also one whose open was cut short.

What does not close in time is noted, for the controller's own close to name: work of a device or a store may then still
write memory.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Protocol, cast

import anyio
import structlog

from kvcr_actors.core.values import shown
from kvcr_actors.errors import ConfigError, DeadlineError, KvcrActorsError, ThreadDeadlineError
from kvcr_actors.ports import EventSink, RunningEventSink, Services, Store, StoreTraits
from kvcr_actors.runtime.memory_lease import MemoryLease

log = structlog.get_logger()

PORT_CLOSE_BUDGETS = 2
"""Drain budgets that a port's close may take before it is given up: its own, and one to notice that it is over."""


class Closable(Protocol):
    """What a device, a store, ranks and a running event sink have in common."""

    async def close(self, deadline_s: float) -> None:
        """End what runs, then close; DeadlineError if that takes longer."""
        ...


def check_store(store: object) -> None:
    """ConfigError for what is no store, before anything is done with it."""
    given = cast("Store", store)
    try:
        fits = type(given.name) is str and isinstance(cast("object", given.traits), StoreTraits)
    except AttributeError:
        fits = False
    if not fits:
        raise ConfigError(f"store {shown(store)} is a {type(store).__name__}; give a store, as open_store makes one")


class LatePorts:
    """The ports that did not close in time, or of which nobody knows, and the threads that they left running."""

    def __init__(self) -> None:
        self._errors: dict[str, str] = {}
        self._memory: dict[str, tuple[threading.Thread, ...] | None] = {}

    def note(self, what: str, error: BaseException, *, uses_memory: bool) -> None:
        """Note that a port's close ended with an error."""
        self._errors[what] = f"{what}: {error or repr(error)}"
        if uses_memory:
            self._memory[what] = error.threads if isinstance(error, ThreadDeadlineError) else None

    @property
    def words(self) -> tuple[str, ...]:
        """What each port said."""
        return tuple(self._errors.values())

    @property
    def is_memory_quiet(self) -> bool:
        """Whether device and store have closed: then nothing of theirs touches memory."""
        return not self._memory

    @property
    def threads(self) -> tuple[threading.Thread, ...] | None:
        """Those after whose end memory is quiet; None if that is not known of a port."""
        found: list[threading.Thread] = []
        for threads in self._memory.values():
            if threads is None:
                return None
            found += threads
        return tuple(found)


def give_back(lease: MemoryLease, late: LatePorts) -> None:
    """Let another owner have the memory, once it is quiet."""
    if late.is_memory_quiet:
        lease.give_back()
    else:
        lease.give_back_after("; ".join(late.words), late.threads)


@asynccontextmanager
async def opened(
    what: str,
    port: Closable,
    open_port: Callable[[], Awaitable[None]],
    budget_s: float,
    late: LatePorts,
    *,
    uses_memory: bool = False,
) -> AsyncGenerator[None]:
    """Open a port for the length of a block; it is closed in each case."""
    async with closed_if_cut_short(what, port, budget_s, late, uses_memory=uses_memory):
        await open_port()
    try:
        yield
    finally:
        await close_port(what, port.close, budget_s, late, uses_memory=uses_memory)


async def open_sinks(
    stack: AsyncExitStack, sinks: Sequence[EventSink], services: Services, budget_s: float, late: LatePorts
) -> None:
    """Open those event sinks that have something to start; the stack closes them."""
    for sink in sinks:
        if isinstance(sink, RunningEventSink):
            name = f"event sink {type(sink).__name__}"
            await stack.enter_async_context(opened(name, sink, partial(sink.open, services), budget_s, late))


@asynccontextmanager
async def closed_if_cut_short(
    what: str, port: Closable, budget_s: float, late: LatePorts, *, uses_memory: bool = False
) -> AsyncGenerator[None]:
    """Close a port whose open fails or is cancelled: its thread may run, and its folder be locked, all the same."""
    try:
        yield
    except BaseException:
        try:
            await close_port(what, port.close, budget_s, late, uses_memory=uses_memory)
        except Exception as error:  # noqa: BLE001 - what kept the port from opening is what the caller must see
            log.error("controller.close_failed", port=what, error=str(error))
        raise


async def close_port(
    what: str,
    close: Callable[[float], Awaitable[None]],
    budget_s: float,
    late: LatePorts,
    *,
    uses_memory: bool = False,
    budgets: int = PORT_CLOSE_BUDGETS,
) -> None:
    """Close a port within so many budgets, whatever happens around it; what it did not do in time is noted in `late`.

    Raises what the port raises else, and notes it too: an error of the package's own says that the port is closed.
    """
    with anyio.CancelScope(shield=True):
        try:
            with anyio.fail_after(budget_s * budgets):
                await close(budget_s)
        except (DeadlineError, TimeoutError) as error:
            late.note(what, error, uses_memory=uses_memory)
            log.error("controller.close_deadline", port=what, error=str(error))
        except KvcrActorsError:
            raise
        except BaseException as error:
            late.note(what, error, uses_memory=uses_memory)
            raise
