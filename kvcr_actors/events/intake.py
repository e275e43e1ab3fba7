"""Events on their way from threads that must not wait to one that may come late: what waits is bounded."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from kvcr_actors.core.backlog import EventBacklog
from kvcr_actors.core.inventory import InventoryEvent

PUBLISHES_KEPT = 1_024
"""Publishes that may wait before those who leave more bound them, because nobody comes for them."""
_TURN = 2
"""Of those, how many go to the backlog at each further one: more than come, and too few to hold anybody up."""


class EventIntake:
    """A backlog that any thread fills at the cost of an append. `lock` is for who empties it; who leaves never waits.

    Unless the lock is held at that moment, each publish past the bound moves the oldest two into the backlog, which
    past its own limit passes them on to its index.
    """

    def __init__(self, backlog: EventBacklog) -> None:
        self.lock = threading.Lock()
        """Guards the backlog, and what it has in its index."""
        self._backlog = backlog
        self._incoming: deque[Sequence[InventoryEvent]] = deque()

    def __len__(self) -> int:
        """Publishes that are not in the backlog yet."""
        return len(self._incoming)

    def leave(self, events: Sequence[InventoryEvent]) -> None:
        """Leave events, from any thread; those of one thread keep their order."""
        self._incoming.append(events)
        if len(self._incoming) > PUBLISHES_KEPT and self.lock.acquire(blocking=False):
            try:
                for _ in range(_TURN):
                    self._backlog.push(self._incoming.popleft(), coalesce=False)
            finally:
                self.lock.release()

    def ingest(self) -> None:
        """Move everything into the backlog. With the lock held."""
        for _ in range(len(self._incoming)):
            self._backlog.push(self._incoming.popleft())

    def take_all(self) -> list[InventoryEvent]:
        """Take everything out, oldest first, and bring the index up to date with it. With the lock held."""
        events: list[InventoryEvent] = []
        while (event := self._backlog.take()) is not None:
            events.append(event)
        for _ in range(len(self._incoming)):
            events.extend(self._incoming.popleft())
        self._backlog.index.publish(events)
        return events
