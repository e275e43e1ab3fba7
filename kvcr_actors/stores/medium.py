"""What a bounded backend needs of the place where its pages lie: memory, files, or what comes next."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol, TypeAlias

from kvcr_actors.types import CacheLayout, PageKey

Parts: TypeAlias = dict[int, memoryview]
"""Pool index to the bytes of that component, a view of a host slot."""


class HeldPage:
    """What the index knows of a page; `used` grows with each use, over all pages and over restarts."""

    __slots__ = ("mask", "parent", "used")

    def __init__(self, parent: PageKey | None, mask: int, used: int = 0) -> None:
        self.parent = parent
        self.mask = mask
        self.used = used


class PageMedium(Protocol):
    """Where the bytes of pages lie. OSError and MemoryError tell that one page failed; nothing else is raised."""

    @property
    def strangers(self) -> int:
        """How many pages lie there that belong to another namespace: they take room and are never served."""
        ...

    def open(self, layout: CacheLayout) -> Iterable[tuple[PageKey, HeldPage]]:
        """Start, and give what is held, least recently used first; StoreError says why it cannot."""
        ...

    def save(self, key: PageKey, parent: PageKey | None, parts: Parts) -> None:
        """Keep a page, whole or not at all; it may replace a page of that key."""
        ...

    def load(self, key: PageKey, mask: int, parts: Parts) -> bool:
        """Fill `parts`, some of the components of a page that holds `mask`; False if the page is damaged."""
        ...

    def drop(self, key: PageKey) -> None:
        """Forget a page. A page that cannot be deleted now is the medium's to delete later; it raises nothing."""
        ...

    def clear(self, keys: Collection[PageKey]) -> None:
        """Forget every page, all of which are named, so that none comes back, however this process ends.

        StoreError: some may.
        """
        ...

    def drop_stranger(self) -> None:
        """Forget the stranger that was used the longest ago."""
        ...

    def note(self, key: PageKey, page: HeldPage) -> None:
        """Take the news that a page was made, merged or used."""
        ...

    def end_batch(self) -> None:
        """Take the news that a batch is over, and do now what is cheaper by the batch."""
        ...

    def close(self) -> None:
        """Save what must outlive the process."""
        ...

    def counters(self) -> Mapping[str, int]:
        """Counts of the medium's own."""
        ...
