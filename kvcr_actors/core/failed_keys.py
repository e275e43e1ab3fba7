"""Negative memory: pages whose reads failed a short while ago are believed absent, so that nobody pays twice."""

from __future__ import annotations

from collections.abc import Sequence

from kvcr_actors.types import PageKey


class FailedKeys:
    """The keys that failed in the last `pause_s` seconds, at most `limit` of them; the oldest are forgotten first.

    Times are the caller's, and only grow.
    """

    __slots__ = ("_limit", "_pause_s", "_until")

    def __init__(self, pause_s: float, limit: int = 4096) -> None:
        self._pause_s = pause_s
        self._limit = limit
        self._until: dict[PageKey, float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def note(self, key: PageKey, now: float) -> None:
        """Believe a page absent for a while."""
        self._until.pop(key, None)
        self._until[key] = now + self._pause_s
        if len(self._until) > self._limit:
            del self._until[next(iter(self._until))]

    def trusted(self, keys: Sequence[PageKey], masks: Sequence[int], now: float) -> int:
        """How many leading pages of a store's answer may be believed: those before a key that failed lately."""
        count = min(len(keys), len(masks))
        while self._until and next(iter(self._until.values())) <= now:
            del self._until[next(iter(self._until))]
        if self._until:
            for index in range(count):
                if masks[index] and keys[index] in self._until:
                    return index
        return count
