"""Publishing: inventory events reach every sink in order; what one missed is made up for by a snapshot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import anyio
import attrs
import structlog

from kvcr_actors.core.inventory import Holding, InventoryEvent, Ownership
from kvcr_actors.core.stats import ControllerStats
from kvcr_actors.events.feed import EventFeed
from kvcr_actors.messages import InventoryChanged
from kvcr_actors.ports import EventSink
from kvcr_actors.runtime.foreign import Tasks
from kvcr_actors.types import Tier

log = structlog.get_logger()

_REST_S: Final = 1.0
"""The least time from one snapshot to the next: it costs the loop time in proportion to what is held."""
_MOST_RESTS: Final = 64
"""A sink that goes on raising is tried again after 1, 2, 4 ... rests, and at last after so many."""
_ALL: Final[frozenset[Holding]] = frozenset((tier, owner) for tier in Tier for owner in Ownership)


@attrs.define(eq=False)
class _Outlet:
    """A sink, and what it must be told anew before it hears of any change there."""

    sink: EventSink
    stale: set[Holding] = attrs.field(factory=set[Holding])
    rests_until: float = -math.inf
    failures: int = 0
    """In a row."""

    @property
    def name(self) -> str:
        return type(self.sink).__name__


class Outlets:
    """All sinks of a controller, with what each has missed; they outlive the publisher's incarnations.

    A sink misses what the feed dropped, or has missed anything once it raises. Events of a holding that it misses are
    kept from it until a snapshot of that holding, which is due at once, and then after a rest.
    """

    def __init__(self, sinks: Sequence[EventSink], feed: EventFeed, stats: ControllerStats) -> None:
        self._outlets = [_Outlet(sink) for sink in sinks]
        self._feed = feed
        self._stats = stats
        self._snapshots = 0

    @property
    def is_whole(self) -> bool:
        """Whether every sink knows all that it was to know."""
        return not any(outlet.stale for outlet in self._outlets)

    def publish(self, *, last: bool = False) -> None:
        """Tell every sink what waits, and what it missed if its rest is over, or this is the last time."""
        events, gaps = self._feed.take()
        self._stats.events_published += len(events)
        if gaps:
            self._stats.events_dropped += gaps.total()
            log.warning("publisher.events_dropped", events=gaps.total(), repair="snapshot")
        now = anyio.current_time()
        for outlet in self._outlets:
            outlet.stale.update(gaps)
            if outlet.stale:
                self._tell_stale(outlet, events, now, is_due=last or now >= outlet.rests_until)
            elif events:
                self._tell(outlet, events, len(events), now)

    def describe(self) -> dict[str, Any]:
        """Counters for people."""
        return {
            "published": self._stats.events_published,
            "dropped": self._stats.events_dropped,
            "snapshots": self._snapshots,
            "stale": [outlet.name for outlet in self._outlets if outlet.stale],
        }

    def _tell_stale(self, outlet: _Outlet, events: Sequence[InventoryEvent], now: float, *, is_due: bool) -> None:
        told = [event for event in events if (event.tier, event.ownership) not in outlet.stale]
        count = len(told)
        self._stats.events_dropped += len(events) - count
        if is_due:
            told.extend(self._feed.restate(outlet.stale))
        if told and self._tell(outlet, told, count, now) and is_due:
            log.warning("publisher.told_anew", sink=outlet.name, holdings=len(outlet.stale))
            outlet.stale.clear()
            outlet.rests_until = now + _REST_S
            self._snapshots += 1

    def _tell(self, outlet: _Outlet, events: Sequence[InventoryEvent], count: int, now: float) -> bool:
        """Hand events over, of which `count` are changes; whether the sink took them."""
        try:
            outlet.sink.publish(events)
        except Exception as error:  # noqa: BLE001 - a sink is foreign code; one must not stop the others
            outlet.stale.update(_ALL)  # what it took of them, and did with it, nobody knows
            outlet.rests_until = now + _REST_S * min(_MOST_RESTS, 1 << outlet.failures)
            outlet.failures += 1
            self._stats.events_dropped += count
            log.error("publisher.sink_failed", sink=outlet.name, events=count, repair="snapshot", error=repr(error))
            return False
        outlet.failures = 0
        return True


class PublisherActor:
    """Hands events to the sinks whenever some wait, and looks after the sinks that missed some."""

    name = "publisher"
    busy = 0

    def __init__(self, outlets: Outlets, tasks: Tasks) -> None:
        self._outlets = outlets
        self._tasks = tasks
        self._repairs = False
        self._see_to_repairs()

    async def handle(self, batch: Sequence[InventoryChanged]) -> None:
        """Publish everything that waits."""
        del batch
        self._outlets.publish()
        self._see_to_repairs()

    def abandon(self, batch: Sequence[InventoryChanged], error: BaseException) -> None:
        """Publish all the same when the loop stops: publishing never waits."""
        del batch, error
        self._outlets.publish()

    async def drain(self) -> None:
        """Nothing is in flight; the assembly's last look tells sinks what they still miss."""

    def describe(self) -> dict[str, Any]:
        """Counters for people."""
        return self._outlets.describe()

    def _see_to_repairs(self) -> None:
        if not self._repairs and not self._outlets.is_whole:
            self._repairs = True
            self._tasks.start_soon(self._repair, name="publisher repairs")

    async def _repair(self) -> None:
        """Try again without waiting for an event: none may ever come."""
        while not self._outlets.is_whole:
            await anyio.sleep(_REST_S)
            self._outlets.publish()
        self._repairs = False
