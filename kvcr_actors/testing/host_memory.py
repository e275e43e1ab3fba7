"""Host memory for tests: plain bytes, no pinning, no torch."""

from __future__ import annotations

from collections.abc import Sequence

from kvcr_actors.types import CacheLayout

POISON = 0xDB
"""What freed slots are filled with."""


class BytesHostMemory:
    """A `HostMemory` over one bytearray a pool; it starts zeroed."""

    __slots__ = ("_views", "layout", "slots")

    def __init__(self, layout: CacheLayout, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"slots {slots}: use 1 or more")
        self.layout = layout
        self.slots = slots
        self._views = tuple(memoryview(bytearray(slots * pool.page_bytes)) for pool in layout.pools)

    def slots_of(self, pool: int) -> int:
        """Slots of one pool: as many as of each other."""
        del pool
        return self.slots

    def buffer(self, pool: int) -> memoryview:
        """The pool's bytes, flat and writable."""
        return self._views[pool]

    def page(self, pool: int, slot: int) -> memoryview:
        """One slot's bytes, writable; IndexError for a slot that does not exist."""
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} of {self.slots}")
        size = self.layout.pools[pool].page_bytes
        return self._views[pool][slot * size : (slot + 1) * size]

    def poison(self, pool: int, slots: Sequence[int]) -> None:
        """Overwrite freed slots with `POISON`."""
        filler = bytes([POISON]) * self.layout.pools[pool].page_bytes
        for slot in slots:
            self.page(pool, slot)[:] = filler
