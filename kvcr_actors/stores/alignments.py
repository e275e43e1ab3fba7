"""What waits for a store's thread without anybody who waits for it: alignments, which each keep a prefix's keys."""

from __future__ import annotations

from collections.abc import Callable

MOST_ALIGNMENTS = 64
"""So many may wait; further ones are shed, and counted. A thread that does its work never has as many."""


class Alignments:
    """Admits alignments on the loop and counts those that the store's thread has done; each count has one writer."""

    __slots__ = ("_asked", "_done", "shed")

    def __init__(self) -> None:
        self._asked = 0
        self._done = 0
        self.shed = 0

    def admit(self, align: Callable[[], None]) -> Callable[[], None] | None:
        """What to run on the thread, or None where too many wait."""
        if self._asked - self._done >= MOST_ALIGNMENTS:
            self.shed += 1
            return None
        self._asked += 1

        def run() -> None:
            try:
                align()
            finally:
                self._done += 1

        return run
