"""Outcomes on their way from the owner thread to the loop; those that pile up cost one wake-up."""

from __future__ import annotations

from collections import deque
from typing import Any

from kvcr_actors.ports import Operation, Services


class Settler:
    """Settles operations on the loop, in the order of `settle`, which is called on one other thread."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._outcomes: deque[tuple[Operation[Any], Any, bool]] = deque()
        self._posted = False

    def settle(self, operation: Operation[Any], outcome: Any, *, quiet: bool = True) -> None:
        """Give an outcome; a later one of the same operation only makes it quiet."""
        self._outcomes.append((operation, outcome, quiet))
        if not self._posted:
            self._posted = True
            self._services.post(self._on_loop)

    def _on_loop(self) -> None:
        self._posted = False  # first: an outcome that comes after this posts again
        for _ in range(len(self._outcomes)):
            operation, outcome, quiet = self._outcomes.popleft()
            operation.settle(outcome, quiet=quiet)
