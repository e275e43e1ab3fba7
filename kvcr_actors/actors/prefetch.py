"""Prefetch, store to host: find a request's prefix, read what the host lacks, hold it until the engine takes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import anyio
import anyio.abc
import attrs
import structlog

from kvcr_actors.actors.accord import Accord
from kvcr_actors.actors.prefix_end import answer_prefix, count_started, end_prefix, end_ready
from kvcr_actors.actors.reading import PrefixReader
from kvcr_actors.actors.state import LoopState
from kvcr_actors.core.hit_policy import boundaries, longest
from kvcr_actors.core.host_tier import HostPage
from kvcr_actors.core.prefetch_state import HeldPrefix, Phase
from kvcr_actors.core.rounds import first_agreement
from kvcr_actors.messages import (
    CancelPrefetches,
    Completion,
    PrefetchOrder,
    PrefetchReady,
    StartPrefetches,
    StopPrefetches,
)
from kvcr_actors.runtime.endings import run_endings
from kvcr_actors.types import MissReason, PrefetchRequest, RequestId, StopPolicy

log = structlog.get_logger()


@attrs.define(eq=False)
class _Behind:
    """A request whose id belongs to a search that is stopping: it has its turn after that."""

    request: PrefetchRequest
    ended: MissReason | None = None
    asked_to_stop: bool = False


@attrs.define(eq=False)
class _Search:
    """A prefix that a task is looking for, and how to stop the task."""

    prefix: HeldPrefix
    accord: Accord
    waits: bool
    """Whether it ignores the engine's wish to stop."""
    scope: anyio.CancelScope = attrs.field(factory=anyio.CancelScope)
    reading: anyio.CancelScope = attrs.field(factory=anyio.CancelScope)
    """The part that ends early when the engine asks for what is there by now, or at the deadline."""
    duplicates: int = 0
    asked_to_stop: bool = False
    stopped: MissReason | None = None
    behind: list[_Behind] = attrs.field(factory=list[_Behind])
    """Later requests of the same id, all but the last of them ended; each is answered in its turn."""

    @property
    def last_behind(self) -> _Behind | None:
        """The later request that is to be searched after this one."""
        return self.behind[-1] if self.behind and self.behind[-1].ended is None else None


