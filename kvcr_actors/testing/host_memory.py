"""Host memory for tests: plain bytes, no pinning, no torch."""

from __future__ import annotations

from kvcr_actors.host_buffers import HostBuffers
from kvcr_actors.types import CacheLayout


class BytesHostMemory(HostBuffers):
    """A `HostMemory` over one bytearray a pool; it starts zeroed."""

    __slots__ = ()

    def __init__(self, layout: CacheLayout, slots: int) -> None:
        super().__init__(layout, slots, [bytearray(max(0, slots) * pool.page_bytes) for pool in layout.pools])
