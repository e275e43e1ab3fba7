"""Which peers are asked: not those that failed a short time ago, and none while too much memory is not quiet."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

import structlog

from kvcr_actors_kvcr.hints import HintRefusal

log = structlog.get_logger()

COOLING_S = 30.0


class Peers:
    """Endpoints that did not answer in time, with the end of their pause.

    Changed on the owner thread; `refuses` may be asked on any.
    """

    def __init__(self, operation_s: float, is_full: Callable[[], bool]) -> None:
        self._operation_s = operation_s
        self._is_full = is_full
        self._paused: dict[str, float] = {}

    def refuses(self, endpoint: str) -> HintRefusal | None:
        """Why a peer is not asked now; None if it is."""
        if self._is_full():
            return HintRefusal.QUARANTINE_FULL
        if self._paused.get(endpoint, 0.0) > monotonic():
            return HintRefusal.COOLING
        return None

    def note_missing(self, endpoint: str, missing: int, asked: int, seconds: float) -> str:
        """Say what a peer was asked for and did not give.

        One that took the runner's whole deadline is paused; a refusal that came in time says nothing about it.
        """
        if seconds < self._operation_s:
            return f"{endpoint} refused {missing} of {asked} blocks"
        self.pause(endpoint)
        return f"{endpoint} did not answer in time; it is not asked for {COOLING_S:g} s"

    def pause(self, endpoint: str) -> None:
        """Ask a peer no more for `COOLING_S`."""
        now = monotonic()
        self._paused = {other: until for other, until in self._paused.items() if until > now}
        self._paused[endpoint] = now + COOLING_S
        log.warning("kvcr.peer_paused", peer=endpoint, seconds=COOLING_S)
