"""One page in host memory, pages and components on their way there, and the changes that a tier tells of."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import attrs

from kvcr_actors.core.prefix_tree import TreePage
from kvcr_actors.types import PageKey


class PageState(enum.Enum):
    """Where a host page stands."""

    FILLING = "filling"
    """It has slots, and a copy into them is to come or under way."""
    READY = "ready"
    FORGOTTEN = "forgotten"
    """It belongs to an earlier generation: of no use to anybody, but something still works on its slots."""
    GONE = "gone"
    """It was evicted or abandoned; its slots belong to others."""


class HostPage(TreePage):
    """One page in host memory; `slots` has one slot a pool, `NO_SLOT` where the pool keeps nothing for it.

    `mask` is the bit set of the pools that do. `stored` says whether the store is believed to have the page; whoever
    writes to the store keeps it. The rest is for reading.
    """

    __slots__ = ("mask", "slots", "state", "stored")

    if TYPE_CHECKING:
        parent: HostPage | None

    def __init__(self, key: PageKey, parent: HostPage | None, payload: tuple[int, ...], ready: bool) -> None:
        super().__init__(key, parent, None, ready)
        self.slots = payload
        self.mask = 0
        self.state = PageState.FILLING
        self.stored = False

    @property
    def is_unfilled(self) -> bool:
        """Whether it has slots, but never became ready: whoever fills it must abandon it."""
        return not self.ready and self.state is not PageState.GONE

    @property
    def is_forgotten(self) -> bool:
        """Whether it belongs to an earlier generation, and something still works on its slots."""
        return self.state is PageState.FORGOTTEN

    def __repr__(self) -> str:
        return f"<host page {self.key.hex()[:16]}, {self.state.value}, slots {self.slots}>"


def first_not_ready(page: HostPage) -> HostPage:
    """Return the page nearest to the root that is not READY, of a page that is not and those above it."""
    while page.parent is not None and page.parent.state is not PageState.READY:
        page = page.parent
    return page


@attrs.frozen
class NewPath:
    """Pages to reserve below `parent` (None: the root), root to tail; a parent is a page that the tier holds.

    `masks` gives for each page the bit set of the pools that keep something for it.
    """

    parent: HostPage | None
    keys: Sequence[PageKey]
    masks: Sequence[int]


@attrs.frozen
class PagesStored:
    """Pages became ready: parents first, `parents[i]` the key before `keys[i]` (None at a root)."""

    keys: tuple[PageKey, ...]
    parents: tuple[PageKey | None, ...]


@attrs.frozen
class PagesRemoved:
    """Ready pages were evicted, leaves first."""

    keys: tuple[PageKey, ...]


@attrs.frozen
class PagesForgotten:
    """Every page that was held went at once."""

    count: int


@attrs.frozen
class PagesFreed:
    """Slots that were given back, for each pool, whether or not they have been handed out again."""

    slots: tuple[tuple[int, ...], ...]


HostChange: TypeAlias = PagesStored | PagesRemoved | PagesForgotten | PagesFreed


@attrs.define(eq=False)
class Growth:
    """Components on their way to a page that is held: `slots` has a slot for each pool that it gains, else `NO_SLOT`.

    The page is kept from eviction until the growth is over.
    """

    page: HostPage
    slots: tuple[int, ...]
