"""A search for one request's prefix as the prefetch actor keeps it: what it holds, how to stop it, who waits for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import attrs

from kvcr_actors.actors.accord import Accord
from kvcr_actors.actors.filling import Filling
from kvcr_actors.actors.surveying import Question
from kvcr_actors.core.prefetch_state import HeldPrefix
from kvcr_actors.types import MissReason, PrefetchRequest


@attrs.define(eq=False)
class Behind:
    """A request whose id belongs to a search that is stopping: it has its turn after that."""

    request: PrefetchRequest
    ended: MissReason | None = None
    asked_to_stop: bool = False


def _nobody() -> None:
    """Nobody carries the search on yet."""


@attrs.define(eq=False)
class Search:
    """A prefix that is being looked for. Whoever carries it on sets `interrupt`, and looks at the wishes noted here."""

    prefix: HeldPrefix
    accord: Accord
    waits: bool
    """Whether it ignores the engine's wish to stop."""
    deadline: float
    question: Question | None
    """What the store was asked when the request came in."""
    interrupt: Callable[[], None] = _nobody
    """Have it looked at, whether it is to end or can go on. It must not raise."""
    filling: Filling | None = None
    """The pages that are being read, where no task of its own reads them."""
    due: float = math.inf
    """When it is to be looked at, should nothing happen before."""
    is_settling: bool = False
    """Whether the ranks settle on what was read, and a wish to stop comes too late."""
    duplicates: int = 0
    asked_to_stop: bool = False
    stopped: MissReason | None = None
    behind: list[Behind] = attrs.field(factory=list)
    """Later requests of the same id, all but the last of them ended; each is answered in its turn."""

    @property
    def last_behind(self) -> Behind | None:
        """The later request that is to be searched after this one."""
        return self.behind[-1] if self.behind and self.behind[-1].ended is None else None

    @property
    def is_to_end(self) -> bool:
        """Whether it was cancelled, or asked to do with what has arrived."""
        return self.asked_to_stop or self.stopped is not None

    def cancel(self, reason: MissReason) -> None:
        """End the search, and the request behind it."""
        if self.last_behind is not None:
            self.last_behind.ended = reason
        self.stopped = self.stopped or reason
        self.interrupt()

    def stop(self) -> None:
        """Do with what has arrived, unless the request is to wait for everything."""
        if self.last_behind is not None:
            self.last_behind.asked_to_stop = True
        elif not self.waits:
            self.asked_to_stop = True
            if not self.is_settling:
                self.interrupt()


class EndSearch(Protocol):
    """Forget a search and answer it; `goes_on` says whether its actor does."""

    def __call__(self, search: Search, *, goes_on: bool) -> None:
        """Once for each search, whatever raises on the way."""
        ...
