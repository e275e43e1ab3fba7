"""Which prefix lengths can be restored: each pool's hit policy turns the pages it has into a bit set of boundaries.

In a bit set of pages bit `i` is page `i`; in a bit set of boundaries bit `b` is the prefix of `b` pages.

A restore need not begin at the root. Where it begins, the device has a prefix from which it could go on, so each pool
has there what its policy asks for: the part of a window that lies before is on the device, and only what lies behind
must come from the host. So the same rules, applied to the pages behind alone, say where a restore may end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from kvcr_actors.types import NO_SLOT, AllPages, BlockGroups, CacheLayout, Components, HitPolicy, TrailingPages

EVERY_BOUNDARY = -1
"""The bit set in which every boundary is."""


def legal_boundaries(policy: HitPolicy, present: int, pages: int, first: int = 0) -> int:
    """Return the boundaries of a path of `pages` pages that a pool allows which has the pages `present`.

    The path begins behind `first` pages that the device has. Bit 0 is always set: nothing more is always possible.
    """
    every = (2 << pages) - 1
    match policy:
        case AllPages():
            return _leading(present) & every
        case TrailingPages(count):
            return _trailing(present, max(1, min(count, pages))) & every
        case BlockGroups(size):
            ends = ((1 << ((first + pages) // size + 1) * size) - 1) // ((1 << size) - 1)
            return _leading(present) & (ends >> first | 1) & every
        case _:
            assert_never(policy)


def boundaries(masks: Sequence[int], layout: CacheLayout, first: int = 0) -> int:
    """Return the boundaries that every pool of the layout allows.

    `masks[i]` is the bit set of the pools that have page `i` of the path, which begins behind `first` pages that the
    device has. An empty path has the boundary 0 only.
    """
    pages = len(masks)
    everywhere = masks.count((1 << len(layout.pools)) - 1) == pages
    legal = (2 << pages) - 1
    for pool, spec in enumerate(layout.pools):
        if not everywhere:
            legal &= legal_boundaries(spec.policy, _presence(masks, pool), pages, first)
        elif isinstance(spec.policy, BlockGroups):
            legal &= legal_boundaries(spec.policy, (1 << pages) - 1, pages, first)
    return legal


def restore_end(
    held: Sequence[int], given: Sequence[int], first: int, layout: CacheLayout, allowed: int = EVERY_BOUNDARY
) -> int:
    """Return the end of the longest prefix that the device may have after a restore; `first` if none is longer.

    `held[i]` are the pools that the host has of page `i` of the prefix, `given[i]` the pools for which the order names
    a device page for page `first + i`. The device has the pages before `first`. `allowed` are the boundaries among
    which to choose, where ranks must choose alike.
    """
    masks = [have & slots for have, slots in zip(held[first:], given, strict=False)]
    return first + longest(boundaries(masks, layout, first) & allowed >> first)


def needed_masks(layout: CacheLayout, boundary: int) -> list[int]:
    """Return for each page of a prefix of `boundary` pages the pools whose component a restore of it needs."""
    masks = [0] * boundary
    for pool, spec in enumerate(layout.pools):
        first = max(0, boundary - spec.policy.count) if isinstance(spec.policy, TrailingPages) else 0
        for index in range(first, boundary):
            masks[index] |= 1 << pool
    return masks


def longest(bits: int) -> int:
    """Return the longest boundary of a bit set in pages; 0 for an empty one (ranks that found no common boundary)."""
    return max(0, bits.bit_length() - 1)


def component_masks(components: Components) -> list[int]:
    """Return for each page the bit set of the pools that keep something for it."""
    whole = 0
    partial: list[tuple[int, Sequence[int]]] = []
    for pool, pages in enumerate(components):
        if NO_SLOT in pages:
            partial.append((1 << pool, pages))
        else:
            whole |= 1 << pool
    masks = [whole] * len(components[0])
    for bit, pages in partial:
        masks = [mask if page == NO_SLOT else mask | bit for mask, page in zip(masks, pages, strict=True)]
    return masks


def _presence(masks: Sequence[int], pool: int) -> int:
    """Return the bit set of the pages that a pool has."""
    return int("".join("1" if mask >> pool & 1 else "0" for mask in reversed(masks)) or "0", 2)


def _leading(present: int) -> int:
    """Return the boundaries up to the end of the leading run of pages."""
    return present ^ (present + 1)


def _trailing(present: int, count: int) -> int:
    """Return the boundaries before which the last `count` pages are there, or all pages where fewer come before."""
    legal = present << count | (1 << count) - 1
    width = 1
    while width < count:
        step = min(width, count - width)
        legal &= legal >> step
        width += step
    return legal
