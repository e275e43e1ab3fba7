"""LRU at every capacity in one pass, by stack distances (Mattson, 1970) of whole segments of paths.

The sequential rule touches a request's pages from tail to head. So pages stand in the stack by the last request that
asked for them, newest first, and those of one request by depth. A page that two requests share is touched by both with
all that is above it; hence of the pages whose last request is `s`, those on a later path lie in one segment that begins
at the highest of them, and the page `i` steps down that segment has

    distance = (pages whose last request is later than s) + i + 1.

A cache of C pages holds the pages with distances up to C. Distances grow along a path, so the leading run that it finds
is the count of pages with distances up to C: exact for every C, also below the size of a request.

Why the tree's leaves-only eviction is the same: a parent is touched after its child in every request that has the
child, so it is never older; the oldest page of all has no child in the cache, and is a leaf. The tree inserts what is
new from head to tail instead; there a parent takes over its child's stamp when that leaves, so a chain still leaves as
one run, tail first. That holds while a request fits, which a replay demands.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import attrs

from kvcr_actors.lab.workload import Workload

_NEVER = -1


@attrs.frozen
class LruCurve:
    """Hits of LRU at every capacity: `hits[c]` pages at `c` pages, as far as more capacity finds more."""

    hits: Sequence[int]

    def at(self, capacity: int) -> int:
        """Pages found with a capacity in pages."""
        return self.hits[min(capacity, len(self.hits) - 1)]

    @property
    def enough(self) -> int:
        """The smallest capacity that finds all that an infinite one does."""
        return self.hits.index(self.hits[-1])


def lru_curve(work: Workload, first: int = 0) -> LruCurve:
    """Count the hits of the requests from `first` on; those before it only fill the cache."""
    last = [_NEVER] * work.unique
    newer = _Counts(len(work.paths))
    changes = [0] * (work.unique + 2)
    for request, path in enumerate(work.paths):
        segments = _segments(path, last)
        for owner, length in segments:
            distance = newer.above(owner)
            if request >= first:
                changes[distance + 1] += 1
                changes[distance + length + 1] -= 1
        for owner, length in segments:
            newer.add(owner, -length)
        newer.add(request, len(path))
        for page in path:
            last[page] = request
    return LruCurve(list(accumulate(accumulate(changes[:-1]))))


def _segments(path: Sequence[int], last: Sequence[int]) -> list[tuple[int, int]]:
    """The runs of a path with one last request each: (request, pages), newest first; pages never asked for end it."""
    segments: list[tuple[int, int]] = []
    owner, length = _NEVER, 0
    for page in path:
        before = last[page]
        if before == _NEVER:
            break
        if before == owner:
            length += 1
            continue
        if length:
            segments.append((owner, length))
        owner, length = before, 1
    if length:
        segments.append((owner, length))
    return segments


class _Counts:
    """Pages by last request, with sums over ranges in logarithmic time (a Fenwick tree)."""

    def __init__(self, requests: int) -> None:
        self._sums = [0] * (requests + 1)
        self._total = 0

    def add(self, request: int, pages: int) -> None:
        """Count pages at a request."""
        self._total += pages
        sums = self._sums
        index, size = request + 1, len(sums)
        while index < size:
            sums[index] += pages
            index += index & -index

    def above(self, request: int) -> int:
        """Count the pages of later requests."""
        sums = self._sums
        upto, index = 0, request + 1
        while index:
            upto += sums[index]
            index &= index - 1
        return self._total - upto
