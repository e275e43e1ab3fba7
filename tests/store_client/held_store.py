"""A memory store whose loads and saves wait for the test, on the store's own thread: late as a hung disk is late."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvcr_actors.host_buffers import HostBuffers
from kvcr_actors.ports import BatchOutcome, HostMemory, PageBatch, StoreTraits
from kvcr_actors.stores.bounded import BoundedBackend
from kvcr_actors.stores.memory import MemoryMedium
from kvcr_actors.stores.threaded import ThreadedStore
from kvcr_actors.testing.store_driver import LAYOUT, page_bytes
from kvcr_actors.types import PageKey

WAIT_S = 20.0
POOLS = len(LAYOUT.pools)


class HeldBackend(BoundedBackend):
    """Counts the pages of each operation; one that comes while `may_go` is clear waits for it."""

    def __init__(self, capacity: int = 4096) -> None:
        super().__init__(capacity, MemoryMedium())
        self.may_go = threading.Event()
        self.may_go.set()
        self.began = threading.Event()
        self.sizes: list[int] = []

    def read(self, batch: PageBatch, host: HostMemory) -> BatchOutcome:
        self._note(batch)
        return super().read(batch, host)

    def write(self, batch: PageBatch, host: HostMemory) -> BatchOutcome:
        self._note(batch)
        return super().write(batch, host)

    def _note(self, batch: PageBatch) -> None:
        self.sizes.append(len(batch.keys))
        self.began.set()
        assert self.may_go.wait(WAIT_S)


def held_store(backend: HeldBackend, *, batch_pages: int = 8) -> ThreadedStore:
    return ThreadedStore("held", backend, StoreTraits(batch_pages=batch_pages))


def batch_of(keys: Sequence[PageKey], first: int = 0) -> PageBatch:
    """Keys in neighbouring slots of every pool."""
    slots = tuple(range(first, first + len(keys)))
    return PageBatch(tuple(keys), (slots,) * POOLS, (None, *keys[:-1]))


def fill(host: HostBuffers, batch: PageBatch, *, version: int = 0) -> None:
    """Give the batch's slots the bytes that belong to its keys."""
    for pool in range(POOLS):
        for key, slot in zip(batch.keys, batch.slots[pool], strict=True):
            host.page(pool, slot)[:] = page_bytes(key, pool, version=version)


def is_filled(host: HostBuffers, batch: PageBatch, *, version: int = 0) -> bool:
    """Whether the batch's slots have the bytes that belong to its keys."""
    return all(
        bytes(host.page(pool, slot)) == page_bytes(key, pool, version=version)
        for pool in range(POOLS)
        for key, slot in zip(batch.keys, batch.slots[pool], strict=True)
    )


def snapshot(host: HostBuffers) -> list[bytes]:
    """All bytes of a memory."""
    return [bytes(host.buffer(pool)) for pool in range(POOLS)]
