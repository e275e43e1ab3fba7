"""Inventory events between those who cause them and a sink that is slower: bounded, and always right in the end."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, assert_never

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

_PART_KEYS: Final = 4_096
_HOLDINGS: tuple[Holding, ...] = tuple((tier, owner) for tier in Tier for owner in Ownership)


class EventBacklog:
    """A queue of events with at most `limit` key changes, and the index of what has left it.

    Past the limit, changes of one key are coalesced; if that is not enough, the oldest events go straight to the index
    and are never seen one by one: `dropped` counts their changes, and a snapshot of the index must make up for the gap.
    """

    def __init__(self, limit: int) -> None:
        self.index = InventoryIndex()
        self.dropped = 0
        self.coalesced = 0
        self._gaps: Counter[Holding] = Counter()
        self._limit = limit
        self._queue: deque[InventoryEvent] = deque()
        self._changes = 0
        self._uncoalesced = 0

    def __len__(self) -> int:
        """Key changes that wait."""
        return self._changes

    @property
    def has_gap(self) -> bool:
        """Whether events were dropped since `take_gaps`."""
        return bool(self._gaps)

    def take_gaps(self) -> Counter[Holding]:
        """How many events of each holding were dropped since the last call: whoever asks makes up for them."""
        gaps, self._gaps = self._gaps, Counter()
        return gaps

    def push(self, events: Iterable[InventoryEvent], *, coalesce: bool = True) -> None:
        """Queue events. `coalesce=False` keeps the cost in proportion to `events`: past the limit it only drops."""
        for event in events:
            self._queue.append(event)
            changes = weight(event)
            self._changes += changes
            self._uncoalesced += changes
        # Not for every few changes that come to a full queue: it costs as much as all that waits.
        if coalesce and self._changes > self._limit and 4 * self._uncoalesced >= self._limit:
            self._coalesce()
        while self._changes > self._limit:
            event = self._queue.popleft()
            changes = weight(event)
            self._changes -= changes
            self.dropped += changes
            self._gaps[event.tier, event.ownership] += 1
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
        nets = {holding: _NetChange(holding, self.index.holding(*holding)) for holding in _HOLDINGS}
        for event in self._queue:
            nets[event.tier, event.ownership].add(event)
        self._queue.clear()
        for phase in (_NetChange.clears, _NetChange.removals, _NetChange.stores):
            for net in nets.values():
                self._queue.extend(phase(net))
        self._uncoalesced = 0
        self._changes = sum(map(weight, self._queue))
        self.coalesced += before - self._changes


class _NetChange:
    """What a run of events does to what one holding held before, whatever happened in between."""

    def __init__(self, holding: Holding, held: Mapping[PageKey, PageKey | None]) -> None:
        self._holding = holding
        self._held: Mapping[PageKey, PageKey | None] = held
        self._cleared = False
        self._stored: dict[PageKey, PageKey | None] = {}
        self._removed: dict[PageKey, None] = {}

    def add(self, event: InventoryEvent) -> None:
        match event:
            case BlocksStored():
                for key, parent in zip(event.keys, event.parents, strict=True):
                    self._removed.pop(key, None)
                    self._stored.setdefault(key, parent)
            case BlocksRemoved():
                for key in event.keys:
                    self._stored.pop(key, None)
                    self._removed.setdefault(key)
            case TierCleared():
                self._cleared, self._held = True, {}
                self._stored.clear()
                self._removed.clear()
            case _:
                assert_never(event)

    def clears(self) -> Sequence[InventoryEvent]:
        return [TierCleared(*self._holding)] if self._cleared else []

    def removals(self) -> Sequence[InventoryEvent]:
        tier, owner = self._holding
        gone = [key for key in self._removed if key in self._held]
        return [BlocksRemoved(tier, part, owner) for part in _parts(gone)]

    def stores(self) -> Sequence[InventoryEvent]:
        tier, owner = self._holding
        new = [key for key in self._stored if key not in self._held]
        return [BlocksStored(tier, part, tuple(self._stored[key] for key in part), owner) for part in _parts(new)]


def _parts(keys: Sequence[PageKey]) -> Iterator[tuple[PageKey, ...]]:
    """Cut a holding's keys into events: one for all would have to be dropped, or told, at once."""
    for start in range(0, len(keys), _PART_KEYS):
        yield tuple(keys[start : start + _PART_KEYS])


def weight(event: InventoryEvent) -> int:
    """Key changes of an event; a clear counts as one."""
    return 1 if isinstance(event, TierCleared) else max(1, len(event.keys))
