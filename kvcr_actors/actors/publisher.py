"""Publishing: inventory events reach every sink in the order in which they happened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import structlog

from kvcr_actors.core.inventory import InventoryEvent
from kvcr_actors.core.stats import ControllerStats
from kvcr_actors.messages import InventoryChanged
from kvcr_actors.ports import EventSink

log = structlog.get_logger()


class PublisherActor:
    """Hands event batches to the sinks; a sink that raises loses that batch, counted, and nobody else's."""

    name = "publisher"
    busy = 0

    def __init__(self, sinks: Sequence[EventSink], stats: ControllerStats, overflow: list[InventoryEvent]) -> None:
        self._sinks = sinks
        self._stats = stats
        self._overflow = overflow

    async def handle(self, batch: Sequence[InventoryChanged]) -> None:
        """Publish everything that waits, as one batch."""
        self._publish_all(batch)

    def abandon(self, batch: Sequence[InventoryChanged], error: BaseException) -> None:
        """Publish all the same when the loop stops: publishing never waits."""
        del error
        self._publish_all(batch)

    async def drain(self) -> None:
        """Nothing is in flight."""

    def describe(self) -> dict[str, Any]:
        """Counters for people."""
        return {"published": self._stats.events_published, "dropped": self._stats.events_dropped}

    def _publish_all(self, batch: Sequence[InventoryChanged]) -> None:
        # What overflowed the inbox came after everything that is in it.
        events = [event for changed in batch for event in changed.events]
        events.extend(self._overflow)
        self._overflow.clear()
        self.publish(events)

    def publish(self, events: Sequence[InventoryEvent]) -> None:
        """Hand events to every sink at once."""
        for sink in self._sinks:
            try:
                sink.publish(events)
            except Exception as error:  # noqa: BLE001 - a sink is foreign code; one must not stop the others
                self._stats.events_dropped += len(events)
                log.error("publisher.sink_failed", sink=type(sink).__name__, events=len(events), error=repr(error))
        self._stats.events_published += len(events)
