"""Which announced device pages hang from which: what a reader loses with a page, without a search of all pages."""

from __future__ import annotations

from collections.abc import Iterable

from kvcr_actors.types import PageKey


class ChildTable:
    """The children of each parent, in the order in which they came."""

    __slots__ = ("_children",)

    def __init__(self) -> None:
        # Nearly every parent has one child: a dictionary for each would cost more than all the rest of a page.
        self._children: dict[PageKey, PageKey | dict[PageKey, None]] = {}

    def add(self, parent: PageKey, key: PageKey) -> None:
        """Note a child; nothing if it is there."""
        known = self._children.setdefault(parent, key)
        if isinstance(known, dict):
            known[key] = None
        elif known != key:
            self._children[parent] = {known: None, key: None}

    def remove(self, parent: PageKey, key: PageKey) -> None:
        """Forget a child; nothing if it is not there."""
        known = self._children.get(parent)
        if isinstance(known, dict):
            known.pop(key, None)
        if known == key or not known:
            self._children.pop(parent, None)

    def of(self, parent: PageKey) -> Iterable[PageKey]:
        """The children of a page, which may be none."""
        known = self._children.get(parent, ())
        return known if isinstance(known, (dict, tuple)) else (known,)

    def clear(self) -> None:
        """Forget all."""
        self._children.clear()
