"""The replay's first tier: which pages the device holds, what was backed up, and which page ids are free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvcr_actors.core.eviction import LruEviction
from kvcr_actors.core.inventory import BlocksRemoved, BlocksStored, InventoryEvent
from kvcr_actors.core.prefix_tree import PrefixTree
from kvcr_actors.core.write_policy import SavedPage, WriteBook, WriteSettings
from kvcr_actors.types import PageKey, Tier


class DevicePage(SavedPage):
    """A page on the device: its page id (one id in every pool), how often it was asked for, and its backup."""

    __slots__ = ("page_id",)

    if TYPE_CHECKING:
        parent: DevicePage | None

    def __init__(self, key: PageKey, parent: DevicePage | None, payload: Any, ready: bool) -> None:
        super().__init__(key, parent, None, ready)
        self.page_id: int = payload


class DeviceTier:
    """A prefix tree over `pages` page ids. `poison` is called with ids that were freed."""

    def __init__(self, pages: int, poison: Callable[[Sequence[int]], None]) -> None:
        self._tree = PrefixTree(LruEviction[DevicePage](), DevicePage)
        self._free = list(range(pages - 1, -1, -1))
        self._poison = poison
        self._events: list[InventoryEvent] = []

    def write_book(self, pools: int, settings: WriteSettings) -> WriteBook[DevicePage]:
        """The book of what is backed up; a page has the same id in each of `pools` pools."""
        return WriteBook(self._tree, lambda pages: (tuple(page.page_id for page in pages),) * pools, settings)

    def __len__(self) -> int:
        return len(self._tree)

    @property
    def free_pages(self) -> int:
        """Page ids that can be had without eviction."""
        return len(self._free)

    def match(self, keys: Sequence[PageKey]) -> list[DevicePage]:
        """The leading run of pages held, made the most recent, its tail the oldest of it."""
        found = self._tree.match(keys)
        self._tree.touch(found)
        return found

    def get(self, key: PageKey) -> DevicePage | None:
        """The page of a key."""
        return self._tree.get(key)

    def pin(self, page: DevicePage) -> None:
        """Keep a page and the path above it."""
        self._tree.pin(page)

    def unpin(self, page: DevicePage) -> None:
        """Take one pin back."""
        self._tree.unpin(page)

    def allocate(self, count: int) -> list[int] | None:
        """Take page ids, evicting the least recent leaves; None, with nothing changed, if they are not to be had."""
        if not self.make_room(count):
            return None
        ids = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return ids

    def make_room(self, count: int) -> bool:
        """Evict until `count` ids are free; False, with nothing changed, if that cannot be."""
        lacking = count - len(self._free)
        victims = self._tree.evict(lacking)
        if len(victims) < lacking:
            self._put_back(victims)
            return False
        if victims:
            self._events.append(BlocksRemoved(Tier.DEVICE, tuple(page.key for page in victims)))
            self.free([page.page_id for page in victims])
        return True

    def free(self, ids: Sequence[int]) -> None:
        """Give ids back; their bytes are poisoned."""
        if ids:
            self._free.extend(ids)
            self._poison(ids)

    def insert(self, keys: Sequence[PageKey], parent: DevicePage | None, ids: Sequence[int]) -> list[DevicePage]:
        """Hold pages below `parent`; an id whose key is held already (another request was faster) is given back."""
        pages: list[DevicePage] = []
        new: list[DevicePage] = []
        spare: list[int] = []
        for key, page_id in zip(keys, ids, strict=True):
            page = self._tree.get(key)
            if page is None:
                page = self._tree.insert(key, parent, page_id, ready=True)
                new.append(page)
            else:
                spare.append(page_id)
            pages.append(page)
            parent = page
        self.free(spare)
        if new:
            parents = tuple(None if page.parent is None else page.parent.key for page in new)
            self._events.append(BlocksStored(Tier.DEVICE, tuple(page.key for page in new), parents))
        return pages

    def take_events(self) -> list[InventoryEvent]:
        """What came and went since the last call."""
        events, self._events = self._events, []
        return events

    def contents(self) -> frozenset[PageKey]:
        """The keys held."""
        return frozenset(page.key for page in self._tree)

    def _put_back(self, victims: Sequence[DevicePage]) -> None:
        for page in reversed(victims):
            self._tree.restore(page)
