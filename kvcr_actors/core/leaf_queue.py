"""A queue of evictable pages by a key, lowest first: what the policies beside LRU are made of.

Chains leave from tail to root, and a parent's key is rarely above that of the child that has just left. So entries that
come before all others go on a stack, which costs nothing to keep in order, and only the rest into a heap; the next page
is the lower of the two tops. Entries may be stale, as in `LruEviction`: keys only grow while a page is queued, and an
entry is put right when it surfaces.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from operator import attrgetter
from typing import Generic

from kvcr_actors.core.eviction import PageT

by_stamp: Callable[..., int] = attrgetter("stamp")
by_rank: Callable[..., int] = attrgetter("rank")


class LeafQueue(Generic[PageT]):
    """Pages by `key` (`by_stamp`, `by_rank`); those with equal keys in the order in which they came."""

    __slots__ = ("_heap", "_key", "_pages", "_serial", "_stack")

    _SLACK = 64

    def __init__(self, key: Callable[[PageT], int]) -> None:
        self._key = key
        self._pages: dict[PageT, None] = {}
        self._heap: list[tuple[int, int, PageT]] = []
        self._stack: list[tuple[int, int, PageT]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def entries(self) -> int:
        """Entries, stale ones too: at most twice the pages and a constant."""
        return len(self._heap) + len(self._stack)

    def push(self, page: PageT) -> None:
        """Take a page; one that is queued keeps its entry."""
        if page not in self._pages:
            self._pages[page] = None
            self._enter(page)

    def discard(self, page: PageT) -> None:
        """Forget a page, if it is queued."""
        self._pages.pop(page, None)
        stack, heap = self._stack, self._heap
        if stack and stack[-1][2] is page:
            stack.pop()
        elif heap and heap[0][2] is page:
            heapq.heappop(heap)
        elif len(heap) + len(stack) > 2 * len(self._pages) + self._SLACK:
            self._compact()

    def top(self) -> PageT | None:
        """Name the page with the lowest key."""
        stack, heap = self._stack, self._heap
        while stack or heap:
            from_stack = bool(stack) and (not heap or stack[-1] < heap[0])
            key, _, page = stack[-1] if from_stack else heap[0]
            if page in self._pages and self._key(page) == key:
                return page
            if from_stack:
                stack.pop()
            else:
                heapq.heappop(heap)
            if page in self._pages:
                self._enter(page)
        return None

    def _enter(self, page: PageT) -> None:
        self._serial += 1
        entry = (self._key(page), self._serial, page)
        stack, heap = self._stack, self._heap
        if (not stack or entry < stack[-1]) and (not heap or entry < heap[0]):
            stack.append(entry)
        else:
            heapq.heappush(heap, entry)

    def _compact(self) -> None:
        self._stack.clear()
        self._heap = [(self._key(page), serial, page) for serial, page in enumerate(self._pages)]
        self._serial = len(self._heap)
        heapq.heapify(self._heap)
