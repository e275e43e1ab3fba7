"""Policies that know what a prefix cache is for: conversations that go on, and the slowest of their answers.

Both are LRU in two classes. The pages of the lower class leave first, by age of use; then those of the upper.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcr_actors.core.eviction import EvictionPolicy
from kvcr_actors.core.leaf_queue import LeafQueue, by_stamp
from kvcr_actors.core.prefix_tree import PageT

TAIL_PAGES = 4
LIFETIME_CAPACITIES = 4


class _TwoClasses(EvictionPolicy[PageT]):
    """Pages with `rank` 0 are of the lower class, with 1 of the upper."""

    watches = True

    def __init__(self) -> None:
        self._classes = (LeafQueue[PageT](by_stamp), LeafQueue[PageT](by_stamp))

    def add(self, page: PageT) -> None:
        """Take a page that became evictable."""
        self._classes[page.rank].push(page)

    def discard(self, page: PageT) -> None:
        """Forget a page that is evictable no more."""
        for pages in self._classes:
            pages.discard(page)

    def touch(self, page: PageT) -> None:
        """Queue a page anew whose class may have changed."""
        self.discard(page)
        self.add(page)

    def victim(self) -> PageT | None:
        """Name the least recently used of the lower class, else of the upper."""
        lower, upper = self._classes
        return lower.top() or upper.top()


class TailLruEviction(_TwoClasses[PageT]):
    """Tail-optimised LRU (arXiv 2510.15152): an answer may compute `tail_pages` pages of its history without harm.

    So the last pages of every conversation go first: those that have less than `tail_pages` pages below them on the
    longest conversation that went through them. That keeps more of long conversations, whose answers are the slowest.
    `uses` is the number of pages below.
    """

    def __init__(self, tail_pages: int = TAIL_PAGES) -> None:
        super().__init__()
        self._tail_pages = tail_pages

    def came(self, pages: Sequence[PageT]) -> None:
        """Note how far the conversation goes on below new pages and those above them."""
        below = 0
        for page in reversed(pages):
            self._note(page, below)
            below += 1
        above = pages[0].parent
        while above is not None and above.uses < below:
            self._note(above, below)
            above, below = above.parent, below + 1

    def _note(self, page: PageT, below: int) -> None:
        page.uses = below
        page.rank = int(below >= self._tail_pages)


class SessionEviction(_TwoClasses[PageT]):
    """Keep what was asked for again, for a time to live: in real traces reuse is of a session, and soon (2506.02634).

    The upper class are pages that were used again since they came. Their time is counted in pages used: who was not
    used for `lifetime` of them counts as lower.
    """

    def __init__(self, lifetime: int) -> None:
        super().__init__()
        self._lifetime = lifetime
        self._now = 0

    def victim(self) -> PageT | None:
        """Name the oldest page of the lower class or of those whose time is over, else of the upper."""
        lower, upper = (pages.top() for pages in self._classes)
        if lower is None or upper is None:
            return lower or upper
        is_over = upper.stamp < self._now - self._lifetime
        return upper if is_over and upper.stamp < lower.stamp else lower

    def came(self, pages: Sequence[PageT]) -> None:
        """Note the time."""
        self._now = pages[-1].stamp

    def used(self, pages: Sequence[PageT]) -> None:
        """Lift pages to the upper class."""
        self._now = pages[0].stamp
        for page in pages:
            page.rank = 1
