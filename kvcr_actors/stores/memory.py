"""The memory store: pages in this process's own memory, gone when it ends."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from kvcr_actors.core.keys import Namespace
from kvcr_actors.errors import ConfigError
from kvcr_actors.ports import Store, StoreTraits
from kvcr_actors.stores.bounded import BoundedBackend
from kvcr_actors.stores.medium import HeldPage, Parts
from kvcr_actors.stores.options import check_known
from kvcr_actors.stores.threaded import ThreadedStore
from kvcr_actors.types import CacheLayout, PageKey


class MemoryMedium:
    """One bytearray a page: the components held, one after the other in the order of the pools.

    A dropped page's buffer is kept for the next page of its size: fresh memory would have to be faulted in again.
    """

    strangers = 0

    def __init__(self) -> None:
        self._records: dict[PageKey, bytearray] = {}
        self._page_bytes: tuple[int, ...] = ()
        self._spare: bytearray | None = None
        self._bytes_held = 0

    def open(self, layout: CacheLayout) -> Iterable[tuple[PageKey, HeldPage]]:
        """Take the sizes of the pools; nothing is held yet."""
        self._page_bytes = tuple(pool.page_bytes for pool in layout.pools)
        return ()

    def save(self, key: PageKey, parent: PageKey | None, parts: Parts) -> None:
        """Copy the components into one record."""
        del parent
        size = sum(part.nbytes for part in parts.values())
        record, self._spare = self._spare, None
        if record is None or len(record) != size:
            record = bytearray(size)
        offset = 0
        for pool in sorted(parts):
            part = parts[pool]
            record[offset : offset + part.nbytes] = part
            offset += part.nbytes
        replaced = self._records.get(key)
        self._bytes_held += len(record) - (0 if replaced is None else len(replaced))
        self._records[key] = record

    def load(self, key: PageKey, mask: int, parts: Parts) -> bool:
        """Copy the components asked for out of the record."""
        record = memoryview(self._records[key])
        offset = 0
        for pool, size in enumerate(self._page_bytes):
            if mask >> pool & 1:
                if pool in parts:
                    parts[pool][:] = record[offset : offset + size]
                offset += size
        return True

    def drop(self, key: PageKey) -> None:
        """Forget a record and keep its buffer for the next one."""
        self._spare = self._records.pop(key)
        self._bytes_held -= len(self._spare)

    def clear(self, keys: Collection[PageKey]) -> None:
        """Give the memory back."""
        del keys
        self.close()

    def drop_stranger(self) -> None:
        """There are none."""

    def note(self, key: PageKey, page: HeldPage) -> None:
        """Nothing outlives the process."""

    def end_batch(self) -> None:
        """Nothing waits for the end of a batch."""

    def close(self) -> None:
        """Give the memory back."""
        self._records.clear()
        self._spare = None
        self._bytes_held = 0

    def counters(self) -> Mapping[str, int]:
        """The bytes held now."""
        return {"bytes_held": self._bytes_held}


def memory_backend(capacity_pages: int) -> BoundedBackend:
    """The memory store without its loop."""
    return BoundedBackend(capacity_pages, MemoryMedium())


def open_store(options: Mapping[str, str], capacity_pages: int, path: Path | None, namespace: Namespace) -> Store:
    """Make a memory store of `capacity_pages`; it takes no options and no path.

    Its pages are of this namespace, and no other can get into this process's memory.
    """
    check_known("memory", options, ())
    if path is not None:
        raise ConfigError(f"store memory: it keeps nothing in a folder; leave out the path {path}")
    return ThreadedStore("memory", memory_backend(capacity_pages), StoreTraits(namespace=namespace.digest))
