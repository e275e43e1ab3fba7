"""Which page leaves next: a policy sees pages become evictable, be used, and stop being evictable."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from typing import ClassVar, Protocol, TypeVar


class Evictable(Hashable, Protocol):
    """What a policy reads of a page; hashed by identity. A page's `stamp` only grows while it is evictable."""

    stamp: int


PageT = TypeVar("PageT", bound=Evictable)


class EvictionPolicy(Protocol[PageT]):
    """Told by the tree about its evictable pages: ready leaves without pins.

    One that `watches` hears of all pages besides: which came, were used, went and came back.
    """

    __slots__ = ()

    watches: ClassVar[bool] = False

    def add(self, page: PageT) -> None:
        """Take a page that became evictable."""
        ...

    def discard(self, page: PageT) -> None:
        """Forget a page that is evictable no more, or gone."""
        ...

    def touch(self, page: PageT) -> None:
        """Note that an evictable page was used and has a new stamp."""
        ...

    def victim(self) -> PageT | None:
        """Name the next page to leave, without forgetting it; None if no page is evictable."""
        ...

    def came(self, pages: Sequence[PageT]) -> None:
        """Note new pages, a path from root to tail; before any of them is evictable."""

    def used(self, pages: Sequence[PageT]) -> None:
        """Note that a request asked for pages that are held, a path from root to tail with new stamps."""

    def gone(self, page: PageT) -> None:
        """Note that a page left the tree; it is evictable no more."""

    def back(self, page: PageT) -> None:
        """Undo `gone`: the eviction did not happen."""


class LruEviction(EvictionPolicy[PageT]):
    """Exact least recently used: the evictable page with the lowest stamp.

    A heap holds at most one entry a page. An entry may be stale (its page was touched, or is not evictable now); stamps
    only grow, so it comes to the top no later than its page should, and is put right there.
    """

    __slots__ = ("_evictable", "_heap", "_queued", "_serial")

    _SLACK = 64

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, PageT]] = []
        self._queued: set[PageT] = set()
        self._evictable: set[PageT] = set()
        self._serial = 0

    def __len__(self) -> int:
        return len(self._evictable)

    @property
    def entries(self) -> int:
        """Entries in the heap, stale ones too: at most twice the evictable pages and a constant."""
        return len(self._heap)

    def add(self, page: PageT) -> None:
        """Take a page that became evictable."""
        self._evictable.add(page)
        if page not in self._queued:
            self._queued.add(page)
            self._serial += 1
            heapq.heappush(self._heap, (page.stamp, self._serial, page))

    def discard(self, page: PageT) -> None:
        """Forget a page; its entry stays until it surfaces or too many are stale."""
        self._evictable.discard(page)
        if len(self._heap) > 2 * len(self._evictable) + self._SLACK:
            self._compact()

    def touch(self, page: PageT) -> None:
        """Do nothing: the page's entry is put right when it surfaces."""

    def victim(self) -> PageT | None:
        """Name the least recently used evictable page."""
        heap = self._heap
        while heap:
            stamp, serial, page = heap[0]
            if page not in self._evictable:
                heapq.heappop(heap)
                self._queued.discard(page)
            elif page.stamp != stamp:
                heapq.heapreplace(heap, (page.stamp, serial, page))
            else:
                return page
        return None

    def _compact(self) -> None:
        self._heap = [(page.stamp, serial, page) for _, serial, page in self._heap if page in self._evictable]
        heapq.heapify(self._heap)
        self._queued = set(self._evictable)
