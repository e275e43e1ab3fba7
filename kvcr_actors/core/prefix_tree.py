"""A tree of pages: one node a page, found by its key alone, since a key names the whole path from the root."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar, cast

from kvcr_actors.core.eviction import EvictionPolicy
from kvcr_actors.types import PageKey


class TreePage:
    """One page of the tree. Its fields are for reading; the tree changes them.

    `children` counts the pages right below it, `pins` what keeps it from eviction, `stamp` when it was last used.
    `payload` is the owner's: device page ids, host slots. `rank` and `uses` are the eviction policy's own.
    """

    __slots__ = ("children", "key", "parent", "payload", "pins", "rank", "ready", "stamp", "uses")

    def __init__(self, key: PageKey, parent: Any, payload: Any, ready: bool) -> None:
        self.key = key
        self.parent: Any = parent
        self.payload: Any = payload
        self.ready = ready
        self.children = 0
        self.pins = 0
        self.stamp = 0
        self.rank = 0
        self.uses = 0


PageT = TypeVar("PageT", bound=TreePage)


class PrefixTree(Generic[PageT]):
    """Pages by key. Evictable are ready pages without children and pins; the policy hears of each change.

    A pin on the deepest page of a path protects the whole path. In effect a parent is never older than its child: where
    a child leaves, its parent takes over its stamp if that is newer. Misuse raises ValueError, before any change.
    """

    __slots__ = ("_page_type", "_pages", "_policy", "_stamp", "_watcher")

    def __init__(self, policy: EvictionPolicy[PageT], page_type: type[PageT] | None = None) -> None:
        self._policy = policy
        self._watcher = policy if policy.watches else None
        self._page_type = page_type or cast("type[PageT]", TreePage)
        self._pages: dict[PageKey, PageT] = {}
        self._stamp = 0

    def __len__(self) -> int:
        return len(self._pages)

    def __iter__(self) -> Iterator[PageT]:
        return iter(self._pages.values())

    def __contains__(self, key: PageKey) -> bool:
        return key in self._pages

    def holds_none(self, keys: Iterable[PageKey]) -> bool:
        """Whether no page of these keys is held."""
        return self._pages.keys().isdisjoint(keys)

    def get(self, key: PageKey) -> PageT | None:
        """Return the page of a key, ready or not."""
        return self._pages.get(key)

    def match(self, keys: Iterable[PageKey]) -> list[PageT]:
        """Return the leading run of ready pages of a path, root to tail."""
        found: list[PageT] = []
        get = self._pages.get
        for key in keys:
            page = get(key)
            if page is None or not page.ready:
                break
            found.append(page)
        return found

    def insert(self, key: PageKey, parent: PageT | None, payload: Any, ready: bool) -> PageT:
        """Add a page as the most recently used. A ready page needs a ready parent; None is the root."""
        return self.insert_path((key,), parent, iter((payload,)), ready=ready)[0]

    def insert_path(
        self, keys: Iterable[PageKey], parent: PageT | None, payloads: Iterator[Any], *, ready: bool = False
    ) -> list[PageT]:
        """Add pages, each below the one before it, with a payload for each key; the last is the most recently used."""
        pages: list[PageT] = []
        held, page_type, stamp = self._pages, self._page_type, self._stamp
        for key, payload in zip(keys, payloads, strict=False):
            if key in held:
                raise ValueError(f"page {key.hex()} is in the tree already")
            if parent is not None:
                if not pages:
                    self._check_parent(key, parent, ready=ready)
                parent.children += 1
            stamp += 1
            parent = page_type(key, parent, payload, ready)
            parent.stamp = stamp
            held[key] = parent
            pages.append(parent)
            self._stamp = stamp
        if pages:
            if self._watcher is not None:
                self._watcher.came(pages)
            if ready:
                self._policy.add(pages[-1])
        return pages

    def make_ready(self, page: PageT) -> None:
        """Mark a page's bytes as in place; its parent must be ready."""
        self._check_held(page)
        if page.ready or (page.parent is not None and not page.parent.ready):
            raise ValueError(f"page {page.key.hex()} is ready already, or its parent is not")
        page.ready = True
        self._offer(page)

    def remove(self, page: PageT) -> None:
        """Take out a page without pins: a leaf, or a page that never became ready (its children stay, cut off)."""
        self._check_held(page)
        if page.pins or (page.ready and page.children):
            raise ValueError(f"page {page.key.hex()} has {page.pins} pins and {page.children} children; it must stay")
        if page.ready:
            self._policy.discard(page)
        self._detach(page)
        if self._watcher is not None:
            self._watcher.gone(page)

    def touch(self, pages: Sequence[PageT]) -> None:
        """Make a path (root to tail) the most recently used, its tail the oldest of it."""
        if not pages:
            return
        stamp = self._stamp
        for page in reversed(pages):
            stamp += 1
            page.stamp = stamp
        self._stamp = stamp
        if self._watcher is not None:
            self._watcher.used(pages)
        tail = pages[-1]
        if tail.ready and not tail.children and not tail.pins:
            self._policy.touch(tail)

    def pin(self, page: PageT) -> None:
        """Keep a page and all pages above it from eviction until `unpin`; pins count."""
        self._check_held(page)
        if page.ready and not page.children and not page.pins:
            self._policy.discard(page)
        page.pins += 1

    def unpin(self, page: PageT) -> None:
        """Take one pin back."""
        if not page.pins:
            raise ValueError(f"page {page.key.hex()} has no pin to take back")
        page.pins -= 1
        self._offer(page)

    def evict(self, count: int) -> list[PageT]:
        """Take out up to `count` pages, the policy's next victims, leaves first."""
        pages: list[PageT] = []
        victim, discard, detach, watcher = self._policy.victim, self._policy.discard, self._detach, self._watcher
        while len(pages) < count and (page := victim()) is not None:
            discard(page)
            if watcher is not None:
                watcher.gone(page)
            detach(page)
            pages.append(page)
        return pages

    def take_all(self) -> list[PageT]:
        """Take out every page, whatever its pins, and return them, parents first."""
        pages = list(self)
        for page in pages:
            if page.ready and not page.children and not page.pins:
                self._policy.discard(page)
            if self._watcher is not None:
                self._watcher.gone(page)
        self._pages.clear()
        return pages

    def restore(self, page: PageT) -> None:
        """Undo an eviction as if it had not been; parents first."""
        parent = page.parent
        if page.key in self._pages or (parent is not None and self._pages.get(parent.key) is not parent):
            raise ValueError(f"page {page.key.hex()} cannot return: its key is taken, or its parent is gone")
        if parent is not None:
            if not parent.children and not parent.pins:
                self._policy.discard(parent)
            parent.children += 1
        self._pages[page.key] = page
        if self._watcher is not None:
            self._watcher.back(page)
        self._offer(page)

    def check(self) -> None:
        """Raise AssertionError if counts and links disagree; costs time in proportion to the pages."""
        children = dict.fromkeys(self._pages.values(), 0)
        for page in self:
            parent = page.parent
            if parent in children:
                children[parent] += 1
            elif parent is not None and page.ready:
                raise AssertionError(f"page {page.key.hex()} is ready, but its parent is not in the tree")
            if page.ready and parent is not None and not parent.ready:
                raise AssertionError(f"page {page.key.hex()} is ready before its parent")
        for page, count in children.items():
            if page.children != count or page.pins < 0:
                raise AssertionError(f"page {page.key.hex()} counts {page.children} children, but has {count}")

    def _check_parent(self, key: PageKey, parent: PageT, *, ready: bool) -> None:
        """Refuse a parent that is not held, or not ready for a ready page; a leaf is evictable no more."""
        if self._pages.get(parent.key) is not parent:
            raise ValueError(f"page {key.hex()}: its parent {parent.key.hex()} is not in the tree")
        if ready and not parent.ready:
            raise ValueError(f"page {key.hex()} cannot be ready before its parent {parent.key.hex()}")
        if not parent.children and not parent.pins and parent.ready:
            self._policy.discard(parent)

    def _offer(self, page: PageT) -> None:
        if page.ready and not page.children and not page.pins:
            self._policy.add(page)

    def _detach(self, page: PageT) -> None:
        del self._pages[page.key]
        parent = page.parent
        if parent is not None:
            parent.children -= 1
            if parent.stamp < page.stamp:
                parent.stamp = page.stamp
            if parent.ready and not parent.children and not parent.pins:
                self._policy.add(parent)

    def _check_held(self, page: PageT) -> None:
        if self._pages.get(page.key) is not page:
            raise ValueError(f"page {page.key.hex()} is not in the tree")
