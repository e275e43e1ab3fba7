"""What a runtime lends to a device or a store, without the runtime: for tests of one edge alone."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
from anyio.abc import TaskGroup

from kvcr_actors.core.inventory import InventoryEvent, InventoryIndex
from kvcr_actors.runtime.bell import LoopBell


class RecordingServices:
    """`Services` on the running loop; every event is kept in `events` and applied to `inventory`.

    `errors` has the exceptions that posted calls raised; `open_services` raises them at its end.
    """

    def __init__(self, tasks: TaskGroup) -> None:
        self.events: list[InventoryEvent] = []
        self.inventory = InventoryIndex()
        self.errors: list[Exception] = []
        self._tasks = tasks
        self._bell = LoopBell(self.errors.append)

    def spawn(self, task: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        """Run a background task on the loop until the services end."""
        self._tasks.start_soon(task, name=name)

    def post(self, call: Callable[[], None]) -> None:
        """From any thread: run `call` on the loop soon."""
        self._bell.post(call)

    def publish(self, events: Sequence[InventoryEvent]) -> None:
        """Record events in order."""
        self.events.extend(events)
        self.inventory.publish(events)

    def close(self) -> None:
        """Run what was posted and take no more."""
        self._bell.close()


@asynccontextmanager
async def open_services() -> AsyncGenerator[RecordingServices]:
    """Lend services until the block ends; then cancel their tasks and raise what posted calls raised."""
    async with anyio.create_task_group() as tasks:
        services = RecordingServices(tasks)
        try:
            yield services
        finally:
            services.close()
            tasks.cancel_scope.cancel()
        if services.errors:
            raise ExceptionGroup("posted calls failed", services.errors)
