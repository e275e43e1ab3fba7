"""What an embedded store must do, synchronously: the side of a store that knows nothing of loops and threads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import attrs

from kvcr_actors.core.inventory import BlocksRemoved, BlocksStored, InventoryEvent
from kvcr_actors.core.ordering import parents_first
from kvcr_actors.ports import BatchOutcome, HostMemory, PageBatch
from kvcr_actors.types import CacheLayout, PageKey, Tier

ANNOUNCED_KEYS = 1024
"""The most keys in one event that announces what a store holds at open."""


@attrs.define
class StoreCounters:
    """What a backend did so far, in pages unless the name says otherwise."""

    read: int = 0
    missed: int = 0
    damaged: int = 0
    """Pages dropped because their bytes were missing, unreadable or did not check."""
    written: int = 0
    merged: int = 0
    """Of those written: pages that were held already and gained components."""
    already_held: int = 0
    evicted: int = 0
    full: int = 0
    failed: int = 0
    bytes_read: int = 0
    bytes_written: int = 0


class PageBackend(Protocol):
    """A store without its loop. One thread calls what changes it or may block, one call at a time.

    `lookup`, `contents` and `counters` are called on the loop at any time, beside such a call: they answer from memory,
    from what another thread may change meanwhile, and never block.
    """

    def open(self, layout: CacheLayout) -> None:
        """Load what is held and queue its events; StoreError says why it cannot."""
        ...

    def lookup(self, key: PageKey) -> int:
        """The bit set of the pools held for a key (bit `i` is pool `i`); 0 is a miss."""
        ...

    def read(self, batch: PageBatch, host: HostMemory) -> BatchOutcome:
        """Copy pages into host slots."""
        ...

    def write(self, batch: PageBatch, host: HostMemory) -> BatchOutcome:
        """Copy pages out of host slots."""
        ...

    def align(self, keys: Sequence[PageKey]) -> None:
        """Make a prefix (root to tail) recent, its head the most."""
        ...

    def discard(self, keys: Sequence[PageKey]) -> None:
        """Drop pages that turned out to be wrong; those not held are ignored."""
        ...

    def clear(self) -> int:
        """Forget every page, for good, and return how many they were; StoreError if one might come back."""
        ...

    def take_events(self) -> list[InventoryEvent]:
        """The events since the last call, in order.

        One operation tells what it removed, leaves first, before what it stored, parents first.
        """
        ...

    def contents(self) -> frozenset[PageKey]:
        """The keys held now."""
        ...

    def close(self) -> None:
        """Save what must outlive the process; afterwards only `lookup`, `contents` and `counters` may be called."""
        ...

    def counters(self) -> Mapping[str, int]:
        """Counts for people and metrics, each right by itself; together they may be of different moments."""
        ...


def stored_events(pages: Iterable[tuple[PageKey, PageKey | None]]) -> list[InventoryEvent]:
    """Events for pages that came to be, parents first, `ANNOUNCED_KEYS` keys each."""
    parents = dict(pages)
    ordered = parents_first(parents)
    events: list[InventoryEvent] = []
    for start in range(0, len(ordered), ANNOUNCED_KEYS):
        keys = tuple(ordered[start : start + ANNOUNCED_KEYS])
        events.append(BlocksStored(Tier.STORE, keys, tuple(parents[key] for key in keys)))
    return events


def removed_events(pages: Iterable[tuple[PageKey, PageKey | None]]) -> list[InventoryEvent]:
    """The event for pages that went, leaves first; none for no pages."""
    keys = tuple(reversed(parents_first(dict(pages))))
    return [BlocksRemoved(Tier.STORE, keys)] if keys else []
