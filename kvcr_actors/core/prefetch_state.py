"""A request's prefix on its way from the store to the device: which host pages it holds, and its account."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import TypeVar

import attrs

from kvcr_actors.core.accounting import PrefixOutcome, RequestAccount, settle
from kvcr_actors.core.hit_policy import (
    EVERY_BOUNDARY,
    boundaries,
    component_masks,
    longest,
    needed_masks,
    restore_end,
)
from kvcr_actors.core.host_tier import HostPage, HostTier
from kvcr_actors.core.ledger import Claim, ClaimLedger
from kvcr_actors.types import CacheLayout, MissReason, PrefetchRequest, RestoreOrder

AnswerT = TypeVar("AnswerT")


class Phase(enum.Enum):
    """Where a prefix stands; each phase leads to the ones listed in `_NEXT` only."""

    SEARCHING = "searching"
    READY = "ready"
    RESTORING = "restoring"
    ENDED = "ended"


_NEXT = {
    Phase.SEARCHING: (Phase.READY, Phase.ENDED),
    Phase.READY: (Phase.RESTORING, Phase.ENDED),
    Phase.RESTORING: (Phase.ENDED,),
    Phase.ENDED: (),
}


@attrs.define(eq=False)
class HeldPrefix:
    """The leading pages of a request that stand in host memory, protected by one claim on the deepest of them.

    Only leaves are evicted, so one pin protects the whole path. The claim is taken with the first page and released
    by `end`, once, whatever the phase.
    """

    request: PrefetchRequest
    host: HostTier
    ledger: ClaimLedger
    store_on: bool
    phase: Phase = Phase.SEARCHING
    pages: list[HostPage] = attrs.field(factory=list)
    host_pages: int = 0
    """Pages that the host had when the request came."""
    miss: MissReason = MissReason.ABSENT
    agreed: int = EVERY_BOUNDARY
    """The boundaries that every rank can restore; a restore ends at one of them, so that it ends alike everywhere."""
    expires_at: float = 0.0
    failed: bool = False
    """Whether a store operation failed on the way."""
    counted: bool = False
    """Whether it counts as a started prefetch: it held, or tried to read, pages that the device lacks."""
    answered: bool = False
    """Whether the engine was told how it ended."""
    generation: int = attrs.field(init=False)
    """That of the host's pages when the request came: a prefix never has pages of two."""
    _claim: Claim | None = None
    _pinned: HostPage | None = None
    _over: bool = False
    _when_ended: list[Callable[[], None]] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.generation = self.host.generation

    @property
    def is_current(self) -> bool:
        """Whether the host has not forgotten its pages."""
        return self.generation == self.host.generation

    def advance(self, phase: Phase) -> None:
        """Move on; an illegal transition is a bug of the caller and raises RuntimeError."""
        if phase not in _NEXT[self.phase]:
            raise RuntimeError(f"request {self.request.request_id}: {self.phase.value} cannot become {phase.value}")
        self.phase = phase

    def extend(self, pages: Sequence[HostPage]) -> None:
        """Add the next pages (root to tail, ready) and move the claim to the deepest; none once they are forgotten."""
        if not pages or not self.is_current:
            return
        self.pages.extend(pages)
        tail = pages[-1]
        self.host.pin(tail)
        if self._pinned is not None:
            self.host.unpin(self._pinned)
        self._pinned = tail
        if self._claim is None:
            self._claim = self.ledger.take("prefetch", self.request.request_id, self._unpin)

    def fail(self, reason: MissReason) -> None:
        """Note why the store could not give the next page."""
        self.failed = True
        self.miss = reason

    def boundaries(self, layout: CacheLayout) -> int:
        """The lengths of what is held that every pool can restore, as a bit set."""
        return boundaries([page.mask for page in self.pages], layout)

    def is_whole(self, layout: CacheLayout) -> bool:
        """Whether all pages held can be restored as they are."""
        return longest(self.boundaries(layout)) == len(self.pages)

    def truncate(self, layout: CacheLayout) -> None:
        """Keep only the longest part that every pool can restore; what goes was INCOMPLETE."""
        self.limit(longest(self.boundaries(layout)), MissReason.INCOMPLETE)

    def limit(self, count: int, reason: MissReason) -> None:
        """Keep only the first `count` pages; the claim stays on all of them until the end."""
        if count < len(self.pages):
            self.miss = reason
            del self.pages[count:]

    @property
    def beyond_device(self) -> int:
        """Pages held that the device lacks."""
        return max(0, len(self.pages) - self.request.device_pages)

    @property
    def claim(self) -> Claim | None:
        """The claim on the pages; None while there are none."""
        return self._claim

    def when_ended(self, call: Callable[[], None]) -> None:
        """Run `call` once the prefix has ended, at once if it has. It must not raise."""
        if self.phase is Phase.ENDED:
            call()
        else:
            self._when_ended.append(call)

    def answer(self, completion: AnswerT) -> AnswerT:
        """Note that the engine is told by `completion` how the prefix ended, and return it."""
        self.answered = True
        return completion

    @property
    def is_over(self) -> bool:
        """Whether it was ended, and nothing of it is left."""
        return self._over

    def end(self) -> None:
        """Enter the last phase and release the claim, once; an end that broke off half way is taken up again."""
        if self._over or self.phase is not Phase.ENDED:
            self.advance(Phase.ENDED)
        if self._claim is not None and not self._claim.is_released:
            self._claim.release()
        while self._when_ended:
            self._when_ended.pop(0)()
        self._over = True

    def own_pages(self, order: RestoreOrder) -> int:
        """How many pages the device has before a restore, as the order says."""
        return min(order.first, self._device_pages(order))

    def fits(self, order: RestoreOrder) -> bool:
        """Whether an order begins within what the device has, and asks for no more than stands ready."""
        if order.first > self._device_pages(order):
            return False
        return not order.count or order.first + order.count <= len(self.pages)

    def restore_end(self, order: RestoreOrder, layout: CacheLayout) -> int:
        """The end of the longest prefix that the device may have after an order that fits."""
        if not order.count:
            return order.first
        held = [page.mask for page in self.pages]
        return restore_end(held, component_masks(order.pages), order.first, layout, self.agreed)

    def account(self, drop: MissReason) -> RequestAccount:
        """Account for a request of which nothing came to the device, for `drop`."""
        return self._account(self.request.device_pages, self.request.device_pages, drop=drop)

    def account_for(self, order: RestoreOrder, used: int, short: MissReason) -> RequestAccount:
        """Account for a restore after which the device has the pages before `used`; ordered and not used are `short`.

        An order that does not fit is accounted for with all that stood ready.
        """
        ordered = order.first + order.count if self.fits(order) else len(self.pages)
        return self._account(self.own_pages(order), used, ordered=ordered, short=short)

    def _device_pages(self, order: RestoreOrder) -> int:
        told = self.request.device_pages if order.device_pages is None else order.device_pages
        return min(told, len(self.request.keys))

    def _account(
        self,
        device: int,
        used: int,
        *,
        drop: MissReason = MissReason.NOT_RESTORED,
        ordered: int = 0,
        short: MissReason = MissReason.INCOMPLETE,
    ) -> RequestAccount:
        return settle(
            PrefixOutcome(
                total=len(self.request.keys),
                device=device,
                host=min(self.host_pages, len(self.pages)),
                ready=len(self.pages),
                used=used,
                miss=self.miss,
                drop=drop,
                store_on=self.store_on,
                ordered=ordered,
                short=short,
            )
        )

    def _unpin(self) -> None:
        if self._pinned is not None:
            self.host.unpin(self._pinned)
            self._pinned = None


def first_incomplete(masks: Sequence[int], layout: CacheLayout) -> int:
    """The first page that lacks something which a restore of all of them needs; how many there are if none does.

    `masks[i]` is the bit set of the pools that have page `i`.
    """
    if masks.count((1 << len(layout.pools)) - 1) == len(masks):
        return len(masks)
    needed = needed_masks(layout, len(masks))
    lacking = (index for index, (mask, need) in enumerate(zip(masks, needed, strict=True)) if need & ~mask)
    return next(lacking, len(masks))
