"""The second tier: which pages stand in host memory, in which slots, and what changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import NoReturn

from kvcr_actors.core.eviction import EvictionPolicy, LruEviction
from kvcr_actors.core.forgotten import ForgottenPages
from kvcr_actors.core.host_page import (
    Growth,
    HostChange,
    HostPage,
    NewPath,
    PagesForgotten,
    PagesFreed,
    PagesRemoved,
    PagesStored,
    PageState,
)
from kvcr_actors.core.host_slots import HostSlots
from kvcr_actors.core.prefix_tree import PrefixTree
from kvcr_actors.errors import NoHostMemoryError
from kvcr_actors.types import NO_SLOT, CacheLayout, PageKey

__all__ = [
    "Growth",
    "HostChange",
    "HostPage",
    "HostTier",
    "NewPath",
    "PageState",
    "PagesForgotten",
    "PagesFreed",
    "PagesRemoved",
    "PagesStored",
]


class HostTier:
    """A prefix tree over host slots: `slots` slots in each pool of the layout, and at most as many pages.

    Pages are reserved (FILLING), then committed (READY) or abandoned (GONE); only READY leaves without pins are
    evicted. `forget` ends a generation: its pages are found no more, and those that are pinned or being filled give
    their slots back when that is over (see `core.forgotten`). Misuse raises ValueError, before any change.
    """

    def __init__(self, layout: CacheLayout, slots: int, policy: EvictionPolicy[HostPage] | None = None) -> None:
        self._tree = PrefixTree(LruEviction[HostPage]() if policy is None else policy, HostPage)
        self._slots = HostSlots(len(layout.pools), slots)
        self._all_pools = (1 << len(layout.pools)) - 1
        self._ready = 0
        self._growing: dict[Growth, None] = {}
        self._changes: list[PagesStored | PagesRemoved | PagesForgotten] = []
        self._forgotten = ForgottenPages()
        self.capacity = slots
        self.generation = 0
        """How often everything was forgotten."""

    @property
    def free_pages(self) -> int:
        """Pages with a component in every pool that can be reserved without eviction."""
        return min(self.capacity - len(self._tree), *self._slots.free_in_each())

    @property
    def ready_pages(self) -> int:
        """Pages whose bytes are in place."""
        return self._ready

    @property
    def filling_pages(self) -> int:
        """Pages that are reserved, but not committed."""
        return len(self._tree) - self._ready

    @property
    def forgotten_pages(self) -> int:
        """Pages of earlier generations whose slots something still works on."""
        return len(self._forgotten)

    def get(self, key: PageKey) -> HostPage | None:
        """Return the page of a key, FILLING or READY."""
        return self._tree.get(key)

    def match(self, keys: Iterable[PageKey]) -> list[HostPage]:
        """Return the leading run of READY pages of a path, root to tail."""
        return self._tree.match(keys)

    def absent_run(self, keys: Sequence[PageKey]) -> int:
        """Count the leading keys that are not held. More may follow one that is: pages that were cut off."""
        if self._tree.holds_none(keys):
            return len(keys)
        return next(count for count, key in enumerate(keys) if key in self._tree)

    def touch(self, pages: Sequence[HostPage]) -> None:
        """Make a path (root to tail) the most recently used, its tail the oldest of it."""
        self._tree.touch(pages)

    def pin(self, page: HostPage) -> None:
        """Keep a page and all pages above it until `unpin`; pins count."""
        self._tree.pin(page)

    def unpin(self, page: HostPage) -> None:
        """Take one pin back."""
        if page.is_forgotten and page.pins:
            page.pins -= 1
            self._release(page)
        else:
            self._tree.unpin(page)

    def reserve(
        self, parent: HostPage | None, keys: Sequence[PageKey], masks: Sequence[int] | None = None
    ) -> list[HostPage]:
        """Reserve one path (see `reserve_all`); without `masks` every page has a component in every pool."""
        masks = [self._all_pools] * len(keys) if masks is None else masks
        return self.reserve_all([NewPath(parent, keys, masks)])[0]

    def reserve_all(self, paths: Sequence[NewPath]) -> list[list[HostPage]]:
        """Add FILLING pages for each path, in slots as contiguous as can be.

        Evicts the least recent leaves, only as many as are needed and never a parent or what is above it. All or
        nothing: NoHostMemoryError leaves everything as it was. Take the changes before the new slots are written.
        """
        self._check_paths(paths)
        masks = list(chain.from_iterable(path.masks for path in paths))
        needs = self._slots.needs(masks)
        parents = [path.parent for path in paths if path.parent is not None]
        for parent in parents:
            self._tree.pin(parent)
        try:
            self._make_room(len(masks), needs)
        finally:
            for parent in parents:
                self._tree.unpin(parent)
        slots = self._slots.deal(masks, needs)
        reserved: list[list[HostPage]] = []
        for path in paths:
            pages = self._tree.insert_path(path.keys, path.parent, slots)
            for page, mask in zip(pages, path.masks, strict=True):
                page.mask = mask
            reserved.append(pages)
        return reserved

    def commit(self, pages: Sequence[HostPage]) -> list[HostPage]:
        """Make FILLING pages (parents first) READY, and return those that became so.

        A page whose parent is not READY stays FILLING, and a forgotten one stays forgotten; the caller abandons it.
        """
        self._check_filling(pages)
        ready: list[HostPage] = []
        is_ready, make_ready = PageState.READY, self._tree.make_ready
        for page in pages:
            parent = page.parent
            if not page.is_forgotten and (parent is None or parent.state is is_ready):
                make_ready(page)
                page.state = is_ready
                ready.append(page)
        self._ready += len(ready)
        self._record_stored(ready)
        return ready

    def abandon(self, pages: Sequence[HostPage]) -> None:
        """Give up pages without pins that are not filled; their memory must be quiet. Those below stay, cut off."""
        self._check_filling(pages)
        if pinned := [page for page in pages if page.pins]:
            raise ValueError(f"{pinned[0]!r} has {pinned[0].pins} pins; take them back before it is abandoned")
        current = [page for page in pages if not page.is_forgotten]
        for page in pages:
            if page.is_forgotten:
                self._release(page)
            else:
                self._tree.remove(page)
                page.state = PageState.GONE
        self._slots.free([page.slots for page in current])

    def reserve_more(self, wanted: Sequence[tuple[HostPage, int]]) -> list[Growth]:
        """Take slots for components that READY pages lack: for each page the bit set of the pools that it gains.

        The pages are pinned until `grow` or `drop`. All or nothing, as `reserve`.
        """
        for page, mask in wanted:
            if page.state is not PageState.READY or mask & (page.mask | ~self._all_pools):
                raise ValueError(f"{page!r} is not ready, or pools {mask:b} are not among those that it lacks")
        masks = [mask for _, mask in wanted]
        needs = self._slots.needs(masks)
        for page, _ in wanted:
            self._tree.pin(page)
        try:
            self._make_room(0, needs)
        except NoHostMemoryError:
            for page, _ in wanted:
                self._tree.unpin(page)
            raise
        dealt = self._slots.deal(masks, needs)
        growths = [Growth(page, slots) for (page, _), slots in zip(wanted, dealt, strict=True)]
        self._growing.update(dict.fromkeys(growths))
        return growths

    def is_growing(self, growth: Growth) -> bool:
        """Whether a growth is neither used nor dropped."""
        return growth in self._growing

    def grow(self, growths: Sequence[Growth]) -> list[HostPage]:
        """Give filled components to their pages, and return the pages that gained some.

        What a page gained meanwhile by another growth is given back, and so is what came for a forgotten page.
        """
        gained: list[HostPage] = []
        spare: list[tuple[int, ...]] = []
        for growth in growths:
            page, before = growth.page, growth.page.mask
            is_held = page.state is PageState.READY
            self._end_growth(growth)
            if not is_held:
                spare.append(growth.slots)
                continue
            pairs = list(zip(page.slots, growth.slots, strict=True))
            page.slots = tuple(more if held == NO_SLOT else held for held, more in pairs)
            spare.append(tuple(NO_SLOT if held == NO_SLOT else more for held, more in pairs))
            page.mask = sum(1 << pool for pool, slot in enumerate(page.slots) if slot != NO_SLOT)
            if page.mask != before:
                gained.append(page)
        self._slots.free(spare)
        return gained

    def drop(self, growths: Sequence[Growth]) -> None:
        """Give up components that were not filled; their memory must be quiet."""
        for growth in growths:
            self._end_growth(growth)
        self._slots.free([growth.slots for growth in growths])

    def evict(self, count: int) -> int:
        """Evict up to `count` pages, least recent leaves first, and return how many went."""
        victims = self._tree.evict(count)
        self._let_go(victims)
        return len(victims)

    def clear(self) -> int:
        """Evict every page that may be; what is pinned, filling or above such a page stays. Returns how many went."""
        return self.evict(self._ready)

    def forget(self, when_gone: Callable[[], None]) -> int:
        """Begin a new generation: no page held now is found or becomes ready any more. Returns how many were READY.

        `when_gone` is called once the slots of all of them are free, at once if they are. It must not raise.
        """
        ready = self._ready
        self.generation += 1
        self._ready = 0
        gone = self._forgotten.take(self._tree.take_all())
        self._slots.free([page.slots for page in gone])
        if ready:
            self._changes.append(PagesForgotten(ready))
        self._forgotten.when_gone(when_gone)
        return ready

    def take_changes(self) -> list[HostChange]:
        """Return what changed since the last call: pages stored and removed in order, then the slots freed."""
        changes: list[HostChange] = [*self._changes]
        self._changes.clear()
        if freed := self._slots.take_freed():
            changes.append(PagesFreed(freed))
        return changes

    def contents(self) -> frozenset[PageKey]:
        """Return the keys of the READY pages; costs time in proportion."""
        return frozenset(page.key for page in self._tree if page.ready)

    def snapshot(self) -> list[HostPage]:
        """Return every page that is held now, parents before their children."""
        return list(self._tree)

    def check(self) -> None:
        """Raise AssertionError if slots, pages and counts disagree; for tests, costs time in proportion."""
        self._tree.check()
        if self._ready != len(self.contents()) or len(self._tree) > self.capacity:
            raise AssertionError(f"{self._ready} pages count as ready, and {len(self._tree)} are held")
        for page in self._tree:
            expected = PageState.READY if page.ready else PageState.FILLING
            mask = sum(1 << pool for pool, slot in enumerate(page.slots) if slot != NO_SLOT)
            if page.state is not expected or page.mask != mask:
                raise AssertionError(f"{page!r}: its state or its mask {page.mask} is wrong")
        for pool, arena in enumerate(self._slots.arenas):
            arena.check()
            taken = [one.slots[pool] for one in (*self._tree, *self._forgotten.pages, *self._growing)]
            used = [slot for slot in taken if slot != NO_SLOT]
            if len(set(used)) != len(used) or len(used) != arena.slots - arena.free_slots:
                raise AssertionError(f"pool {pool}: {len(used)} slots in pages, {arena.free_slots} free")

    def _check_paths(self, paths: Sequence[NewPath]) -> None:
        tree = self._tree
        for path in paths:
            if path.parent is not None and tree.get(path.parent.key) is not path.parent:
                raise ValueError(f"{path.parent!r} is gone; reserve below a page that the tier holds")
            if not tree.holds_none(path.keys):
                taken = next(key for key in path.keys if key in tree)
                raise ValueError(f"page {taken.hex()} is held already; reserve only what the tier lacks")
            if len(path.masks) != len(path.keys) or any(mask & ~self._all_pools for mask in path.masks):
                masks, keys = len(path.masks), len(path.keys)
                raise ValueError(f"{masks} masks for {keys} keys, or a mask of a pool that does not exist")
        if len({key for path in paths for key in path.keys}) != sum(len(path.keys) for path in paths):
            raise ValueError("paths name a key twice")

    def _check_filling(self, pages: Sequence[HostPage]) -> None:
        for page in pages:
            if not page.is_unfilled:
                raise ValueError(f"{page!r} is not filling; each page is committed or abandoned once")
        if len(set(pages)) != len(pages):
            raise ValueError("a page is named twice; each page is committed or abandoned once")

    def _make_room(self, count: int, needs: list[int]) -> None:
        """Evict until `count` pages and `needs` slots fit; if that cannot be, put every page back."""
        if count > self.capacity:
            self._refuse(count, needs)
        short = [need - free for need, free in zip(needs, self._slots.free_in_each(), strict=True)]
        short.append(count - (self.capacity - len(self._tree)))
        victims: list[HostPage] = []
        # A page frees one slot a pool at most, so that many must leave at least, and no more do than must.
        while (lacking := max(short)) > 0:
            more = self._tree.evict(lacking)
            victims += more
            if len(more) < lacking:
                for victim in reversed(victims):
                    self._tree.restore(victim)
                self._refuse(count, needs)
            given = [*self._slots.needs([page.mask for page in more]), lacking]
            short = [need - freed for need, freed in zip(short, given, strict=True)]
        self._let_go(victims)

    def _refuse(self, count: int, needs: list[int]) -> NoReturn:
        raise NoHostMemoryError(
            f"{count} pages need {needs} slots; {self._slots.free_in_each()} are free, and eviction cannot give enough "
            f"({self.filling_pages} of {len(self._tree)} pages are filling, others may be claimed)"
        )

    def _let_go(self, victims: Sequence[HostPage]) -> None:
        """Finish evictions: the pages are out of the tree already."""
        if not victims:
            return
        for page in victims:
            page.state = PageState.GONE
        self._ready -= len(victims)
        keys = tuple(page.key for page in victims)
        last = self._changes[-1] if self._changes else None
        if isinstance(last, PagesRemoved):
            self._changes[-1] = PagesRemoved(last.keys + keys)
        else:
            self._changes.append(PagesRemoved(keys))
        self._slots.free([page.slots for page in victims])

    def _record_stored(self, pages: Sequence[HostPage]) -> None:
        if not pages:
            return
        keys = tuple(page.key for page in pages)
        parents = tuple(None if page.parent is None else page.parent.key for page in pages)
        last = self._changes[-1] if self._changes else None
        if isinstance(last, PagesStored):
            self._changes[-1] = PagesStored(last.keys + keys, last.parents + parents)
        else:
            self._changes.append(PagesStored(keys, parents))

    def _end_growth(self, growth: Growth) -> None:
        if growth not in self._growing:
            raise ValueError(f"the growth of {growth.page!r} is over; each is used or dropped once")
        del self._growing[growth]
        self.unpin(growth.page)

    def _release(self, page: HostPage) -> None:
        """Take back one hold of a forgotten page, and free what goes."""
        self._slots.free([gone.slots for gone in self._forgotten.release(page)])
        self._forgotten.tell()
