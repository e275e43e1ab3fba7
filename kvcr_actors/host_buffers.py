"""Host memory over plain buffers that somebody else made: page-first, for stores; devices copy to `HostPools`."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import TypeAlias

from kvcr_actors.errors import ConfigError, NoHostMemoryError
from kvcr_actors.types import CacheLayout

WritableBuffer: TypeAlias = bytearray | memoryview | mmap.mmap
"""Writable bytes. An array gives them as `memoryview(array)`, a CPU tensor as `memoryview(tensor.numpy())`."""

POISON_BYTE = 0xDB
"""What a freed slot is overwritten with."""


class HostBuffers:
    """A `HostMemory` over one given buffer a pool, page-first: slot `i` is `[i * page_bytes, (i + 1) * page_bytes)`.

    The buffers stay the giver's, and must outlive this object; they may be longer than the slots. ConfigError names the
    pool whose buffer is missing, read-only, not contiguous or too short.
    """

    __slots__ = ("_views", "layout", "slots")

    def __init__(self, layout: CacheLayout, slots: int, buffers: Sequence[WritableBuffer]) -> None:
        if slots < 1:
            raise ConfigError(f"slots: {slots}; give 1 or more")
        if len(buffers) != len(layout.pools):
            raise ConfigError(f"{len(buffers)} buffers for {len(layout.pools)} pools; give one each, in their order")
        self.layout = layout
        self.slots = slots
        self._views = tuple(
            _pool_view(pool.name, buffer, slots * pool.page_bytes)
            for pool, buffer in zip(layout.pools, buffers, strict=True)
        )

    @classmethod
    def at_addresses(cls, layout: CacheLayout, slots: int, addresses: Sequence[int]) -> HostBuffers:
        """Take mapped and writable memory by the address of each pool's slot 0: what an engine tells of its own pools.

        Nothing can check an address: a wrong one ends the process.
        """
        if len(addresses) != len(layout.pools) or not all(address > 0 for address in addresses):
            raise ConfigError(f"addresses {addresses}: give one for each of {len(layout.pools)} pools, above 0")
        return cls(
            layout,
            slots,
            [
                memoryview((ctypes.c_char * (slots * pool.page_bytes)).from_address(address)).cast("B")
                for pool, address in zip(layout.pools, addresses, strict=True)
            ],
        )

    @classmethod
    def mapped(cls, layout: CacheLayout, slots: int) -> HostBuffers:
        """Map memory of its own: not pinned, taken from the system page by page as it is written, zero at first.

        A forked child does not see it. NoHostMemoryError if the kernel refuses.
        """
        return cls(layout, slots, [_map(slots * pool.page_bytes) for pool in layout.pools])

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
        """Overwrite freed slots with `POISON_BYTE`."""
        filler = bytes([POISON_BYTE]) * self.layout.pools[pool].page_bytes
        for slot in slots:
            self.page(pool, slot)[:] = filler


def _pool_view(name: str, buffer: WritableBuffer, size: int) -> memoryview:
    view = memoryview(buffer)
    if view.readonly or not view.contiguous:
        raise ConfigError(f"pool {name}: its buffer must be writable and contiguous")
    if view.nbytes < size:
        raise ConfigError(f"pool {name}: its buffer has {view.nbytes} bytes; its slots take {size}")
    return view.cast("B")[:size]


def _map(size: int) -> mmap.mmap:
    try:
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise NoHostMemoryError(f"the kernel does not map {size} bytes: {error.strerror}; ask for fewer") from error
    # A fork would make the pages copy-on-write, and a running read would then miss the parent's memory.
    mapping.madvise(mmap.MADV_DONTFORK)
    return mapping
