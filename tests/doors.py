"""What the tests of the front doors share: a device and a store whose bytes are known, nodes and restore orders."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count
from typing import Any

from kvcr_actors.core.inventory import InventoryIndex
from kvcr_actors.stores.memory import memory_backend
from kvcr_actors.testing.devices import LoopDevice
from kvcr_actors.testing.host_memory import BytesHostMemory
from kvcr_actors.testing.invariants import OrderBook
from kvcr_actors.testing.stores import FaultyStore
from kvcr_actors.types import BackupNode, CacheLayout, PageKey, PoolSpec, RequestId, RestoreOrder

LAYOUT = CacheLayout((PoolSpec("kv", 1, 8), PoolSpec("side", 1, 3)))


class Ports:
    """The ports of one controller, and its order book."""

    def __init__(self, *, host_slots: int = 16, store_pages: int | None = 32) -> None:
        self.device = LoopDevice(LAYOUT, 512, BytesHostMemory(LAYOUT, host_slots))
        self.store = None if store_pages is None else FaultyStore(memory_backend(store_pages))
        self.index = InventoryIndex()
        self.orders = OrderBook()
        self._pages = count()
        self._nodes = count(1)

    @property
    def arguments(self) -> dict[str, Any]:
        return {"device": self.device, "store": self.store, "sinks": (self.index,)}

    def node(self, keys: Sequence[PageKey], parent: PageKey | None = None) -> BackupNode:
        ids = tuple(next(self._pages) for _ in keys)
        for pool in range(2):
            self.device.load(pool, ids, expected(keys, pool))
        return BackupNode(next(self._nodes), tuple(keys), (ids, ids), parent)

    def restore(self, request_id: RequestId, pages: int, first: int = 0) -> RestoreOrder:
        ids = tuple(next(self._pages) for _ in range(pages))
        order = RestoreOrder(request_id, first, (ids, ids))
        self.orders.restore(order)
        return order

    def assert_bytes(self, order: RestoreOrder, keys: Sequence[PageKey]) -> None:
        for pool in range(2):
            assert self.device.gather(pool, list(order.pages[pool])) == expected(keys, pool)


def expected(keys: Sequence[PageKey], pool: int) -> bytes:
    size = LAYOUT.pools[pool].page_bytes
    return b"".join(random.Random(f"{key.hex()}/{pool}").randbytes(size) for key in keys)
