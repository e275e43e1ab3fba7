"""The embedded stores' common half: a bounded index in least-recently-used order over a medium that keeps the bytes."""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

import attrs

from kvcr_actors.core.inventory import InventoryEvent, TierCleared
from kvcr_actors.errors import ConfigError
from kvcr_actors.ports import BatchOutcome, HostMemory, PageBatch, PageOutcome
from kvcr_actors.stores.backend import StoreCounters, removed_events, stored_events
from kvcr_actors.stores.medium import HeldPage, PageMedium, Parts
from kvcr_actors.types import NO_SLOT, CacheLayout, PageKey, Tier

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
PASSING = frozenset(
    {
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN),
        *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN),
    }
)
"""Errors of a read that say nothing about the page: short of resources, or a network file system that is away."""


@attrs.define
class _Changes:
    """What one batch changed, for the events at its end."""

    stored: list[tuple[PageKey, PageKey | None]] = attrs.field(factory=list[tuple[PageKey, PageKey | None]])
    removed: list[tuple[PageKey, PageKey | None]] = attrs.field(factory=list[tuple[PageKey, PageKey | None]])
    error: str | None = None

    def note_error(self, what: str, error: object) -> None:
        """Keep the words of the batch's first fault."""
        self.error = self.error or f"{what}: {error or 'out of memory'}"


