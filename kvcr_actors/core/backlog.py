"""Inventory events between those who cause them and a sink that is slower: bounded, and always right in the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import assert_never

from kvcr_actors.core.inventory import (
    BlocksRemoved,
    BlocksStored,
    Holding,
    InventoryEvent,
    InventoryIndex,
    Ownership,
    TierCleared,
)
from kvcr_actors.types import PageKey, Tier

_HOLDINGS: tuple[Holding, ...] = tuple((tier, owner) for tier in Tier for owner in Ownership)


class EventBacklog:
    """A queue of events with at most `limit` key changes, and the index of what has left it.

    Past the limit, changes of one key are coalesced; if that is not enough, the oldest events go straight to the index
    and are never seen one by one: `dropped` counts their changes, and `has_gap` asks for a snapshot of the index.
    """

    def __init__(self, limit: int) -> None:
        self.index = InventoryIndex()
        self.dropped = 0
        self.coalesced = 0
        self.has_gap = False
        self._limit = limit
        self._queue: deque[InventoryEvent] = deque()
        self._changes = 0

    def __len__(self) -> int:
        """Key changes that wait."""
        return self._changes

    def push(self, events: Iterable[InventoryEvent], *, coalesce: bool = True) -> None:
        """Queue events. `coalesce=False` keeps the cost in proportion to `events`: past the limit it only drops."""
        for event in events:
            self._queue.append(event)
            self._changes += weight(event)
        if self._changes > self._limit and coalesce:
            self._coalesce()
        while self._changes > self._limit:
            event = self._queue.popleft()
            changes = weight(event)
            self._changes -= changes
            self.dropped += changes
            self.has_gap = True
            self.index.apply(event)

    def take(self) -> InventoryEvent | None:
        """Take the oldest event out; whoever does applies it to the index. None if none waits."""
        if not self._queue:
            return None
        event = self._queue.popleft()
        self._changes -= weight(event)
        return event

    def _coalesce(self) -> None:
        """Replace the queue by its net effect: clears, then removals, then stores, each in their own last order."""
        before = self._changes
        nets = {holding: _NetChange() for holding in _HOLDINGS}
        for event in self._queue:
            nets[event.tier, event.ownership].add(event)
        self._queue.clear()
        for phase in (_NetChange.clears, _NetChange.removals, _NetChange.stores):
            for holding, net in nets.items():
                self._queue.extend(phase(net, holding))
        self._changes = sum(map(weight, self._queue))
        self.coalesced += before - self._changes


class _NetChange:
    """What a run of events does to one holding, whatever happened in between."""

    def __init__(self) -> None:
        self._cleared = False
        self._stored: dict[PageKey, PageKey | None] = {}
        self._removed: dict[PageKey, None] = {}
        self._replaced: dict[PageKey, None] = {}
        """Removed first and stored again: held before and after, so nothing to tell."""

    def add(self, event: InventoryEvent) -> None:
        match event:
            case BlocksStored():
                for key, parent in zip(event.keys, event.parents, strict=True):
                    if key in self._removed:
                        del self._removed[key]
                        self._replaced[key] = None
                    else:
                        self._stored[key] = parent
            case BlocksRemoved():
                for key in event.keys:
                    if key in self._stored:
                        del self._stored[key]
                    else:
                        self._replaced.pop(key, None)
                        self._removed[key] = None
            case TierCleared():
                self._cleared = True
                for changes in (self._stored, self._removed, self._replaced):
                    changes.clear()
            case _:
                assert_never(event)

    def clears(self, holding: Holding) -> Sequence[InventoryEvent]:
        return [TierCleared(*holding)] if self._cleared else []

    def removals(self, holding: Holding) -> Sequence[InventoryEvent]:
        tier, owner = holding
        return [BlocksRemoved(tier, tuple(self._removed), owner)] if self._removed else []

    def stores(self, holding: Holding) -> Sequence[InventoryEvent]:
        if not self._stored:
            return []
        tier, owner = holding
        return [BlocksStored(tier, tuple(self._stored), tuple(self._stored.values()), owner)]


def weight(event: InventoryEvent) -> int:
    """Key changes of an event; a clear counts as one."""
    return 1 if isinstance(event, TierCleared) else max(1, len(event.keys))
