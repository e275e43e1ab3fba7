"""Which blocks a page is made of: the pools that every page has go together, trailing ones are blocks of their own.

A side pool (one with the policy TrailingPages) is there for some pages only. As a block of its own its layout is known
to a peer that never saw the page, which the runner asks for. Where ranks share replicated pages, a pool of which each
has a shard is apart from those as well, under a name that says whose shard it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import attrs
from kvcr.types import BlockKey

from kvcr_actors import CacheLayout, ConfigError, Namespace, PageKey, TrailingPages
from kvcr_actors_kvcr.block_keys import BlockKeyAdapter, bits, with_mask
from kvcr_actors_kvcr.page_index import Block, PageIndex

_GENERATION_SHIFT = 24
MOST_POOLS = _GENERATION_SHIFT


class PageBlocks:
    """Names and groups the blocks of pages. A page whose bytes were damaged gets new names, for the runner cannot
    drop the old block.
    """

    def __init__(
        self,
        layout: CacheLayout,
        namespace: Namespace,
        index: PageIndex,
        *,
        combined: bool,
        shared: bool = False,
        sharded: Collection[str] = (),
    ) -> None:
        _check_sharded(layout, namespace, sharded)
        self._namespace = namespace
        self._shared = shared
        self.clears = 0
        """How often every page was forgotten: it is in the names of all blocks."""
        self.adapter = BlockKeyAdapter(_without_tensor_axis(namespace) if shared else namespace)
        self.every = (1 << len(layout.pools)) - 1
        self.side = sum(1 << i for i, pool in enumerate(layout.pools) if isinstance(pool.policy, TrailingPages))
        self.sharded = sum(1 << i for i, pool in enumerate(layout.pools) if pool.name in sharded)
        """Pools of which each rank has a shard, where the others are replicated."""
        self._main = self.every & ~self.side
        self._shards = BlockKeyAdapter(namespace)
        self._index = index
        self._combined = combined
        self._generations: dict[PageKey, int] = {}

    def groups(self, mask: int) -> Iterator[int]:
        """The pools of a page as they are stored: one bit set a block."""
        if not self._combined:
            yield from (1 << pool for pool in bits(mask))
            return
        for together in (self._main & ~self.sharded, self._main & self.sharded):
            if mask & together:
                yield mask & together
        yield from (1 << pool for pool in bits(mask & self.side))

    def key(self, page: PageKey, group: int) -> BlockKey:
        """The name of a page's block."""
        base = (self._shards if group & self.sharded else self.adapter).encode(page)
        generation = self._generations.get(page, 0)
        if group == self._main and not generation:
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

    def clear(self) -> int:
        """Forget every page, and those that are being stored, by new names for all; returns how many were held."""
        self.clears += 1
        namespace = attrs.evolve(self._namespace, weights=f"{self._namespace.weights}\0cleared {self.clears}")
        self.adapter = BlockKeyAdapter(_without_tensor_axis(namespace) if self._shared else namespace)
        self._shards = BlockKeyAdapter(namespace)
        self._generations.clear()
        return self._index.clear()

    def damaged(self, page: PageKey) -> None:
        """Hold a page no longer: its bytes are not those that were stored."""
        self._generations[page] = self._generations.get(page, 0) + 1
        self._index.drop(page)


def _without_tensor_axis(namespace: Namespace) -> Namespace:
    """The namespace of pages that the tensor-parallel ranks have alike."""
    return attrs.evolve(namespace, ranks=tuple(rank for rank in namespace.ranks if rank[0] != "tensor"))


def _check_sharded(layout: CacheLayout, namespace: Namespace, sharded: Collection[str]) -> None:
    """Refuse shards that the layout does not have, and those that nothing in the namespace tells apart."""
    names = [pool.name for pool in layout.pools]
    unknown = sorted(set(sharded) - set(names))
    if unknown:
        raise ConfigError(f"store kvcr: option sharded_pools names {unknown[0]!r}; the layout has {', '.join(names)}")
    if sharded and not any(kind == "tensor" for kind, _, _ in namespace.ranks):
        raise ConfigError("store kvcr: option sharded_pools: the namespace must name this rank's tensor axis")
