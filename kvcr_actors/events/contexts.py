"""What pages were computed from, kept from a request's submit until the last event about its pages."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import repeat
from typing import Protocol, TypeAlias

from kvcr_actors.errors import InvalidNodeError
from kvcr_actors.types import PageContext, PageKey

Origin: TypeAlias = tuple[PageContext, int]
"""A run of pages, and which of them is meant."""


class ContextSource(Protocol):
    """Who knows what a page was computed from. It is asked on the publisher's thread."""

    def find(self, key: PageKey) -> Origin | None:
        """The run that a page belongs to and its place there; None if that is not known."""
        ...


class ContextTable:
    """The contexts of at most `limit` pages, or of one run that is longer.

    When they are too many, the half that was noted earlier is forgotten.
    A page that is forgotten while a tier holds it is still removed, but no snapshot names it again: make `limit` twice
    what all tiers hold together. Both methods are for any thread.
    """

    def __init__(self, limit: int = 1 << 21) -> None:
        if limit < 2:
            raise InvalidNodeError(f"limit {limit}: a context table holds 2 pages or more")
        self.limit = limit
        # Two halves: to forget the oldest page of one table by one would cost more than all the rest.
        self._late = _Half()
        self._early = _Half()
        self._lock = threading.Lock()
        self._writes = 0
        """Odd while a write is under way."""

    def __len__(self) -> int:
        """Pages whose context is known; one that was noted in both halves counts twice."""
        return len(self._late.places) + len(self._early.places)

    def note(self, keys: Sequence[PageKey], context: PageContext) -> None:
        """Remember what these pages (root to tail, one a page of the context) were computed from."""
        if len(keys) != context.pages:
            raise InvalidNodeError(f"{len(keys)} keys for a context of {context.pages} pages")
        with self._lock:
            self._writes += 1
            if 2 * (len(self._late.places) + len(keys)) > self.limit:
                self._early, self._late = self._late, _Half()
            late = self._late
            late.contexts.update(zip(keys, repeat(context), strict=False))
            late.places.update(zip(keys, range(len(keys)), strict=True))
            self._writes += 1

    def find(self, key: PageKey) -> Origin | None:
        """Find a page in the run that named it last."""
        writes = self._writes
        origin = self._look_up(key)
        if writes == self._writes and not writes & 1:
            return origin
        # The place of one run may have met another run's tokens. Taken only now, the lock hardly ever stops a writer.
        with self._lock:
            return self._look_up(key)

    def _look_up(self, key: PageKey) -> Origin | None:
        for half in (self._late, self._early):
            place = half.places.get(key)
            if place is not None:
                return half.contexts[key], place
        return None


class _Half:
    """Two tables of plain values rather than one of pairs, which the garbage collector would look at for ever."""

    __slots__ = ("contexts", "places")

    def __init__(self) -> None:
        self.contexts: dict[PageKey, PageContext] = {}
        self.places: dict[PageKey, int] = {}
