"""From inventory events to wire events: in an order that readers can follow, each block with what it was made from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs

from kvcr_actors.core.inventory import (
    BlocksRemoved,
    BlocksStored,
    Holding,
    InventoryEvent,
    InventoryIndex,
    Ownership,
    TierCleared,
)
from kvcr_actors.core.ordering import leaves_first, parents_first
from kvcr_actors.events.chain import Chain, Limits
from kvcr_actors.events.children import ChildTable
from kvcr_actors.events.contexts import ContextSource
from kvcr_actors.events.hashes import BlockHashes
from kvcr_actors.events.wire import AllBlocksCleared, BlockRemoved, Dialect, WireEvent
from kvcr_actors.types import PageKey, Tier

_Parents = Mapping[PageKey, PageKey | None]
_DEVICE: Final[Holding] = (Tier.DEVICE, Ownership.ENGINE)
"""Readers keep a tree of these, and of no other holding."""


@attrs.define
class AnnounceTotals:
    """Blocks by what became of them."""

    stored: int = 0
    restated: int = 0
    """Of those: announced before, but cut off from their readers meanwhile."""
    removed: int = 0
    unknown: int = 0
    """Stored, and not announced: nobody said what they were computed from."""
    inexpressible: int = 0
    """Not announced: the dialect has no words for them or their tokens, or they do not fit one event."""


class Announcer:
    """Applies events to an index, and says in wire events what a reader must change to follow it.

    A block whose context is unknown is silent until an event names it again, in any tier, with its context known.
    A device block whose parent a reader lacks is cut off there; it is stated again once the parent is.
    """

    def __init__(self, dialect: Dialect, hashes: BlockHashes, contexts: ContextSource, limits: Limits) -> None:
        self.totals = AnnounceTotals()
        self._dialect = dialect
        self._hashes = hashes
        self._contexts = contexts
        self._limits = limits
        self._silent: dict[Holding, dict[PageKey, PageKey | None]] = {
            (tier, owner): {} for tier in Tier for owner in Ownership
        }
        self._children = ChildTable()
        self._cut_off: dict[PageKey, PageKey | None] = {}

    def apply(self, event: InventoryEvent, index: InventoryIndex) -> list[WireEvent]:
        """Apply one event to the index and give the wire events for it."""
        holding = (event.tier, event.ownership)
        held = index.holding(*holding)
        match event:
            case BlocksStored():
                fresh = _fresh(event, held)
                known = self._known_by_now(event.keys)
                index.apply(event)
                if (own := known.pop(holding, None)) is not None:
                    new = {**fresh, **own}  # one may be the other's parent
                    fresh = {key: new[key] for key in parents_first(new)}
                told = list(self._announce(holding, fresh, held))
                for other, late in known.items():
                    told.extend(self._announce(other, late, index.holding(*other)))
                return [*told, *self._state_again(event.keys, index)]
            case BlocksRemoved():
                gone = {key: held[key] for key in leaves_first(event.keys, held) if key in held}
                index.apply(event)
            case TierCleared():
                gone = {key: held[key] for key in reversed(parents_first(held))}
                index.apply(event)
        return list(self._retract(holding, gone, held))

    def clears(self) -> list[WireEvent]:
        """Give the events after which a reader holds nothing of this publisher; `announce_all` follows."""
        for silent in self._silent.values():
            silent.clear()
        self._children.clear()
        self._cut_off.clear()
        clears: list[WireEvent] = [AllBlocksCleared()]
        if self._dialect.ownership:
            clears.append(AllBlocksCleared(self._dialect.owner(Ownership.STORE)))
        return clears

    def announce_all(self, index: InventoryIndex, slice_blocks: int) -> Iterator[list[WireEvent]]:
        """Announce what the index holds, upper tiers first, in slices.

        Of what changes between two slices, removals are seen for what is still to come, and stores are not.
        """
        for holding in self._silent:
            held = index.holding(*holding)
            keys = parents_first(held)
            for start in range(0, len(keys), slice_blocks):
                part = {key: held[key] for key in keys[start : start + slice_blocks] if key in held}
                yield list(self._announce(holding, part, held))

    def describe(self) -> dict[str, Any]:
        """Totals and silent blocks, for people."""
        return {**attrs.asdict(self.totals), "untold": sum(map(len, self._silent.values()))}

    def _announce(self, holding: Holding, pages: _Parents, held: _Parents) -> Iterator[WireEvent]:
        """Announce pages in the order given, as few chains as they make."""
        if holding[1] is Ownership.STORE and not self._dialect.ownership:
            self.totals.inexpressible += len(pages)
            return
        silent = self._silent[holding]
        find = self._contexts.find
        chain: Chain | None = None
        for key, parent in pages.items():
            origin = find(key)
            if origin is None:
                self.totals.unknown += 1
                silent[key] = parent
                continue
            context, page = origin
            if chain is None or not chain.takes(parent, context):
                if chain is not None:
                    yield from self._tell(chain, holding, pages, held)
                chain = Chain(parent, context, self._limits)
            chain.add(key, context, page)
        if chain is not None:
            yield from self._tell(chain, holding, pages, held)

    def _tell(self, chain: Chain, holding: Holding, pages: _Parents, held: _Parents) -> Iterator[WireEvent]:
        """Tell a chain as far as the wire can; note what a device block hangs from."""
        event = chain.event(holding, self._dialect, self._hashes)
        count = len(event.block_hashes)
        told, untold = chain.keys[:count], chain.keys[count:]
        self.totals.stored += count
        self.totals.inexpressible += len(untold)
        silent = self._silent[holding]
        silent.update((key, pages[key]) for key in untold)
        if holding == _DEVICE:
            children, cut_off = self._children, self._cut_off
            for key in told:
                parent = pages[key]
                if parent is not None:
                    children.add(parent, key)
                    if parent not in held or parent in silent or parent in cut_off:
                        cut_off[key] = parent
        if told:
            yield event

    def _known_by_now(self, keys: Sequence[PageKey]) -> dict[Holding, _Parents]:
        """End the silence of those of these pages whose context has come, in every tier that holds them."""
        known: dict[Holding, _Parents] = {}
        for holding, silent in self._silent.items():
            if not silent:
                continue
            late = {key: silent[key] for key in keys if key in silent and self._contexts.find(key) is not None}
            if late:
                known[holding] = {key: late[key] for key in parents_first(late)}
                for key in late:
                    del silent[key]
        return known

    def _state_again(self, keys: Sequence[PageKey], index: InventoryIndex) -> Iterator[WireEvent]:
        """Announce the device pages that hung cut off below a page that is back."""
        if self._cut_off:
            held, silent = index.holding(*_DEVICE), self._silent[_DEVICE]
            attached = [key for key in keys if key in held and key not in silent and key not in self._cut_off]
            again = self._below(attached, self._cut_off)
            for key, parent in again.items():
                del self._cut_off[key]
                if parent is not None:
                    self._children.remove(parent, key)
            self.totals.restated += len(again)
            yield from self._announce(_DEVICE, again, held)

    def _retract(self, holding: Holding, gone: _Parents, held: _Parents) -> Iterator[WireEvent]:
        """Take back what was announced of pages that went; `held` is what stays."""
        tier, owner = holding
        if owner is Ownership.STORE and not self._dialect.ownership:
            return
        silent = self._silent[holding]
        told = [key for key in gone if key not in silent]
        if len(told) < len(gone):
            for key in gone:
                silent.pop(key, None)
        if holding == _DEVICE:
            self._cut(told, gone, held)
        self.totals.removed += len(told)
        size = self._limits.hashes
        for start in range(0, len(told), size):
            hashes = [self._hashes.of(key) for key in told[start : start + size]]
            yield BlockRemoved(hashes, self._dialect.media[tier], self._dialect.owner(owner))

    def _cut(self, told: Sequence[PageKey], gone: _Parents, held: _Parents) -> None:
        """Note which device pages stay and lose the path to their root."""
        for key in told:
            self._cut_off.pop(key, None)
            # It may not be there: the event that stored it was dropped, and the snapshot is to come.
            if (parent := gone[key]) is not None:
                self._children.remove(parent, key)
        self._cut_off.update(self._below(told, held))

    def _below(self, tops: Iterable[PageKey], among: _Parents) -> dict[PageKey, PageKey | None]:
        """Those of `among` that were announced below any of `tops`, through each other, parents first."""
        found: dict[PageKey, PageKey | None] = {}
        level = list(tops)
        while level:
            below = [(key, top) for top in level for key in self._children.of(top) if key in among and key not in found]
            found.update(below)
            level = [key for key, _ in below]
        return found


def _fresh(event: BlocksStored, held: _Parents) -> dict[PageKey, PageKey | None]:
    """The pages of an event that were not held, parents first."""
    pages = dict(zip(event.keys, event.parents, strict=True))
    if event.parents[1:] != event.keys[:-1]:  # a chain, as most are, is in order
        pages = {key: pages[key] for key in parents_first(pages)}
    if held.keys().isdisjoint(pages):
        return pages
    return {key: parent for key, parent in pages.items() if key not in held}
