"""What the store holds, as the runner's own inventory events tell it: pages, the blocks they lie in, their parents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
from kvcr.types import BlockKey, CacheTier, InventoryEvent

from kvcr_actors import InventoryEvent as PageEvent
from kvcr_actors import Ownership, PageKey, Tier, TierCleared
from kvcr_actors.stores import removed_events, stored_events

_TIERS = {CacheTier.LOCAL_G2: Tier.HOST, CacheTier.G3: Tier.STORE}
"""Where the runner's tiers lie: routers name a copy in memory as a source, one on a disk never."""


@attrs.define(eq=False)
class Block:
    """A block that the runner holds or is about to: some pools of one page."""

    key: BlockKey
    page: PageKey
    parent: PageKey | None
    mask: int
    tiers: frozenset[CacheTier] = frozenset()
    digest: bytes | None = None


@attrs.define(eq=False)
class HeldPage:
    """A page of which at least one block is held."""

    parent: PageKey | None
    blocks: list[Block] = attrs.field(factory=list[Block])

    def is_in(self, tier: CacheTier) -> bool:
        """Whether the runner holds a block of the page in one of its tiers."""
        return any(tier in block.tiers for block in self.blocks)

    @property
    def mask(self) -> int:
        """The pools held."""
        mask = 0
        for block in self.blocks:
            mask |= block.mask
        return mask


class PageIndex:
    """Pages by key. Changed on the owner thread only; `mask` and `contents` may be asked on the loop at any time."""

    def __init__(self) -> None:
        self._pages: dict[PageKey, HeldPage] = {}
        self._blocks: dict[BlockKey, Block] = {}
        self._events: list[PageEvent] = []
        self.evicted = 0
        self.on_disk = 0

    def expect(self, block: Block) -> None:
        """Tell what a block is before the runner may announce it."""
        known = self._blocks.get(block.key)
        if known is None or not known.tiers:
            self._blocks[block.key] = block

    def forget(self, blocks: Iterable[Block]) -> None:
        """Drop expectations that came to nothing; a later one of the same key stays."""
        for block in blocks:
            if not block.tiers and self._blocks.get(block.key) is block:
                del self._blocks[block.key]

    def block(self, key: BlockKey) -> Block | None:
        """A block that is held."""
        block = self._blocks.get(key)
        return block if block is not None and block.tiers else None

    def page(self, key: PageKey) -> HeldPage | None:
        """A page that is held."""
        return self._pages.get(key)

    def mask(self, key: PageKey) -> int:
        """The pools held of a page; 0 for none."""
        page = self._pages.get(key)
        return 0 if page is None else page.mask

    def contents(self) -> frozenset[PageKey]:
        """The pages held."""
        return frozenset(self._pages)

    def __len__(self) -> int:
        return len(self._pages)

    def apply(self, event: InventoryEvent) -> None:
        """Take an event of the runner's; called inside its calls, and never raises."""
        changed: list[tuple[PageKey, PageKey | None]] = []
        for key in event.keys:
            block = self._blocks.get(key)
            if block is not None:
                page = self._removed(block, event.tier) if event.removed else self._stored(block, event.tier)
                if page is not None:
                    changed.append((block.page, page.parent))
        if changed:
            events = removed_events(changed) if event.removed else stored_events(changed)
            self._events.extend(_in_tier(events, event.tier))

    def drop(self, key: PageKey) -> None:
        """Hold a page no longer, though the runner keeps its blocks until it evicts them."""
        page = self._pages.pop(key, None)
        if page is None:
            return
        for block in page.blocks:
            self._blocks.pop(block.key, None)
        for tier in filter(page.is_in, _TIERS):
            self.on_disk -= tier is CacheTier.G3
            self._events.extend(_in_tier(removed_events([(key, page.parent)]), tier))

    def clear(self) -> int:
        """Hold nothing, and expect nothing that is being stored; returns how many pages were held."""
        count = len(self._pages)
        self._pages.clear()
        self._blocks.clear()
        self.on_disk = 0
        if count:
            self._events.extend(TierCleared(tier, Ownership.STORE) for tier in _TIERS.values())
        return count

    def take_events(self) -> list[PageEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def _stored(self, block: Block, tier: CacheTier) -> HeldPage | None:
        """Note a copy of a block; gives the page if it is its first in that tier."""
        if tier in block.tiers:
            return None
        page = self._pages.get(block.page)
        if page is None:
            page = self._pages[block.page] = HeldPage(block.parent)
        first = not page.is_in(tier)
        block.tiers |= {tier}
        page.blocks = [*(other for other in page.blocks if other is not block), block]
        self.on_disk += first and tier is CacheTier.G3
        return page if first else None

    def _removed(self, block: Block, tier: CacheTier) -> HeldPage | None:
        """Note that a copy of a block went; gives the page if it was its last in that tier."""
        page = self._pages.get(block.page)
        if tier not in block.tiers or page is None:
            return None
        block.tiers -= {tier}
        if not block.tiers:
            del self._blocks[block.key]
            page.blocks = [other for other in page.blocks if other is not block]
        if not page.blocks:
            del self._pages[block.page]
            self.evicted += 1
        last = not page.is_in(tier)
        self.on_disk -= last and tier is CacheTier.G3
        return page if last else None


def _in_tier(events: Sequence[PageEvent], tier: CacheTier) -> list[PageEvent]:
    """The same events, as those of a store's own copies in one of its tiers."""
    return [attrs.evolve(event, tier=_TIERS[tier], ownership=Ownership.STORE) for event in events]
