"""The way of inventory events to the publisher, from any thread: nobody waits, and what waits is bounded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final

from kvcr_actors.core.backlog import EventBacklog
from kvcr_actors.core.inventory import BlocksStored, Holding, InventoryEvent, TierCleared
from kvcr_actors.errors import InboxClosedError, InboxFullError
from kvcr_actors.events.intake import EventIntake
from kvcr_actors.messages import InventoryChanged
from kvcr_actors.runtime.inbox import Inbox

CHANGES_KEPT = 1 << 16
"""Key changes that may wait for the publisher, beyond the publishes that the intake keeps."""
_PART_KEYS: Final = 4_096
_CHANGED: Final = InventoryChanged()


class EventFeed:
    """What waits for the publisher, in order, and the index of what it has taken: an entry for each held page.

    Past the bounds the oldest events go straight to the index. `take` says of which holdings, and `restate` gives the
    events that make up for it. Without `has_sinks` nobody listens: nothing is kept.
    """

    def __init__(self, inbox: Inbox[InventoryChanged], *, has_sinks: bool) -> None:
        self._inbox = inbox
        self._has_sinks = has_sinks
        self._backlog = EventBacklog(CHANGES_KEPT)
        self._intake = EventIntake(self._backlog)
        self._closed = False

    def post(self, events: Sequence[InventoryEvent]) -> bool:
        """Leave events, from any thread, without a wake-up; False, with nothing taken, after `close`."""
        if self._closed:
            return False
        if self._has_sinks:
            self._intake.leave(events)
            with suppress(InboxFullError, InboxClosedError):  # word waits there already, or the last look is to come
                self._inbox.post(_CHANGED)
        return True

    def tell(self, events: Sequence[InventoryEvent]) -> bool:
        """Leave events from the loop, and wake the publisher."""
        is_taken = self.post(events)
        self._inbox.notify()
        return is_taken

    def take(self) -> tuple[list[InventoryEvent], Counter[Holding]]:
        """Take what waits, and how many earlier events of each holding no one will see. On the loop."""
        with self._intake.lock:
            return self._intake.take_all(), self._backlog.take_gaps()

    def restate(self, holdings: Iterable[Holding]) -> list[InventoryEvent]:
        """Give the events after which a sink has these holdings as they are, whatever it was told before.

        Each is cleared and stored anew, in the order in which its pages came. Costs time in proportion. On the loop.
        """
        events: list[InventoryEvent] = []
        for tier, owner in holdings:
            with self._intake.lock:
                held = self._backlog.index.holding(tier, owner)
                keys, parents = tuple(held), tuple(held.values())
            events.append(TierCleared(tier, owner))
            for start in range(0, len(keys), _PART_KEYS):
                part = slice(start, start + _PART_KEYS)
                events.append(BlocksStored(tier, keys[part], parents[part], owner))
        return events

    def close(self) -> None:
        """Take no more: no sink is open to hear of it."""
        self._closed = True
