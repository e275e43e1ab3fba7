"""Pages for tests of backends: without a loop, each write and read with the bytes that belong to the key."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvcr_actors.core.inventory import InventoryIndex
from kvcr_actors.core.keys import Namespace, layout_name
from kvcr_actors.ports import BatchOutcome, PageBatch, PageOutcome
from kvcr_actors.stores.backend import PageBackend
from kvcr_actors.stores.bounded import BoundedBackend
from kvcr_actors.stores.disk import disk_backend
from kvcr_actors.testing.host_memory import BytesHostMemory
from kvcr_actors.testing.store_driver import ALL_POOLS, LAYOUT, letters, page_bytes
from kvcr_actors.types import NO_SLOT, PageKey, Tier

NAMESPACE = Namespace("test-model", "1", "float16", layout_name(LAYOUT), LAYOUT.page_bytes)


class Pages:
    """A backend with host memory and the inventory that its events tell; made open."""

    def __init__(self, backend: PageBackend, slots: int = 64) -> None:
        self.backend = backend
        self.host = BytesHostMemory(LAYOUT, slots)
        self.inventory = InventoryIndex()
        self.last = BatchOutcome(())
        backend.open(LAYOUT)
        self.publish()

    def write(self, keys: Sequence[PageKey], pools: int = ALL_POOLS, version: int = 0) -> str:
        for pool in range(len(LAYOUT.pools)):
            for slot, key in enumerate(keys):
                self.host.page(pool, slot)[:] = page_bytes(key, pool, version=version)
        self.last = self.backend.write(PageBatch(tuple(keys), _slots(keys, pools), (None, *keys[:-1])), self.host)
        self.publish()
        return letters(self.last.pages)

    def read(self, keys: Sequence[PageKey], pools: int = ALL_POOLS, version: int = 0) -> str:
        for pool in range(len(LAYOUT.pools)):
            self.host.poison(pool, range(self.host.slots))
        self.last = self.backend.read(PageBatch(tuple(keys), _slots(keys, pools)), self.host)
        self.publish()
        for slot, (key, outcome) in enumerate(zip(keys, self.last.pages, strict=True)):
            for pool in range(len(LAYOUT.pools)):
                if outcome is PageOutcome.OK and pools >> pool & 1:
                    assert bytes(self.host.page(pool, slot)) == page_bytes(key, pool, version=version)
        return letters(self.last.pages)

    def publish(self) -> None:
        """Apply the events and check that they tell exactly what is held."""
        self.inventory.publish(self.backend.take_events())
        assert self.inventory.keys(Tier.STORE) == self.backend.contents()
        assert self.inventory.anomalies == 0

    def count(self, name: str) -> int:
        return self.backend.counters()[name]

    def close(self) -> None:
        self.backend.close()


def open_disk(
    path: Path, capacity: int = 64, namespace: Namespace = NAMESPACE, *, slots: int = 64, durable: bool = False
) -> Pages:
    """A disk store in a folder, open."""
    return Pages(disk_backend(path, capacity, namespace, durable=durable), slots)


def page_file(path: Path, key: PageKey) -> Path:
    """Where the disk store keeps a page."""
    name = NAMESPACE.storage_key(key).hex()
    return path / name[:2] / name


def page_files(path: Path) -> list[Path]:
    """Every file of a page, unfinished ones too."""
    return sorted(file for shard in path.iterdir() if shard.is_dir() for file in shard.iterdir())


def oldest_first(backend: BoundedBackend) -> list[PageKey]:
    """The order in which a backend would evict what it holds."""
    return list(backend._held)


def _slots(keys: Sequence[PageKey], pools: int) -> tuple[Sequence[int], ...]:
    return tuple(range(len(keys)) if pools >> pool & 1 else (NO_SLOT,) * len(keys) for pool in range(len(LAYOUT.pools)))
