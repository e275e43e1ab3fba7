"""Policies that count uses: LFU with ageing, SIEVE, S3-FIFO and 2Q, on leaves.

All pages are counted and keep their places; only leaves can be named. What came in one go takes its places from the
tail on, so that a chain which nobody uses leaves in one go too, tail first. A page keeps its place when it is pinned or
gets a child, and has it again when it is a leaf once more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvcr_actors.core.eviction import EvictionPolicy
from kvcr_actors.core.leaf_queue import LeafQueue, by_rank, by_stamp
from kvcr_actors.core.prefix_tree import PageT
from kvcr_actors.types import PageKey

_COUNT_SHIFT = 48
"""A rank is a count above, and below it what decides among equals; stamps and places stay far under 2**48."""


class LfuEviction(EvictionPolicy[PageT]):
    """Least frequently used with ageing (LFU-DA): a page's count starts from the count of the last that left.

    `uses` is a page's own count, `rank` the sum of that and the age at its last use; equal sums leave by age of use.
    """

    watches = True

    def __init__(self) -> None:
        self._queue = LeafQueue[PageT](by_rank)
        self._age = 0

    def add(self, page: PageT) -> None:
        """Take a page that became evictable."""
        self._queue.push(page)

    def discard(self, page: PageT) -> None:
        """Forget a page that is evictable no more."""
        self._queue.discard(page)

    def touch(self, page: PageT) -> None:
        """Do nothing: ranks only grow, and the entry is put right when it surfaces."""

    def victim(self) -> PageT | None:
        """Name the page with the lowest count."""
        return self._queue.top()

    def came(self, pages: Sequence[PageT]) -> None:
        """Count the first use of new pages."""
        for page in pages:
            page.uses = 0
        self.used(pages)

    def used(self, pages: Sequence[PageT]) -> None:
        """Count a use, and rank the pages anew."""
        age = self._age
        for page in pages:
            page.uses += 1
            page.rank = (age + page.uses) << _COUNT_SHIFT | page.stamp

    def gone(self, page: PageT) -> None:
        """Age: whoever comes now starts from the count of this one."""
        self._age = max(self._age, page.rank >> _COUNT_SHIFT)


class SieveEviction(EvictionPolicy[PageT]):
    """SIEVE: a hand goes from the oldest page to the newest, spares those used since it last passed, takes the others.

    `uses` is the visited bit. `rank` is the round in which the hand meets the page, and below it the page's place: what
    lies behind the hand waits for the next round.
    """

    watches = True

    def __init__(self) -> None:
        self._queue = LeafQueue[PageT](by_rank)
        self._places = 0
        self._hand = 0

    def add(self, page: PageT) -> None:
        """Take a page that became evictable, ahead of the hand."""
        if page.rank < self._hand:
            lap, place = self._hand >> _COUNT_SHIFT, page.rank & ((1 << _COUNT_SHIFT) - 1)
            page.rank = lap << _COUNT_SHIFT | place
            if page.rank < self._hand:
                page.rank += 1 << _COUNT_SHIFT
        self._queue.push(page)

    def discard(self, page: PageT) -> None:
        """Forget a page that is evictable no more."""
        self._queue.discard(page)

    def touch(self, page: PageT) -> None:
        """Do nothing: `used` has set the bit."""

    def victim(self) -> PageT | None:
        """Move the hand to the next page that was not used."""
        queue = self._queue
        while (page := queue.top()) is not None:
            self._hand = page.rank
            if not page.uses:
                return page
            page.uses = 0
            page.rank += 1 << _COUNT_SHIFT
        return None

    def came(self, pages: Sequence[PageT]) -> None:
        """Place new pages at the newest end."""
        lap = self._hand >> _COUNT_SHIFT << _COUNT_SHIFT
        place = self._places
        for page in reversed(pages):
            place += 1
            page.rank = lap | place
        self._places = place

    def used(self, pages: Sequence[PageT]) -> None:
        """Set the visited bits."""
        for page in pages:
            page.uses = 1


_MAIN = 4
"""The bit of `uses` that says that a page is in the main queue; below it the uses are counted, three at most."""


class S3FifoEviction(EvictionPolicy[PageT]):
    """S3-FIFO: a small queue (a tenth) sorts out what is used once; a main queue takes the rest round and round.

    A page used more than once in the small queue moves to the main one when its turn comes, else it leaves, and its key
    is remembered: if it comes back soon it starts in the main queue.
    """

    watches = True

    def __init__(self, capacity: int) -> None:
        self._small_limit = max(1, capacity // 10)
        self._ghosts = _Ghosts(capacity - self._small_limit)
        self._small = LeafQueue[PageT](by_rank)
        self._main = LeafQueue[PageT](by_rank)
        self._small_pages = 0
        self._places = 0

    def add(self, page: PageT) -> None:
        """Take a page that became evictable, at its place."""
        (self._main if page.uses & _MAIN else self._small).push(page)

    def discard(self, page: PageT) -> None:
        """Forget a page that is evictable no more."""
        (self._main if page.uses & _MAIN else self._small).discard(page)

    def touch(self, page: PageT) -> None:
        """Do nothing: `used` has counted."""

    def victim(self) -> PageT | None:
        """Take from the small queue while it is over its share, else from the main one."""
        while True:
            page = self._small.top() if self._small_pages >= self._small_limit or not len(self._main) else None
            if page is None:
                return self._main_victim() or self._small.top()
            if page.uses <= 1:
                return page
            self._small.discard(page)
            self._small_pages -= 1
            page.uses = _MAIN
            page.rank = self._next_place()
            self._main.push(page)

    def came(self, pages: Sequence[PageT]) -> None:
        """Place new pages at the newest end of a queue: the main one if their key is remembered."""
        for page in reversed(pages):
            page.rank = self._next_place()
            page.uses = _MAIN if self._ghosts.take(page.key) else 0
            self._small_pages += not page.uses

    def used(self, pages: Sequence[PageT]) -> None:
        """Count a use, three at most."""
        for page in pages:
            if page.uses & 3 < 3:
                page.uses += 1

    def gone(self, page: PageT) -> None:
        """Remember what left the small queue."""
        if not page.uses & _MAIN:
            self._small_pages -= 1
            self._ghosts.add(page.key)

    def back(self, page: PageT) -> None:
        """Undo `gone`."""
        if not page.uses & _MAIN:
            self._small_pages += 1
            self._ghosts.take(page.key)

    def _main_victim(self) -> PageT | None:
        while (page := self._main.top()) is not None and page.uses > _MAIN:
            page.uses -= 1
            page.rank = self._next_place()
        return page

    def _next_place(self) -> int:
        self._places += 1
        return self._places


class TwoQueueEviction(EvictionPolicy[PageT]):
    """2Q: a quarter is first in, first out for new pages; what comes back after it left that queue is kept by recency.

    `uses` is 1 for pages of the second queue. Keys of half the capacity are remembered.
    """

    watches = True

    def __init__(self, capacity: int) -> None:
        self._first_limit = max(1, capacity // 4)
        self._ghosts = _Ghosts(max(1, capacity // 2))
        self._first = LeafQueue[PageT](by_rank)
        self._second = LeafQueue[PageT](by_stamp)
        self._first_pages = 0
        self._places = 0

    def add(self, page: PageT) -> None:
        """Take a page that became evictable."""
        (self._second if page.uses else self._first).push(page)

    def discard(self, page: PageT) -> None:
        """Forget a page that is evictable no more."""
        (self._second if page.uses else self._first).discard(page)

    def touch(self, page: PageT) -> None:
        """Do nothing: stamps only grow, and the entry is put right when it surfaces."""

    def victim(self) -> PageT | None:
        """Take from the first queue while it is over its share, else from the second."""
        if self._first_pages > self._first_limit and (page := self._first.top()) is not None:
            return page
        return self._second.top() or self._first.top()

    def came(self, pages: Sequence[PageT]) -> None:
        """Place new pages: in the second queue if their key is remembered."""
        place = self._places
        for page in reversed(pages):
            place += 1
            page.rank = place
            page.uses = int(self._ghosts.take(page.key))
            self._first_pages += not page.uses
        self._places = place

    def gone(self, page: PageT) -> None:
        """Remember what left the first queue."""
        if not page.uses:
            self._first_pages -= 1
            self._ghosts.add(page.key)

    def back(self, page: PageT) -> None:
        """Undo `gone`."""
        if not page.uses:
            self._first_pages += 1
            self._ghosts.take(page.key)


class _Ghosts:
    """The keys of the last `limit` pages that left."""

    __slots__ = ("_keys", "_limit")

    def __init__(self, limit: int) -> None:
        self._keys: OrderedDict[PageKey, None] = OrderedDict()  # a dict looks for its first key from the start
        self._limit = limit

    def add(self, key: PageKey) -> None:
        """Remember a key, as the newest."""
        self._keys[key] = None
        if len(self._keys) > self._limit:
            self._keys.popitem(last=False)

    def take(self, key: PageKey) -> bool:
        """Forget a key; whether it was remembered."""
        if key in self._keys:
            del self._keys[key]
            return True
        return False
