"""Prefetch, store to host: find a request's prefix, read what the host lacks, hold it until the engine takes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import anyio
import structlog
from anyio.lowlevel import checkpoint

from kvcr_actors.actors.accord import Accord
from kvcr_actors.actors.following import SearchFollower
from kvcr_actors.actors.prefix_end import end_prefix, end_ready
from kvcr_actors.actors.reading import PrefixReader
from kvcr_actors.actors.ready_prefixes import ReadyPrefixes
from kvcr_actors.actors.search import Behind, Search
from kvcr_actors.actors.search_tasks import SearchTasks
from kvcr_actors.actors.state import LoopState
from kvcr_actors.actors.surveying import Question
from kvcr_actors.core.prefetch_state import HeldPrefix
from kvcr_actors.core.rounds import first_agreement
from kvcr_actors.messages import (
    CancelPrefetches,
    Completion,
    PrefetchOrder,
    StartPrefetches,
    StopPrefetches,
)
from kvcr_actors.runtime.endings import run_endings
from kvcr_actors.runtime.foreign import Tasks
from kvcr_actors.types import MissReason, PrefetchRequest, RequestId, StopPolicy

log = structlog.get_logger()

_REQUESTS_A_TURN = 4
"""Requests that are taken in before the loop turns: the first reads of a burst are handed on before its last begin."""


class PrefetchActor:
    """Each request ends in exactly one of: ready with an account, restored, cancelled.

    An id may be used again once its request was cancelled; before that, the later request ends at once, as cancelled.
    """

    name = "prefetch"

    def __init__(self, state: LoopState, reader: PrefixReader, tasks: Tasks, poke: Callable[[], None]) -> None:
        self._state = state
        self._reader = reader
        self._tasks = tasks
        self._poke = poke
        self._ready = ReadyPrefixes(state, tasks)
        self._task_searches = SearchTasks(state, reader, tasks, self._end)
        self._follower = SearchFollower(state, reader, tasks, self._task_searches, self._end)
        self._searches: dict[RequestId, Search] = {}
        self._begun = 0
        """How many requests of the batch in hand somebody answers, or has answered: its first ones."""
        self._beginning: PrefetchRequest | None = None
        self._idle = anyio.Event()
        state.end_searches = self._end_searches

    @property
    def busy(self) -> int:
        """Requests whose prefix is being searched or read."""
        return len(self._searches)

    async def handle(self, batch: Sequence[PrefetchOrder]) -> None:
        """Answer at once what takes no wait, and begin a search for the rest."""
        answers: list[Completion] = []
        self._begun = 0
        try:
            for order in batch:
                match order:
                    case StartPrefetches():
                        await self._start_all(order, answers)
                    case CancelPrefetches():
                        for request_id in order.request_ids:
                            self._cancel(request_id, answers)
                    case StopPrefetches():
                        for request_id in order.request_ids:
                            self._stop(request_id)
        finally:
            self._state.outbox.deliver(answers)
        self._begun = 0

    async def _start_all(self, order: StartPrefetches, answers: list[Completion]) -> None:
        # A turn for backups of the same step to reserve their pages: these requests may ask for them.
        await checkpoint()
        for index, request in enumerate(order.requests):
            if index and not index % _REQUESTS_A_TURN:
                self._state.outbox.deliver(answers)
                answers.clear()
                await checkpoint()
            self._beginning = request
            self._start(request, answers, ended=MissReason.RESET if self._state.is_stale(order.resets) else None)
            self._note_begun(request)

    def _note_begun(self, request: PrefetchRequest) -> None:
        if request is self._beginning:
            self._beginning = None
            self._begun += 1

    def abandon(self, batch: Sequence[PrefetchOrder], error: BaseException) -> None:
        """End the requests of the batch that nobody follows."""
        log.error("prefetch.abandoned", error=repr(error))
        answers: list[Completion] = []
        endings: list[Callable[[], object]] = []
        begun, self._begun = self._begun, 0
        for order in batch:
            if isinstance(order, StartPrefetches):
                endings += [partial(self._abandon, request, answers) for request in order.requests[begun:]]
                begun = max(0, begun - len(order.requests))
            elif isinstance(order, CancelPrefetches):
                endings += [partial(self._cancel, request_id, answers) for request_id in order.request_ids]
        run_endings(*endings, partial(self._state.outbox.deliver, answers))

    def _abandon(self, request: PrefetchRequest, answers: list[Completion]) -> None:
        self._state.join_without(first_agreement(request.request_id))
        end_prefix(self._state, self._new_prefix(request), MissReason.STOPPED, answers)

    async def drain(self) -> None:
        """Cancel every search, release every prefix that stands ready, and wait for the tasks to settle."""
        self._end_searches(MissReason.STOPPED)
        end_ready(self._state, MissReason.STOPPED)
        while self._searches:
            self._idle = anyio.Event()
            await self._idle.wait()

    def _end_searches(self, reason: MissReason) -> None:
        for search in self._searches.values():
            search.cancel(reason)

    def describe(self) -> dict[str, Any]:
        """What is searched and what stands ready, for people."""
        return {
            "searching": [str(request_id) for request_id in self._searches],
            "ready": {str(request_id): len(prefix.pages) for request_id, prefix in self._state.prefixes.items()},
        }

    def _new_prefix(self, request: PrefetchRequest) -> HeldPrefix:
        state = self._state
        return HeldPrefix(request, state.host, state.ledger, store_on=state.store is not None)

    def _start(
        self,
        request: PrefetchRequest,
        answers: list[Completion],
        *,
        asked_to_stop: bool = False,
        ended: MissReason | None = None,
    ) -> None:
        state = self._state
        if self._is_in_use(request, answers, ended):
            return
        prefix = self._new_prefix(request)
        if ended is not None:
            state.join_without(first_agreement(request.request_id))
            end_prefix(state, prefix, ended, answers)
            return
        if not state.host.capacity:
            state.join_without(first_agreement(request.request_id))
            prefix.miss = MissReason.TIER_OFF
            self._conclude_at_once(prefix, answers)
            return
        self._look_for(prefix, answers, asked_to_stop=asked_to_stop)

    def _look_for(self, prefix: HeldPrefix, answers: list[Completion], *, asked_to_stop: bool) -> None:
        """Answer at once where no wait is needed, else begin a search."""
        state, request, now = self._state, prefix.request, anyio.current_time()
        found = state.host.match(request.keys)
        state.host.touch(found)
        if state.store is not None and state.config.refresh_store:
            state.store.align(request.keys)
        prefix.host_pages = len(found)
        question = None
        if not state.is_shared:
            is_all = self._reader.is_all_held(prefix, found)
            question = None if is_all else self._reader.ask(prefix, found, now)
            if is_all or (question is not None and question.adds_nothing):
                prefix.extend(found)
                self._conclude_at_once(prefix, answers)
                return
        search = self._new_search(prefix, question, now)
        if question is None:
            self._task_searches.add(search)
        else:
            self._follower.add(search)
        # From here on somebody gives back what is held, and answers.
        self._searches[request.request_id] = search
        self._note_begun(request)
        prefix.extend(found)
        if asked_to_stop:
            search.stop()
        if question is not None:
            self._follower.step(search, now)

    def _new_search(self, prefix: HeldPrefix, question: Question | None, now: float) -> Search:
        state, request = self._state, prefix.request
        waits = (request.stop or state.config.prefetch_stop_policy) is StopPolicy.WAIT_COMPLETE
        accord = Accord(state.ranks, state.services, request.request_id)
        return Search(prefix, accord, waits, now + state.config.prefetch_deadline_s, question)

    def _is_in_use(self, request: PrefetchRequest, answers: list[Completion], ended: MissReason | None) -> bool:
        """Whether an earlier request has the same id: this one waits if that one is stopping, else it ends here."""
        request_id = request.request_id
        search = self._searches.get(request_id)
        if search is None and request_id not in self._state.prefixes:
            return False
        if search is not None and search.stopped is not None and search.last_behind is None:
            search.behind.append(Behind(request, ended))
            return True
        log.error("prefetch.duplicate", request_id=request_id)
        if search is None:
            self._state.join_without(first_agreement(request_id))
        else:
            # Names are paired in order, and the search has perhaps not made its first agreement yet.
            search.duplicates += 1
        prefix = self._new_prefix(request)
        prefix.miss = MissReason.CANCELLED
        self._ready.end_without(prefix, answers)
        return True

    def _cancel(
        self, request_id: RequestId, answers: list[Completion], reason: MissReason = MissReason.CANCELLED
    ) -> None:
        search = self._searches.get(request_id)
        if search is not None:
            search.cancel(reason)
            return
        prefix = self._state.prefixes.get(request_id)
        if prefix is not None:
            end_prefix(self._state, prefix, reason, answers)

    def _stop(self, request_id: RequestId) -> None:
        search = self._searches.get(request_id)
        if search is not None:
            search.stop()

    def _end(self, search: Search, *, goes_on: bool) -> None:
        """Forget a search and answer it; `goes_on` says whether the actor does."""
        prefix = search.prefix
        answers: list[Completion] = []
        stopped = search.stopped or (None if goes_on else MissReason.STOPPED)
        run_endings(
            search.accord.leave,
            partial(self._forget, search),
            partial(self._ready.conclude, prefix, answers)
            if stopped is None
            else partial(end_prefix, self._state, prefix, stopped, answers),
            *[partial(self._follow_on, later, answers, goes_on=goes_on) for later in search.behind],
            partial(self._state.outbox.deliver, answers),
            self._note_idle,
            self._poke,
        )

    def _forget(self, search: Search) -> None:
        """Join for the duplicates, and let the request's id be used again."""
        request_id = search.prefix.request.request_id
        while search.duplicates:
            search.duplicates -= 1
            self._state.join_without(first_agreement(request_id))
        self._searches.pop(request_id, None)

    def _note_idle(self) -> None:
        if not self._searches:
            self._idle.set()

    def _follow_on(self, later: Behind, answers: list[Completion], *, goes_on: bool) -> None:
        """Answer a request behind a search, or start it; an actor that ends starts nothing."""
        if later.ended is None and goes_on:
            self._start(later.request, answers, asked_to_stop=later.asked_to_stop)
        else:
            self._state.join_without(first_agreement(later.request.request_id))
            end_prefix(self._state, self._new_prefix(later.request), later.ended or MissReason.STOPPED, answers)

    def _conclude_at_once(self, prefix: HeldPrefix, answers: list[Completion]) -> None:
        self._note_begun(prefix.request)
        run_endings(partial(self._ready.conclude, prefix, answers))