class BoundedBackend:
    """A `PageBackend` that holds `capacity_pages` at most and evicts exactly the least recently used.

    A batch uses its pages tail to head, so that a parent is never older than its child within it; a prefix that was
    written in several batches keeps that order if it is aligned afterwards. A page that the running batch names is not
    evicted: what finds no other room is FULL.
    """

    def __init__(self, capacity_pages: int, medium: PageMedium) -> None:
        if capacity_pages < 1:
            raise ConfigError(f"capacity_pages {capacity_pages}: a store holds 1 page or more")
        self.capacity_pages = capacity_pages
        self._medium = medium
        self._held: OrderedDict[PageKey, HeldPage] = OrderedDict()
        self._clock = 0
        self._page_bytes: tuple[int, ...] = ()
        self._events: list[InventoryEvent] = []
        self._counters = StoreCounters()

    def open(self, layout: CacheLayout) -> None:
        """Load what the medium holds, evict what is over capacity, and queue the events of the rest."""
        self._page_bytes = tuple(pool.page_bytes for pool in layout.pools)
        held = OrderedDict(self._medium.open(layout))
        self._clock = max((page.used for page in held.values()), default=0)
        self._held = held
        while len(held) + self._medium.strangers > self.capacity_pages:
            self._evict(_Changes())
        self._medium.end_batch()
        self._events.extend(stored_events((key, page.parent) for key, page in held.items()))

    def lookup(self, key: PageKey) -> int:
        """The bit set of the pools held for a key."""
        page = self._held.get(key)
        return 0 if page is None else page.mask

    def read(self, batch: PageBatch, host: HostMemory) -> BatchOutcome:
        """Copy pages into host slots; damaged ones are dropped."""
        with self._batch(batch.keys) as changes:
            outcomes = tuple(
                self._read_page(key, self._parts(batch, index, host), changes) for index, key in enumerate(batch.keys)
            )
        return BatchOutcome(outcomes, changes.error)

    def write(self, batch: PageBatch, host: HostMemory) -> BatchOutcome:
        """Copy pages out of host slots, heads first, one eviction at most for each new page."""
        parents = batch.parents or (None,) * len(batch.keys)
        named = frozenset(batch.keys)
        # Used first, so that the oldest page is one of the batch only when nothing else is left.
        self._use(batch.keys)
        with self._batch(batch.keys) as changes:
            outcomes = tuple(
                self._write_page(key, parent, self._parts(batch, index, host), named, changes)
                for index, (key, parent) in enumerate(zip(batch.keys, parents, strict=True))
            )
        return BatchOutcome(outcomes, changes.error)

    def align(self, keys: Sequence[PageKey]) -> None:
        """Make a prefix recent, its head the most."""
        self._use(keys)
        self._medium.end_batch()

    def discard(self, keys: Sequence[PageKey]) -> None:
        """Drop pages that turned out to be wrong."""
        with self._batch(()) as changes:
            for key in keys:
                if key in self._held:
                    self._counters.damaged += 1
                    self._remove(key, changes)

    def clear(self) -> int:
        """Forget every page; StoreError if the medium might bring one back."""
        held, self._held = self._held, OrderedDict[PageKey, HeldPage]()
        if held:
            self._events.append(TierCleared(Tier.STORE))
        self._medium.clear(held)
        return len(held)

    def take_events(self) -> list[InventoryEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def contents(self) -> frozenset[PageKey]:
        """The keys held now; one step under the GIL, so it may run beside a write."""
        return frozenset(self._held)

    def close(self) -> None:
        """Close the medium."""
        self._medium.close()

    def counters(self) -> Mapping[str, int]:
        """The counters of the index and of the medium."""
        return {"held": len(self._held), **attrs.asdict(self._counters), **self._medium.counters()}

    @staticmethod
    def _parts(batch: PageBatch, index: int, host: HostMemory) -> Parts:
        parts: Parts = {}
        for pool, slots in enumerate(batch.slots):
            slot = slots[index]
            if slot != NO_SLOT:
                size = host.layout.pools[pool].page_bytes
                parts[pool] = host.buffer(pool)[slot * size : (slot + 1) * size]
        return parts

    def _read_page(self, key: PageKey, parts: Parts, changes: _Changes) -> PageOutcome:
        page = self._held.get(key)
        if page is None or any(not page.mask >> pool & 1 for pool in parts):
            self._counters.missed += 1
            return PageOutcome.MISS
        try:
            sound = self._is_sound(key, page, parts, changes)
        except (OSError, MemoryError):
            self._counters.failed += 1
            return PageOutcome.FAILED
        if not sound:
            self._counters.missed += 1
            return PageOutcome.MISS
        self._counters.read += 1
        self._counters.bytes_read += sum(part.nbytes for part in parts.values())
        return PageOutcome.OK

    def _write_page(
        self, key: PageKey, parent: PageKey | None, parts: Parts, named: frozenset[PageKey], changes: _Changes
    ) -> PageOutcome:
        page = self._held.get(key)
        if page is not None and all(page.mask >> pool & 1 for pool in parts):
            self._counters.already_held += 1
            return PageOutcome.OK
        if not parts:
            changes.note_error("write", "a page without components")
            self._counters.failed += 1
            return PageOutcome.FAILED
        if page is None and not self._make_room(named, changes):
            changes.note_error("write", f"the batch alone fills the store's {self.capacity_pages} pages")
            self._counters.full += 1
            return PageOutcome.FULL
        try:
            self._save(key, parent, parts, changes)
        except (OSError, MemoryError) as error:
            changes.note_error("write", error)
            if isinstance(error, MemoryError) or error.errno in NO_ROOM:
                self._counters.full += 1
                return PageOutcome.FULL
            self._counters.failed += 1
            return PageOutcome.FAILED
        return PageOutcome.OK

    def _is_sound(self, key: PageKey, page: HeldPage, parts: Parts, changes: _Changes) -> bool:
        """Load components; drop the page if it is damaged. Raises if the fault says nothing about the page."""
        try:
            sound = self._medium.load(key, page.mask, parts)
        except (OSError, MemoryError) as error:
            changes.note_error("read", error)
            if isinstance(error, MemoryError) or error.errno in PASSING:
                raise
            sound = False
        if not sound:
            self._counters.damaged += 1
            self._remove(key, changes)
        return sound

    def _save(self, key: PageKey, parent: PageKey | None, parts: Parts, changes: _Changes) -> None:
        page = self._held.get(key)
        kept = {} if page is None else self._kept_parts(key, page, changes)
        whole = parts | kept
        self._medium.save(key, parent if page is None else page.parent, whole)
        mask = sum(1 << pool for pool in whole)
        page = self._held.get(key)
        if page is None:
            page = self._held[key] = HeldPage(parent, mask)
            changes.stored.append((key, parent))
        else:
            page.mask = mask
            self._counters.merged += 1
        self._medium.note(key, page)
        self._counters.written += 1
        self._counters.bytes_written += sum(part.nbytes for part in parts.values())

    def _kept_parts(self, key: PageKey, page: HeldPage, changes: _Changes) -> Parts:
        """Copy out what a held page holds, for a merge; nothing if it is damaged."""
        kept = {
            pool: memoryview(bytearray(size)) for pool, size in enumerate(self._page_bytes) if page.mask >> pool & 1
        }
        return kept if self._is_sound(key, page, kept, changes) else {}

    def _make_room(self, named: frozenset[PageKey], changes: _Changes) -> bool:
        while len(self._held) + self._medium.strangers >= self.capacity_pages:
            if not self._medium.strangers and next(iter(self._held)) in named:
                return False
            self._evict(changes)
        return True

    def _evict(self, changes: _Changes) -> None:
        self._counters.evicted += 1
        if self._medium.strangers:
            self._medium.drop_stranger()
        else:
            self._remove(next(iter(self._held)), changes)

    def _remove(self, key: PageKey, changes: _Changes) -> None:
        page = self._held.pop(key)
        self._medium.drop(key)
        changes.removed.append((key, page.parent))

    def _use(self, keys: Sequence[PageKey]) -> None:
        for key in reversed(keys):
            page = self._held.get(key)
            if page is not None:
                self._held.move_to_end(key)
                self._clock += 1
                page.used = self._clock
                self._medium.note(key, page)

    @contextmanager
    def _batch(self, keys: Sequence[PageKey]) -> Generator[_Changes]:
        """Collect what a batch changes, and queue its events at the end, even if it breaks off."""
        changes = _Changes()
        try:
            yield changes
        finally:
            self._events.extend(removed_events(changes.removed))
            self._events.extend(stored_events(changes.stored))
        self._use(keys)
        self._medium.end_batch()