class PrefetchActor:
    """Each request ends in exactly one of: ready with an account, restored, cancelled.

    An id may be used again once its request was cancelled; before that, the later request ends at once, as cancelled.
    """

    name = "prefetch"

    def __init__(
        self, state: LoopState, reader: PrefixReader, tasks: anyio.abc.TaskGroup, poke: Callable[[], None]
    ) -> None:
        self._state = state
        self._reader = reader
        self._tasks = tasks
        self._poke = poke
        self._searches: dict[RequestId, _Search] = {}
        self._begun: set[int] = set()
        """Requests of the batch in hand (by identity) that somebody answers, or has answered."""
        self._expiry_runs = False
        self._idle = anyio.Event()
        self._watch_expiry()

    @property
    def busy(self) -> int:
        """Requests whose prefix is being searched or read."""
        return len(self._searches)

    async def handle(self, batch: Sequence[PrefetchOrder]) -> None:
        """Answer at once what host memory alone decides; search the store in a task a request."""
        answers: list[Completion] = []
        self._begun.clear()
        try:
            for order in batch:
                match order:
                    case StartPrefetches():
                        for request in order.requests:
                            self._start(request, answers)
                            self._begun.add(id(request))
                    case CancelPrefetches():
                        for request_id in order.request_ids:
                            self._cancel(request_id, answers)
                    case StopPrefetches():
                        for request_id in order.request_ids:
                            self._stop(request_id)
        finally:
            self._state.outbox.deliver(answers)
        self._begun.clear()

    def abandon(self, batch: Sequence[PrefetchOrder], error: BaseException) -> None:
        """End the requests of the batch that nobody follows."""
        log.error("prefetch.abandoned", error=repr(error))
        answers: list[Completion] = []
        endings: list[Callable[[], object]] = []
        for order in batch:
            if isinstance(order, StartPrefetches):
                endings += [partial(self._abandon, request, answers) for request in order.requests]
            elif isinstance(order, CancelPrefetches):
                endings += [partial(self._cancel, request_id, answers) for request_id in order.request_ids]
        run_endings(*endings, partial(self._state.outbox.deliver, answers))

    def _abandon(self, request: PrefetchRequest, answers: list[Completion]) -> None:
        if id(request) not in self._begun and request.request_id not in self._state.prefixes:
            self._state.join_without(first_agreement(request.request_id))
            end_prefix(self._state, self._new_prefix(request), MissReason.STOPPED, answers)

    async def drain(self) -> None:
        """Cancel every search, release every prefix that stands ready, and wait for the tasks to settle."""
        answers: list[Completion] = []
        for request_id in self._searches:
            self._cancel(request_id, answers, MissReason.STOPPED)
        self._state.outbox.deliver(answers)
        end_ready(self._state, MissReason.STOPPED)
        while self._searches:
            self._idle = anyio.Event()
            await self._idle.wait()

    def describe(self) -> dict[str, Any]:
        """What is searched and what stands ready, for people."""
        return {
            "searching": [str(request_id) for request_id in self._searches],
            "ready": {str(request_id): len(prefix.pages) for request_id, prefix in self._state.prefixes.items()},
        }

    def _new_prefix(self, request: PrefetchRequest) -> HeldPrefix:
        state = self._state
        return HeldPrefix(request, state.host, state.ledger, store_on=state.store is not None)

    def _start(self, request: PrefetchRequest, answers: list[Completion], *, asked_to_stop: bool = False) -> None:
        state = self._state
        if self._is_in_use(request, answers):
            return
        prefix = self._new_prefix(request)
        if not state.host.capacity:
            state.join_without(first_agreement(request.request_id))
            prefix.miss = MissReason.TIER_OFF
            self._conclude_at_once(prefix, answers)
            return
        found = state.host.match(request.keys)
        state.host.touch(found)
        if state.store is not None and state.config.refresh_store:
            state.store.align(request.keys)
        prefix.host_pages = len(found)
        if not state.is_shared and (state.store is None or self._is_all(found, request)):
            prefix.extend(found)
            self._conclude_at_once(prefix, answers)
            return
        waits = (request.stop or state.config.prefetch_stop_policy) is StopPolicy.WAIT_COMPLETE
        search = _Search(prefix, Accord(state.ranks, state.services, request.request_id), waits)
        self._tasks.start_soon(self._search, search, name=f"prefetch {request.request_id}")
        # From here on the task gives back what is held.
        self._searches[request.request_id] = search
        prefix.extend(found)
        if asked_to_stop:
            self._stop(request.request_id)

    def _is_all(self, found: Sequence[HostPage], request: PrefetchRequest) -> bool:
        """Whether the store can add nothing: every page is there, and whole."""
        layout = self._state.device.layout
        masks = [page.mask for page in found]
        return len(found) == len(request.keys) and longest(boundaries(masks, layout)) == len(found)

    def _is_in_use(self, request: PrefetchRequest, answers: list[Completion]) -> bool:
        """Whether an earlier request has the same id: this one waits if that one is stopping, else it ends here."""
        request_id = request.request_id
        search = self._searches.get(request_id)
        if search is None and request_id not in self._state.prefixes:
            return False
        if search is not None and search.stopped is not None and search.last_behind is None:
            search.behind.append(_Behind(request))
            return True
        log.error("prefetch.duplicate", request_id=request_id)
        if search is None:
            self._state.join_without(first_agreement(request_id))
        else:
            # Names are paired in order, and the search has perhaps not made its first agreement yet.
            search.duplicates += 1
        prefix = self._new_prefix(request)
        prefix.miss = MissReason.CANCELLED
        self._end_without(prefix, answers)
        return True

    def _end_without(self, prefix: HeldPrefix, answers: list[Completion]) -> None:
        """Nothing beyond the device is worth a restore."""
        request = prefix.request
        ready = partial(PrefetchReady, request.request_id, request.device_pages)
        answer_prefix(self._state, prefix, MissReason.BELOW_THRESHOLD, ready, answers)

    def _cancel(
        self, request_id: RequestId, answers: list[Completion], reason: MissReason = MissReason.CANCELLED
    ) -> None:
        search = self._searches.get(request_id)
        if search is not None:
            if search.last_behind is not None:
                search.last_behind.ended = reason
            search.stopped = search.stopped or reason
            search.scope.cancel()
            return
        prefix = self._state.prefixes.get(request_id)
        if prefix is not None:
            end_prefix(self._state, prefix, reason, answers)

    def _stop(self, request_id: RequestId) -> None:
        search = self._searches.get(request_id)
        if search is None:
            return
        if search.last_behind is not None:
            search.last_behind.asked_to_stop = True
        elif not search.waits:
            search.asked_to_stop = True
            search.reading.cancel()

    async def _search(self, search: _Search) -> None:
        """Read what can be read by the deadline; partial results count. A cancel ends in `PrefetchCancelled`."""
        prefix, answers = search.prefix, list[Completion]()
        finished = goes_on = False
        try:
            with search.scope:
                search.reading.deadline = anyio.current_time() + self._state.config.prefetch_deadline_s
                with search.reading:
                    await self._reader.read(prefix, search.accord)
                if search.reading.cancelled_caught and not search.asked_to_stop:
                    prefix.fail(MissReason.DEADLINE)
                if search.accord.is_shared:
                    await self._settle_on_one_length(search)
                finished = search.stopped is None
            goes_on = True
        finally:
            # Reached also when the actor stops or fails: the claim goes back and the engine hears of it.
            stopped = search.stopped or MissReason.STOPPED
            run_endings(
                search.accord.leave,
                partial(self._forget, search),
                partial(self._conclude, prefix, answers)
                if finished
                else partial(end_prefix, self._state, prefix, stopped, answers),
                *(partial(self._follow_on, later, answers, goes_on=goes_on) for later in search.behind),
                partial(self._state.outbox.deliver, answers),
                self._note_idle,
                self._poke,
            )

    def _forget(self, search: _Search) -> None:
        """Join for the duplicates, and let the request's id be used again."""
        request_id = search.prefix.request.request_id
        while search.duplicates:
            search.duplicates -= 1
            self._state.join_without(first_agreement(request_id))
        self._searches.pop(request_id, None)

    def _note_idle(self) -> None:
        if not self._searches:
            self._idle.set()

    def _follow_on(self, later: _Behind, answers: list[Completion], *, goes_on: bool) -> None:
        """Answer a request behind a search, or start it; an actor that ends starts nothing."""
        if later.ended is None and goes_on:
            self._start(later.request, answers, asked_to_stop=later.asked_to_stop)
        else:
            self._state.join_without(first_agreement(later.request.request_id))
            end_prefix(self._state, self._new_prefix(later.request), later.ended or MissReason.STOPPED, answers)

    async def _settle_on_one_length(self, search: _Search) -> None:
        """Hold exactly the prefix that every rank holds; nothing if a rank has left."""
        prefix, accord = search.prefix, search.accord
        # Cut short while ranks agreed on what to read: that agreement is withdrawn, and nobody makes the next one.
        accord.leave_if_open()
        if not (accord.is_over or accord.is_at_last):
            # Cut short between two agreements: the next one means something else to the other ranks than the last.
            if accord.has_begun:
                accord.leave()
            else:
                await self._reader.join(prefix, accord)
        layout = self._state.device.layout
        agreed = 0
        if not accord.is_over:
            agreed = await accord.agree(prefix.boundaries(layout), last=True)
        prefix.truncate(layout)
        prefix.limit(longest(agreed), MissReason.RANKS_DISAGREED)

    def _conclude_at_once(self, prefix: HeldPrefix, answers: list[Completion]) -> None:
        self._begun.add(id(prefix.request))
        run_endings(partial(self._conclude, prefix, answers))

    def _conclude(self, prefix: HeldPrefix, answers: list[Completion]) -> None:
        """Hold the prefix for the engine if it is worth a restore, else end it here; what breaks off is ended too."""
        try:
            self._hold_or_end(prefix, answers)
        except Exception:
            end_prefix(self._state, prefix, MissReason.STOPPED, answers)
            raise

    def _hold_or_end(self, prefix: HeldPrefix, answers: list[Completion]) -> None:
        state = self._state
        prefix.truncate(state.device.layout)
        request_id = prefix.request.request_id
        if prefix.beyond_device < state.config.prefetch_threshold_pages:
            if prefix.failed:
                count_started(state, prefix)
                state.stats.prefetch.failed += 1
            self._end_without(prefix, answers)
            return
        count_started(state, prefix)
        prefix.advance(Phase.READY)
        prefix.expires_at = anyio.current_time() + state.config.claim_lifetime_s
        state.prefixes[request_id] = prefix
        answers.append(PrefetchReady(request_id, len(prefix.pages)))
        self._watch_expiry()

    def _watch_expiry(self) -> None:
        if self._state.prefixes and not self._expiry_runs:
            self._tasks.start_soon(self._expire, name="prefetch expiry")
            self._expiry_runs = True

    async def _expire(self) -> None:
        """End prefixes that the engine neither took nor cancelled in their life time."""
        try:
            while self._state.prefixes:
                await anyio.sleep_until(min(prefix.expires_at for prefix in self._state.prefixes.values()))
                now = anyio.current_time()
                late = [key for key, prefix in self._state.prefixes.items() if prefix.expires_at <= now]
                answers: list[Completion] = []
                for request_id in late:
                    log.warning("prefetch.expired", request_id=request_id)
                    self._cancel(request_id, answers, MissReason.NOT_RESTORED)
                self._state.outbox.deliver(answers)
        finally:
            self._expiry_runs = False
