"""Pages that found the queue of the store full: they are offered again when there is room, and told of if that fails.

They are not kept from eviction, since a store that is too slow must not hold up backups. So what is owed is bounded by
the host's pages: a page that leaves the host is owed no more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import structlog

from kvcr_actors.core.host_tier import HostPage
from kvcr_actors.core.stats import ControllerStats
from kvcr_actors.messages import Completion, DepositFailed
from kvcr_actors.runtime.outbox import Outbox
from kvcr_actors.types import PageKey, SkipReason

log = structlog.get_logger()


class OwedDeposits:
    """The pages that are to be offered again, in order, and the word for those that stay out of the store."""

    def __init__(self, stats: ControllerStats, outbox: Outbox[Completion]) -> None:
        self._stats = stats
        self._outbox = outbox
        self._owed: dict[PageKey, None] = {}
        self._failures: Counter[SkipReason] = Counter()

    def __len__(self) -> int:
        return len(self._owed)

    def __contains__(self, key: PageKey) -> bool:
        return key in self._owed

    def owe(self, pages: Sequence[HostPage]) -> None:
        """Offer pages again, later."""
        self._stats.deposit.shed += len(pages)
        self._owed.update((page.key, None) for page in pages if page.ready and not page.is_forgotten)

    def take(self) -> list[PageKey]:
        """All that is owed, in order; from now on it is the caller's."""
        owed, self._owed = list(self._owed), {}
        return owed

    def put_back(self, keys: Iterable[PageKey]) -> None:
        """Owe again what was taken and had no room."""
        self._owed = {**dict.fromkeys(keys), **self._owed}

    def lose(self, keys: Iterable[PageKey]) -> None:
        """Pages have left the host: tell of those that the store never got."""
        if not self._owed:
            return
        lost = [key for key in keys if key in self._owed]
        for key in lost:
            del self._owed[key]
        self.fail(lost, SkipReason.QUEUE_FULL)

    def settle(self, key: PageKey) -> None:
        """The store has a page."""
        self._owed.pop(key, None)

    def end(self, reason: SkipReason) -> None:
        """Nothing is offered any more: tell of all that is owed."""
        self.fail(self.take(), reason)

    def fail(self, keys: Sequence[PageKey], reason: SkipReason) -> None:
        """Count pages that stay out of the store, and tell the engine."""
        if not keys:
            return
        self._stats.deposit.skipped[reason] += len(keys)
        self._warn(len(keys), reason)
        if reason is not SkipReason.RESET:  # its end tells of that: such pages stay nowhere
            self._outbox.deliver((DepositFailed(tuple(keys), reason),))

    def _warn(self, pages: int, reason: SkipReason) -> None:
        """Log the first failure for a reason, the second, the fourth, and so on: a full store refuses every batch."""
        self._failures[reason] += 1
        times = self._failures[reason]
        if times & (times - 1) == 0:
            so_far = self._stats.deposit.skipped[reason]
            log.warning("deposit.failed", pages=pages, reason=reason.value, times=times, pages_so_far=so_far)
