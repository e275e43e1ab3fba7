"""Replicated pages with one writer: what a rank that does not write knows of its owner's copies. On the loop."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvcr_actors import PageKey, router_key
from kvcr_actors.ports import PageBatch
from kvcr_actors_kvcr.hints import FetchHint
from kvcr_actors_kvcr.page_layout import batch_mask

_MOST = 1 << 20


class OwnersPages:
    """The pages that the owner of replicated pages was given when this rank was, the latest `_MOST` of them.

    Ranks deposit the same pages, so what this rank leaves to the owner, the owner has, unless it lost it since.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._masks: OrderedDict[PageKey, int] = OrderedDict()
        self.left_to_owner = 0

    @property
    def endpoint(self) -> str:
        """The owner's; empty if this rank is the owner."""
        return self._endpoint

    def note(self, batch: PageBatch, sharded: int) -> None:
        """Leave pages to the owner, without their sharded pools."""
        for index, key in enumerate(batch.keys):
            left = batch_mask(batch.slots, index) & ~sharded
            if left:
                self._masks[key] = self._masks.pop(key, 0) | left
                self.left_to_owner += 1
        while len(self._masks) > _MOST:
            self._masks.popitem(last=False)

    def mask(self, key: PageKey) -> int:
        """The pools that the owner should have of a page."""
        return self._masks.get(key, 0)

    def hint(self, keys: Sequence[PageKey]) -> FetchHint | None:
        """Where the owner's copies of these pages are; None if it has none of them."""
        hashes = frozenset(router_key(key) for key in keys if key in self._masks)
        return FetchHint(self._endpoint, hashes) if hashes else None

    def clear(self) -> None:
        """Ask the owner for none of them any more."""
        self._masks.clear()

    def forget(self, keys: Iterable[PageKey]) -> None:
        """The owner lost these pages."""
        for key in keys:
            self._masks.pop(key, None)
