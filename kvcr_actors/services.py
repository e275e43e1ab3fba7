"""What a controller lends to its device and its store while they are open."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeAlias

import anyio.abc
import structlog

from kvcr_actors.core.inventory import InventoryEvent
from kvcr_actors.core.stats import ControllerStats
from kvcr_actors.runtime.bell import LoopBell
from kvcr_actors.runtime.foreign import ContainedTasks
from kvcr_actors.runtime.traces import traced

log = structlog.get_logger()

Task: TypeAlias = Callable[[], Coroutine[Any, Any, None]]


class LoopServices:
    """`Services` on the controller's loop. A task that raises ends the controller."""

    def __init__(
        self, tasks: anyio.abc.TaskGroup, bell: LoopBell, observe: Callable[[Sequence[InventoryEvent]], None]
    ) -> None:
        self._tasks = ContainedTasks(tasks)
        self._bell = bell
        self._observe = observe

    def spawn(self, task: Task, name: str) -> None:
        """Run a background task on the loop until the controller closes."""
        self._tasks.start_soon(task, name=name)

    def post(self, call: Callable[[], None]) -> None:
        """From any thread: run `call` on the loop soon."""
        self._bell.post(call)

    def publish(self, events: Sequence[InventoryEvent]) -> None:
        """Hand over inventory events of the implementation's own."""
        self._observe(events)


class StoreServices(LoopServices):
    """For the store: a task of it that raises is counted; its operations stay open, and end at their deadlines."""

    def __init__(
        self,
        tasks: anyio.abc.TaskGroup,
        bell: LoopBell,
        observe: Callable[[Sequence[InventoryEvent]], None],
        stats: ControllerStats,
    ) -> None:
        super().__init__(tasks, bell, observe)
        self._stats = stats

    def spawn(self, task: Task, name: str) -> None:
        """Run a background task; what it raises is a fault of the store and of nobody else."""

        async def contained() -> None:
            try:
                await task()
            except Exception as error:  # noqa: BLE001 - counted and logged: a store's own task ends nothing else
                self._stats.store_faults += 1
                log.error("store.task_failed", task=name, traceback=traced(error))

        super().spawn(contained, name)


def refuse_events(events: Sequence[InventoryEvent]) -> None:
    """What happens to events of a port that has none to tell: TypeError."""
    raise TypeError(f"{len(events)} events were published by a sink, the device or the ranks; only a store does")
