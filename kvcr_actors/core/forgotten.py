"""Pages that were forgotten while something still worked on them: their slots come back one hold at a time.

A forgotten page is out of the tree, so nobody finds it, and it never becomes ready. What keeps its slots are holds: one
a pin, one for a copy that still fills it, and one for each ready page below it that is kept, since a pin on the end of
a path protects all of it. With its last hold a page is GONE.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcr_actors.core.host_page import HostPage, PageState


class ForgottenPages:
    """Which forgotten pages still have slots, and what keeps each."""

    __slots__ = ("_holds", "_when_gone")

    def __init__(self) -> None:
        self._holds: dict[HostPage, int] = {}
        self._when_gone: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._holds)

    @property
    def pages(self) -> Sequence[HostPage]:
        """The pages that still have slots."""
        return list(self._holds)

    def take(self, pages: Sequence[HostPage]) -> list[HostPage]:
        """Take pages (parents first) that left the tree, and return those that nothing keeps: they are GONE."""
        holds = {page: page.pins + (not page.ready) for page in pages}
        for page in reversed(pages):
            # A page that was never filled has nothing above it that its copy needs.
            if holds[page] and page.ready and page.parent is not None:
                holds[page.parent] += 1
        gone: list[HostPage] = []
        for page, count in holds.items():
            page.state = PageState.FORGOTTEN if count else PageState.GONE
            if count:
                self._holds[page] = count
            else:
                gone.append(page)
        return gone

    def release(self, page: HostPage) -> list[HostPage]:
        """Take one hold of a page back, and return the pages that go with it, leaves first."""
        gone: list[HostPage] = []
        step: HostPage | None = page
        while step is not None:
            self._holds[step] -= 1
            if self._holds[step]:
                break
            del self._holds[step]
            step.state = PageState.GONE
            gone.append(step)
            step = step.parent if step.ready else None
        return gone

    def when_gone(self, call: Callable[[], None]) -> None:
        """Run `call` once no page is left, at once if none is. It must not raise."""
        self._when_gone.append(call)
        self.tell()

    def tell(self) -> None:
        """Run what waits, if no page is left: their slots are free by now."""
        if not self._holds:
            calls, self._when_gone = self._when_gone, []
            for call in calls:
                call()
