"""A port's open and close: each port closes within a budget, also one whose open was cut short."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Protocol

import anyio
import structlog

from kvcr_actors.errors import DeadlineError
from kvcr_actors.ports import EventSink, RunningEventSink, Services

log = structlog.get_logger()

PORT_CLOSE_BUDGETS = 2
"""Drain budgets that a port's close may take before it is given up: its own, and one to notice that it is over."""


class Closable(Protocol):
    """What a device, a store, ranks and a running event sink have in common."""

    async def close(self, deadline_s: float) -> None:
        """End what runs, then close; DeadlineError if that takes longer."""
        ...


@asynccontextmanager
async def opened(
    what: str, port: Closable, open_port: Callable[[], Awaitable[None]], budget_s: float
) -> AsyncGenerator[None]:
    """Open a port for the length of a block; it is closed in each case."""
    async with closed_if_cut_short(what, port, budget_s):
        await open_port()
    try:
        yield
    finally:
        await close_port(what, port.close, budget_s)


async def open_sinks(stack: AsyncExitStack, sinks: Sequence[EventSink], services: Services, budget_s: float) -> None:
    """Open those event sinks that have something to start; the stack closes them."""
    for sink in sinks:
        if isinstance(sink, RunningEventSink):
            name = f"event sink {type(sink).__name__}"
            await stack.enter_async_context(opened(name, sink, partial(sink.open, services), budget_s))


@asynccontextmanager
async def closed_if_cut_short(what: str, port: Closable, budget_s: float) -> AsyncGenerator[None]:
    """Close a port whose open fails or is cancelled: its thread may run, and its folder be locked, all the same."""
    try:
        yield
    except BaseException:
        try:
            await close_port(what, port.close, budget_s)
        except Exception as error:  # noqa: BLE001 - what kept the port from opening is what the caller must see
            log.error("controller.close_failed", port=what, error=str(error))
        raise


async def close_port(
    what: str, close: Callable[[float], Awaitable[None]], budget_s: float, budgets: int = PORT_CLOSE_BUDGETS
) -> None:
    """Close a port within so many budgets, whatever happens around it; what it did not do in time is logged."""
    with anyio.CancelScope(shield=True):
        try:
            with anyio.fail_after(budget_s * budgets):
                await close(budget_s)
        except (DeadlineError, TimeoutError) as error:
            log.error("controller.close_deadline", port=what, error=str(error))
