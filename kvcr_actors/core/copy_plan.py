"""What one submit copies: for each pool, pairs of a device page and a host slot."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterator, Sequence

import attrs

from kvcr_actors.types import NO_SLOT, CacheLayout, Components


class Direction(enum.Enum):
    """Which way a plan copies."""

    TO_HOST = "to_host"
    TO_DEVICE = "to_device"


@attrs.frozen
class PoolCopy:
    """One pool's share of a plan: page `device_pages[i]` pairs with host slot `host_slots[i]` (int64 arrays).

    Pairs are sorted by host slot, so that neighbours in host memory are neighbours here.
    """

    pool: int
    device_pages: array[int]
    host_slots: array[int]

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield the maximal contiguous host runs as (index of the first pair, first host slot, pages)."""
        slots = self.host_slots
        start = 0
        for index in range(1, len(slots) + 1):
            if index == len(slots) or slots[index] != slots[index - 1] + 1:
                yield start, slots[start], index - start
                start = index


@attrs.frozen
class CopyPlan:
    """Everything one submit moves, over all pools; a pool without pages is left out."""

    direction: Direction
    pools: tuple[PoolCopy, ...]

    @property
    def pages(self) -> int:
        """Pairs over all pools."""
        return sum(len(copy.host_slots) for copy in self.pools)

    def bytes_for(self, layout: CacheLayout) -> int:
        """Bytes that the plan moves under a layout."""
        return sum(len(copy.host_slots) * layout.pools[copy.pool].page_bytes for copy in self.pools)


def is_within(components: Components, pages: Sequence[int]) -> bool:
    """Whether a component list names only pages of pools that have `pages` each."""
    return all(max(named, default=NO_SLOT) < count for named, count in zip(components, pages, strict=True))


def plan_copy(direction: Direction, parts: Sequence[tuple[Components, Components]]) -> CopyPlan:
    """Merge (device pages, host slots) component lists of many nodes into one plan.

    Components that are `NO_SLOT` on either side are left out.
    """
    pools = len(parts[0][0]) if parts else 0
    copies: list[PoolCopy] = []
    for pool in range(pools):
        pairs = sorted(
            (slot, page)
            for pages, slots in parts
            for page, slot in zip(pages[pool], slots[pool], strict=True)
            if page != NO_SLOT and slot != NO_SLOT
        )
        if pairs:
            host_slots, device_pages = zip(*pairs, strict=True)
            copies.append(PoolCopy(pool, array("q", device_pages), array("q", host_slots)))
    return CopyPlan(direction, tuple(copies))
