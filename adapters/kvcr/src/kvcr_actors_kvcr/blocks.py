"""Which blocks a page is made of: the pools that every page has go together, trailing ones are blocks of their own.

A side pool (one with the policy TrailingPages) is there for some pages only. As a block of its own its layout is known
to a peer that never saw the page, which the runner asks for.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvcr.types import BlockKey

from kvcr_actors.core.keys import Namespace
from kvcr_actors.types import CacheLayout, PageKey, TrailingPages
from kvcr_actors_kvcr.block_keys import BlockKeyAdapter, bits, with_mask
from kvcr_actors_kvcr.page_index import Block, PageIndex

_GENERATION_SHIFT = 24
MOST_POOLS = _GENERATION_SHIFT


class PageBlocks:
    """Names and groups the blocks of pages. A page whose bytes were damaged gets new names, for the runner cannot
    drop the old block.
    """

    def __init__(self, layout: CacheLayout, namespace: Namespace, index: PageIndex, *, combined: bool) -> None:
        self.adapter = BlockKeyAdapter(namespace)
        self.side = sum(1 << i for i, pool in enumerate(layout.pools) if isinstance(pool.policy, TrailingPages))
        self.main = (1 << len(layout.pools)) - 1 & ~self.side
        self._index = index
        self._combined = combined
        self._generations: dict[PageKey, int] = {}

    def groups(self, mask: int) -> Iterator[int]:
        """The pools of a page as they are stored: one bit set a block."""
        if not self._combined:
            yield from (1 << pool for pool in bits(mask))
            return
        if mask & self.main:
            yield mask & self.main
        yield from (1 << pool for pool in bits(mask & self.side))

    def key(self, page: PageKey, group: int) -> BlockKey:
        """The name of a page's block."""
        base = self.adapter.encode(page)
        generation = self._generations.get(page, 0)
        if group == self.main and not generation:
            return base
        return with_mask(base, group + (generation << _GENERATION_SHIFT))

    def held(self, page: PageKey, mask: int) -> list[Block] | None:
        """The blocks that hold these pools of a page; None if any is missing."""
        found = self._index.page(page)
        if found is None or mask & ~found.mask:
            return None
        return [block for block in found.blocks if block.mask & mask]

    def all_held(self, page: PageKey) -> list[Block]:
        """Every block of a page."""
        found = self._index.page(page)
        return [] if found is None else found.blocks

    def missing(self, page: PageKey, parent: PageKey | None, mask: int) -> list[Block]:
        """The blocks to be stored so that these pools of a page are held, announced to the index."""
        blocks = [
            Block(self.key(page, group), page, parent, group) for group in self.groups(mask & ~self._index.mask(page))
        ]
        for block in blocks:
            self._index.expect(block)
        return blocks

    def damaged(self, page: PageKey) -> None:
        """Hold a page no longer: its bytes are not those that were stored."""
        self._generations[page] = self._generations.get(page, 0) + 1
        self._index.drop(page)
