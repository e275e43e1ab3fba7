"""The most hits that any policy can have: Belady's rule on prefix trees.

What a policy may do: after a request the cache holds at most C pages, each of which it held before or the request
asked for; it may refuse pages. A page leaves only after its children, so the cached pages of a path are a prefix of it,
and a request finds as many pages as the cache holds of its path.

Without the tree, each stretch from one use of a page to its next is an interval that earns one hit if the page is kept
through it, and at most C intervals may overlap between two requests. To keep the most intervals, drop the one that ends
last whenever there are too many: for intervals of equal worth this greedy rule is optimal (exchange: a solution that
keeps the one that ends last and drops another may swap the two, since the other ends sooner and blocks less), and it is
Belady's.

The tree costs nothing. Whoever asks for a child asks for its parent too, so a parent's next use is never later than
its child's; among pages with equal next use, let the deepest go first. Then a child always goes before its parent, and
the greedy rule keeps prefixes of its own accord. So it is feasible on trees, and its hits are the optimum exactly: no
policy is above it, with the tree or without, and one that knew the future would reach it.

All pages with the same next use lie on that request's path, so only their number counts, and a cache is one number for
each request to come.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import cached_property

from kvcr_actors.lab.workload import Workload


class Bound:
    """The bound for one workload, at any capacity; `first` as in `lru_curve`."""

    def __init__(self, work: Workload, first: int = 0) -> None:
        self._nexts = _next_uses(work)
        self._first = first

    @cached_property
    def infinite(self) -> int:
        """Hits without limit: every page that was asked for before."""
        return self.at(sum(count for uses in self._nexts for _, count in uses) + 1)

    def at(self, capacity: int) -> int:
        """Count the most hits that `capacity` pages can give."""
        kept = [0] * len(self._nexts)
        """Pages in the cache by the request that asks for them next."""
        latest: list[int] = []
        hits = held = 0
        for request, uses in enumerate(self._nexts):
            found = kept[request]
            held -= found
            if request >= self._first:
                hits += found
            for later, count in uses:
                if not kept[later]:
                    heapq.heappush(latest, -later)
                kept[later] += count
                held += count
            while held > capacity:
                later, excess = -latest[0], held - capacity
                dropped = min(kept[later], excess)
                kept[later] -= dropped
                held -= dropped
                if not kept[later]:
                    heapq.heappop(latest)
        return hits


def _next_uses(work: Workload) -> list[Sequence[tuple[int, int]]]:
    """For each request, how many of its pages are asked for next by which request: (request, pages)."""
    upcoming: dict[int, int] = {}
    nexts: list[Sequence[tuple[int, int]]] = []
    for request in range(len(work.paths) - 1, -1, -1):
        counts: dict[int, int] = {}
        for page in work.paths[request]:
            later = upcoming.get(page)
            if later is not None:
                counts[later] = counts.get(later, 0) + 1
            upcoming[page] = request
        nexts.append(tuple(counts.items()))
    nexts.reverse()
    return nexts
