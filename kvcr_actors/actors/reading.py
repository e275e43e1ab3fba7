"""How one request's missing pages are brought from the store to the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import anyio
import attrs
import structlog

from kvcr_actors.actors.accord import Accord
from kvcr_actors.actors.completing import PageCompleter
from kvcr_actors.actors.state import LoopState
from kvcr_actors.actors.store_guard import GuardedStore
from kvcr_actors.actors.surveying import PrefixSurvey
from kvcr_actors.config import ControllerConfig
from kvcr_actors.core.admission import PrefetchAdmission
from kvcr_actors.core.failed_keys import FailedKeys
from kvcr_actors.core.hit_policy import boundaries, longest, needed_masks
from kvcr_actors.core.host_tier import HostPage, PageState
from kvcr_actors.core.ledger import Claim
from kvcr_actors.core.prefetch_state import HeldPrefix
from kvcr_actors.errors import ConfigError, NoHostMemoryError
from kvcr_actors.ports import BatchOutcome, PageBatch, PageOutcome
from kvcr_actors.runtime.endings import run_endings
from kvcr_actors.runtime.operation import Operation
from kvcr_actors.types import MissReason, StopPolicy

log = structlog.get_logger()

_TRIES = 2
"""A read that fails is tried once more, never in a loop: the request recomputes."""


@attrs.define(eq=False)
class _Read:
    """One read of a batch of pages, and the loop time at which it is late."""

    pages: Sequence[HostPage]
    operation: Operation[BatchOutcome]
    late_at: float
    is_given_up: bool = False
    """Whether it failed or came too late, and its memory is not quiet: it will give nothing to anybody."""

    def landed(self) -> BatchOutcome | None:
        """The outcome, if it is known and the memory is quiet."""
        return self.operation.settled_outcome() if self.operation.is_quiet else None


class PrefixReader:
    """Extends a prefix page by page from the store; shared by all requests, so that their memory is bounded."""

    def __init__(self, state: LoopState) -> None:
        self._state = state
        config = state.config
        if 0 < state.host.capacity < config.prefetch_threshold_pages:
            raise ConfigError(
                f"prefetch_threshold_pages {config.prefetch_threshold_pages} is more than the {state.host.capacity} "
                "pages of the host: no prefix would ever be used; lower it, or enlarge the host"
            )
        self._failed = FailedKeys(config.failed_read_pause_s)
        self._loaded = 0
        self._admission: PrefetchAdmission | None = None
        self._survey = PrefixSurvey(state, self._failed)
        self._completer = PageCompleter(state)

    @property
    def _limits(self) -> PrefetchAdmission:
        if self._admission is None:
            self._admission = prefetch_admission(self._state.config, self._state.host.capacity)
        return self._admission

    async def read(self, prefix: HeldPrefix, accord: Accord) -> None:
        """Extend the prefix as far as the store can; says in `prefix.miss` why it ends where it ends.

        The caller sets the deadline and may cancel at any await: what is held then is what was committed.
        """
        store = self._state.store
        if store is None:
            await self.join(prefix, accord)
            return
        with store.serving(prefix.request):
            await self._read(prefix, accord, store)

    async def _read(self, prefix: HeldPrefix, accord: Accord, store: GuardedStore) -> None:
        keys, layout = prefix.request.keys, self._state.device.layout
        masks: list[int] | None = None
        while True:
            self._catch_up(prefix)
            start = len(prefix.pages)
            if masks is None and start == len(keys) and not accord.is_shared and prefix.is_whole(layout):
                return
            filling = self._state.host.get(keys[start]) if start < len(keys) else None
            stuck = filling is not None and self._state.is_stuck(filling)
            if stuck and masks is not None:
                prefix.fail(MissReason.READ_FAILED)
                return
            if filling is not None and not stuck:
                await self._state.filled(filling)
            elif masks is None:
                masks = await self._survey.masks(prefix, accord, store)
            else:
                wanted = masks[start : start + self._state.host.absent_run(keys[start:])]
                with self._state.reading():
                    if await self._complete(prefix, masks, store):
                        await self._fill(prefix, wanted, store)
                if self._state.config.refresh_store:
                    # Batches were read head first; the tail must be the first to leave.
                    store.align(keys)
                return

    async def join(self, prefix: HeldPrefix, accord: Accord) -> None:
        """Make the agreements that come before the last with what is held, for a search that reads no more."""
        await self._survey.join(prefix, accord)

    def _catch_up(self, prefix: HeldPrefix) -> None:
        """Take in pages that became ready meanwhile, for another request."""
        found = self._state.host.match(prefix.request.keys)
        if len(found) > len(prefix.pages):
            prefix.extend(found[len(prefix.pages) :])

    async def _complete(self, prefix: HeldPrefix, masks: Sequence[int], store: GuardedStore) -> bool:
        """Bring what the prefix of these masks needs of pages that the host holds in part; whether all came."""
        needed = needed_masks(self._state.device.layout, len(masks))
        lacking = [
            (page, mask & need & ~page.mask)
            for page, mask, need in zip(prefix.pages, masks, needed, strict=False)
            if mask & need & ~page.mask
        ]
        if not lacking:
            return True
        if (refusal := self._limits.admit(len(lacking), self._loaded)) is not None:
            prefix.miss = refusal
            return False
        self._loaded += len(lacking)
        prefix.when_ended(lambda: self._unload(len(lacking)))
        failed = await self._completer.complete(prefix, lacking, store)
        if failed is not None:
            self._failed.note(failed, anyio.current_time())
        return all(not mask & ~page.mask for page, mask in lacking)

    async def _fill(self, prefix: HeldPrefix, masks: Sequence[int], store: GuardedStore) -> None:
        """Reserve host slots for the pages that the store has, and read them in batches."""
        state = self._state
        start = len(prefix.pages)
        if not masks:
            return
        beyond_device = start + len(masks) - prefix.request.device_pages
        if beyond_device < state.config.prefetch_threshold_pages:
            if beyond_device > 0:
                prefix.miss = MissReason.BELOW_THRESHOLD
            return
        refusal = self._limits.admit(len(masks), self._loaded)
        if refusal is not None:
            prefix.miss = refusal
            masks = self._cut(prefix, masks, self._limits.room(self._loaded))
            if start + len(masks) - prefix.request.device_pages < max(1, state.config.prefetch_threshold_pages):
                return
        keys = prefix.request.keys[start : start + len(masks)]
        try:
            pages = state.host.reserve(prefix.pages[-1] if start else None, keys, masks)
        except NoHostMemoryError:
            prefix.miss = MissReason.NO_HOST_MEMORY
            return
        # Counted until the prefix ends, and pages under a read that is not quiet as well: prefetches took that memory.
        self._loaded += len(pages)
        reads: list[_Read] = []
        give_back = partial(run_endings, partial(self._give_back, prefix, pages, reads))
        claim = state.ledger.take("read", prefix.request.request_id, give_back)
        try:
            state.publish_changes()
            await self._read_all(prefix, pages, reads, store)
        finally:
            run_endings(partial(self._leave, pages, reads, claim))

    def _leave(self, pages: Sequence[HostPage], reads: Sequence[_Read], claim: Claim) -> None:
        """Follow the reads no longer. Those before the last are quiet, else it would not have begun."""
        state = self._state
        last = reads[-1] if reads else None
        if last is None:
            state.release_when_quiet(None, claim, 0)
            return
        if not last.operation.is_quiet:
            # One that was merely cancelled has the rest of its time to come in for others.
            state.leave_fill(pages, -math.inf if last.is_given_up else last.late_at)
        state.release_when_quiet(last.operation, claim, len(last.pages) * state.device.layout.page_bytes)

    def _cut(self, prefix: HeldPrefix, masks: Sequence[int], room: int) -> Sequence[int]:
        """The longest part of what is missing that a restore could end in and that there is room for."""
        held = [page.mask for page in prefix.pages]
        length = longest(boundaries([*held, *masks[:room]], self._state.device.layout))
        return masks[: max(0, length - len(held))]

    async def _read_all(
        self, prefix: HeldPrefix, pages: Sequence[HostPage], reads: list[_Read], store: GuardedStore
    ) -> None:
        traits = store.traits
        stop_after_s = None
        if (prefix.request.stop or self._state.config.prefetch_stop_policy) is StopPolicy.TIMEOUT:
            stop_after_s = traits.read_budget_s + traits.read_budget_page_s * len(pages)
        with anyio.move_on_after(stop_after_s) as budget:
            for first in range(0, len(pages), traits.batch_pages):
                if not await self._read_batch(prefix, pages[first : first + traits.batch_pages], reads, store):
                    return
        if budget.cancelled_caught:
            prefix.miss = MissReason.DEADLINE

    async def _read_batch(
        self, prefix: HeldPrefix, left: Sequence[HostPage], reads: list[_Read], store: GuardedStore
    ) -> bool:
        """Read pages, with one more try for those that fail, and add them to the prefix; whether all came."""
        reason = MissReason.READ_FAILED
        faulty = False
        for _ in range(_TRIES):
            for page in left:
                # Before the read, which succeeds only if it is so: then the store's removals alone correct it.
                page.stored = not store.is_retired
            traits = store.traits
            late_at = anyio.current_time() + traits.read_budget_s + traits.read_budget_page_s * len(left)
            read = _Read(left, store.read(_page_batch(left), prefix.request.request_id), late_at)
            reads.append(read)
            outcome = await self._outcome(prefix, read)
            read.is_given_up = not read.operation.is_quiet
            if outcome is None:
                faulty, reason = True, MissReason.DEADLINE
                break
            left = left[self._take(prefix, read, outcome) :]
            if not left:
                return True
            faulty = outcome.pages[-len(left)] is PageOutcome.FAILED
            if not faulty or not read.operation.is_quiet:
                break
        log.warning("prefetch.read_failed", request_id=prefix.request.request_id, reason=reason.value)
        if faulty:
            self._failed.note(left[0].key, anyio.current_time())
        prefix.fail(reason)
        return False

    async def _outcome(self, prefix: HeldPrefix, read: _Read) -> BatchOutcome | None:
        """Wait for a read within its budget. One that lands between the decision to stop and the stop is used."""
        operation = read.operation
        try:
            with anyio.CancelScope(deadline=read.late_at):
                outcome = await operation.outcome()
                if PageOutcome.OK in outcome.pages:
                    # Pages that native code still touches must not be handed on.
                    await operation.quiet()
                return outcome
        except anyio.get_cancelled_exc_class():
            if (landed := read.landed()) is not None:
                self._take(prefix, read, landed)
            raise
        return read.landed()

    def _give_back(self, prefix: HeldPrefix, pages: Sequence[HostPage], reads: Sequence[_Read]) -> None:
        """All reads are quiet: what came too late for the request is kept for others, the rest goes back."""
        state = self._state
        run_endings(
            partial(state.end_fill, pages),
            partial(self._keep_landed, reads),
            partial(state.abandon_unfilled, pages),
            state.publish_changes,
            partial(prefix.when_ended, lambda: self._unload(len(pages))),
        )

    def _keep_landed(self, reads: Sequence[_Read]) -> None:
        """Commit what the last read brought for nobody in particular."""
        if reads and (landed := reads[-1].landed()) is not None:
            late: list[HostPage] = []
            for page, outcome in zip(reads[-1].pages, landed.pages, strict=True):
                if outcome is not PageOutcome.OK:
                    break
                if page.state is PageState.FILLING:
                    late.append(page)
            self._state.commit(late)

    def _unload(self, pages: int) -> None:
        self._loaded -= pages

    def _take(self, prefix: HeldPrefix, read: _Read, outcome: BatchOutcome) -> int:
        """Commit the leading good pages and add them to the prefix; returns how many."""
        pages = read.pages
        good = 0
        while good < len(pages) and outcome.pages[good] is PageOutcome.OK:
            good += 1
        prefix.extend(self._state.commit(pages[:good]))
        self._state.publish_changes()
        return good


def prefetch_admission(config: ControllerConfig, capacity_pages: int) -> PrefetchAdmission:
    """The bounds on what prefetches may take of the host; ConfigError if no prefetch could ever start."""
    limits = PrefetchAdmission(
        threshold_pages=config.prefetch_threshold_pages,
        capacity_pages=capacity_pages,
        reserve_fraction=config.host_reserve_fraction,
        in_flight_limit=config.prefetch_in_flight_pages,
    )
    # The threshold counts what the host holds of a prefix as well: a read of one page may be the rest of a long one.
    return attrs.evolve(limits, threshold_pages=1)


def _page_batch(pages: Sequence[HostPage]) -> PageBatch:
    slots = tuple(zip(*(page.slots for page in pages), strict=True))
    return PageBatch(tuple(page.key for page in pages), slots)
