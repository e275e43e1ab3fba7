"""How pages that the host lacks are read from the store: room for all of them, then batch after batch, each in time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import anyio
import attrs
import structlog

from kvcr_actors.actors.read_share import ReadShare
from kvcr_actors.actors.state import LoopState
from kvcr_actors.actors.store_guard import GuardedStore
from kvcr_actors.core.failed_keys import FailedKeys
from kvcr_actors.core.hit_policy import boundaries, longest
from kvcr_actors.core.host_tier import HostPage, PageState
from kvcr_actors.core.ledger import Claim
from kvcr_actors.core.prefetch_state import HeldPrefix
from kvcr_actors.errors import NoHostMemoryError
from kvcr_actors.ports import BatchOutcome, PageBatch, PageOutcome
from kvcr_actors.runtime.endings import run_endings
from kvcr_actors.transfers import Operation
from kvcr_actors.types import MissReason, StopPolicy

log = structlog.get_logger()

_TRIES = 2
"""A read that fails is tried once more, never in a loop: the request recomputes."""


@attrs.define(eq=False)
class Filling:
    """Pages of one prefix on their way from the store. It waits for nothing itself.

    Whoever follows it calls `advance` when `wake` was called and when `due` (loop time) has come, until that says that
    it is over, and `leave` on every way out.
    """

    _state: LoopState
    _failed: FailedKeys
    _share: ReadShare
    _prefix: HeldPrefix
    _pages: Sequence[HostPage]
    _store: GuardedStore
    _stop_at: float
    """When the time is up that the request gives all of its reads."""
    _wake: Callable[[], None]
    due: float = math.inf
    _late_at: float = math.inf
    _next: int = 0
    _tries: int = 0
    _batch: Sequence[HostPage] = ()
    _operation: Operation[BatchOutcome] | None = None
    _is_taken: bool = False
    """Whether the outcome of the last read was looked at; nothing is taken from it again."""
    _is_given_up: bool = False
    """Whether the read failed, and its memory is not quiet: it will give nothing to anybody."""
    _claim: Claim = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        give_back = partial(run_endings, self._give_back)
        self._claim = self._state.ledger.take("read", self._prefix.request.request_id, give_back)

    def begin(self, now: float) -> None:
        """Read the first batch."""
        self._state.publish_changes()
        self._read_next(now)

    def advance(self, now: float) -> bool:
        """Use what has landed and read on, or give up what is late; returns whether it is over."""
        operation = self._operation
        outcome = None if operation is None else operation.settled_outcome()
        if operation is None or outcome is None or not (operation.is_quiet or _is_vain(outcome)):
            return self._gives_up(now)
        self._is_taken = True
        self._is_given_up = not operation.is_quiet
        left = self._batch[self._take(outcome) :]
        if not left:
            return not self._read_next(now)
        is_faulty = outcome.pages[-len(left)] is PageOutcome.FAILED
        if is_faulty and operation.is_quiet and self._tries < _TRIES:
            self._read(left, now)
            return False
        self._fail(MissReason.READ_FAILED, left[0] if is_faulty else None, now, outcome.error)
        return True

    def leave(self) -> None:
        """Follow the read no longer. What has landed by now is used; batches before the last are quiet."""
        state, operation = self._state, self._operation
        if operation is None:
            state.release_when_quiet(None, self._claim, 0)
            return
        if not operation.is_quiet:
            # One that was merely cancelled has the rest of its time to come in for others.
            state.leave_fill(self._pages, -math.inf if self._is_given_up else self._late_at)
        elif not self._is_taken and (outcome := operation.settled_outcome()) is not None:
            self._is_taken = True
            self._take(outcome)
        state.release_when_quiet(operation, self._claim, len(self._batch) * state.device.layout.page_bytes)

    def _read_next(self, now: float) -> bool:
        """Read the next batch; whether there is one."""
        first, size = self._next, self._store.traits.batch_pages
        if first >= len(self._pages):
            return False
        self._next = first + size
        self._tries = 0
        self._read(self._pages[first : first + size], now)
        return True

    def _read(self, batch: Sequence[HostPage], now: float) -> None:
        store, traits = self._store, self._store.traits
        # Before the read, which succeeds only if it is so: then the store's removals alone correct it.
        stored = not store.is_retired
        for page in batch:
            page.stored = stored
        self._tries += 1
        self._late_at = now + traits.read_budget_s + traits.read_budget_page_s * len(batch)
        self.due = min(self._late_at, self._stop_at)
        operation = store.read(_page_batch(batch), self._prefix.request.request_id)
        self._batch, self._operation, self._is_taken = batch, operation, False
        operation.when_settled(self._note_outcome)

    def _note_outcome(self, outcome: BatchOutcome) -> None:
        if _is_vain(outcome) or self._operation is None:
            self._wake()
        else:
            # Pages that native code still touches must not be handed on.
            self._operation.when_quiet(self._wake)

    def _gives_up(self, now: float) -> bool:
        """Whether it is time to wait no longer: for this read, or for any of the request."""
        if now < self.due:
            return False
        if self._late_at <= self._stop_at:
            self._fail(MissReason.DEADLINE, self._batch[0], now)
        else:
            self._prefix.miss = MissReason.DEADLINE
        return True

    def _take(self, outcome: BatchOutcome) -> int:
        """Commit the leading good pages and add them to the prefix; returns how many."""
        good = _leading_good(outcome)
        self._prefix.extend(self._state.commit(self._batch[:good]))
        self._state.publish_changes()
        return good

    def _fail(self, reason: MissReason, faulty: HostPage | None, now: float, error: str | None = None) -> None:
        request_id = self._prefix.request.request_id
        log.warning("prefetch.read_failed", request_id=request_id, reason=reason.value, error=error)
        if faulty is not None:
            self._failed.note(faulty.key, now)
        self._prefix.fail(reason)

    def _give_back(self) -> None:
        """All reads are quiet: what came too late for the request is kept for others, the rest goes back."""
        state, pages = self._state, self._pages
        endings: list[Callable[[], object]] = []
        if any(page.is_unfilled for page in pages):
            endings += (
                partial(state.end_fill, pages),
                self._keep_landed,
                partial(state.abandon_unfilled, pages),
                state.publish_changes,
            )
        run_endings(*endings, partial(self._prefix.when_ended, partial(self._share.give_back, len(pages))))

    def _keep_landed(self) -> None:
        """Commit what the last read brought for nobody in particular."""
        outcome = None if self._operation is None else self._operation.settled_outcome()
        if outcome is not None:
            good, filling = self._batch[: _leading_good(outcome)], PageState.FILLING
            self._state.commit([page for page in good if page.state is filling])


class PageFiller:
    """Adds pages that the store has to the end of prefixes."""

    def __init__(self, state: LoopState, failed: FailedKeys, share: ReadShare) -> None:
        self._state = state
        self._failed = failed
        self._share = share

    def begin(
        self, prefix: HeldPrefix, masks: Sequence[int], store: GuardedStore, wake: Callable[[], None], now: float
    ) -> Filling | None:
        """Begin to read the pages that follow, of each the pools given; None if nothing is to be read.

        `prefix.miss` says why less is read than was asked for. `wake` must not raise.
        """
        state, request, start = self._state, prefix.request, len(prefix.pages)
        masks = self._admitted(prefix, masks) if prefix.is_current else ()
        if not masks:
            return None
        keys = request.keys[start : start + len(masks)]
        try:
            pages = state.host.reserve(prefix.pages[-1] if start else None, keys, masks)
        except NoHostMemoryError:
            prefix.miss = MissReason.NO_HOST_MEMORY
            return None
        stop_at = math.inf
        if (request.stop or state.config.prefetch_stop_policy) is StopPolicy.TIMEOUT:
            traits = store.traits
            stop_at = now + traits.read_budget_s + traits.read_budget_page_s * len(pages)
        # Counted until the prefix ends, and pages under a read that is not quiet as well: prefetches took that memory.
        self._share.take(len(pages))
        filling = Filling(state, self._failed, self._share, prefix, pages, store, stop_at, wake)
        try:
            filling.begin(now)
        except BaseException:
            run_endings(filling.leave)
            raise
        return filling

    async def fill(self, prefix: HeldPrefix, masks: Sequence[int], store: GuardedStore) -> None:
        """Read the pages that follow, and wait for them. The caller may cancel: what has landed by then is held."""
        signal = _Signal()
        filling = self.begin(prefix, masks, store, signal.wake, anyio.current_time())
        if filling is None:
            return
        try:
            while not filling.advance(anyio.current_time()):
                await signal.wait(filling.due)
        finally:
            run_endings(filling.leave)

    def _admitted(self, prefix: HeldPrefix, masks: Sequence[int]) -> Sequence[int]:
        """What of the missing pages may be read: enough to pay, and within the share of prefetches."""
        threshold = self._state.config.prefetch_threshold_pages
        held_beyond = len(prefix.pages) - prefix.request.device_pages
        beyond_device = held_beyond + len(masks)
        if not masks:
            return ()
        if beyond_device < threshold:
            if beyond_device > 0:
                prefix.miss = MissReason.BELOW_THRESHOLD
            return ()
        refusal = self._share.refusal(len(masks))
        if refusal is None:
            return masks
        prefix.miss = refusal
        masks = self._cut(prefix, masks, self._share.room())
        return masks if held_beyond + len(masks) >= max(1, threshold) else ()

    def _cut(self, prefix: HeldPrefix, masks: Sequence[int], room: int) -> Sequence[int]:
        """The longest part of what is missing that a restore could end in and that there is room for."""
        held = [page.mask for page in prefix.pages]
        length = longest(boundaries([*held, *masks[:room]], self._state.device.layout))
        return masks[: max(0, length - len(held))]


class _Signal:
    """Wakes the one task that waits for it."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = anyio.Event()

    def wake(self) -> None:
        self._event.set()

    async def wait(self, until: float) -> None:
        with anyio.CancelScope(deadline=until):
            await self._event.wait()
        if self._event.is_set():
            self._event = anyio.Event()


def _is_vain(outcome: BatchOutcome) -> bool:
    """Whether a read brought nothing: then nobody waits until its memory is quiet."""
    return PageOutcome.OK not in outcome.pages


def _leading_good(outcome: BatchOutcome) -> int:
    """How many leading pages of a read are in place."""
    pages, ok = outcome.pages, PageOutcome.OK
    return next((index for index, page in enumerate(pages) if page is not ok), len(pages))


def _page_batch(pages: Sequence[HostPage]) -> PageBatch:
    slots = tuple(zip(*[page.slots for page in pages], strict=True))
    return PageBatch(tuple([page.key for page in pages]), slots)
