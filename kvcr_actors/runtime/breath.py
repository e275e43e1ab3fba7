"""Short pauses in long loops, so that a scheduler's thread that comes back from its GPU gets the GIL at once."""

from __future__ import annotations

import time

PAGES_A_CALL = 32
"""Pages that are reserved or committed by one call between two pauses: enough to share its cost, and still short."""

_CONTENDED_S = 0.001
"""A pause that took longer had to wait for the GIL: its holder is at work, not at its GPU."""


class Breath:
    """Called once an item of a long loop: after some work it sleeps for `pause_s`, off the GIL.

    Without it a thread that wants the GIL waits until the loop blocks, or 5 ms. Giving up the GIL is not enough: a
    thread that waits for it needs some tens of microseconds to wake. `work_s` bounds the work between two pauses while
    the GIL is free at once, so that a thread that comes back never waits longer. While it is not free each pause costs
    this loop 5 ms, so the work between pauses is `contended_s`, twice as much after every `PATIENCE` such pauses, up to
    `most_s`: a scheduler that never rests slows its backups down, but does not starve them. For a loop in a thread of
    its own only.
    """

    PATIENCE = 8

    __slots__ = ("_contended_s", "_most_s", "_next", "_pause_s", "_streak", "_work_s")

    def __init__(
        self, work_s: float = 100e-6, contended_s: float = 500e-6, most_s: float = 2e-3, pause_s: float = 50e-6
    ) -> None:
        self._work_s = work_s
        self._contended_s = contended_s
        self._most_s = most_s
        self._pause_s = pause_s
        self._streak = 0
        self._next = 0.0

    def __call__(self) -> None:
        """Pause if it is time to."""
        began = time.perf_counter()
        if began < self._next:
            return
        time.sleep(self._pause_s)
        ended = time.perf_counter()
        self._next = ended + self.budget_after(ended - began)

    def budget_after(self, pause_s: float) -> float:
        """Seconds of work until the next pause, given how long this one took; remembers contended pauses in a row."""
        if pause_s <= _CONTENDED_S:
            self._streak = 0
            return self._work_s
        budget_s = min(self._most_s, self._contended_s * 2 ** (self._streak // self.PATIENCE))
        self._streak += 1
        return budget_s


def no_breath() -> None:
    """For a loop that belongs to its caller: never pause."""
