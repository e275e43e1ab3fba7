"""Searches that wait for more than their own reads: other ranks, other requests' pages, a store's confirmation."""

from __future__ import annotations

from functools import partial

import anyio

from kvcr_actors.actors.reading import PrefixReader
from kvcr_actors.actors.search import EndSearch, Search
from kvcr_actors.actors.state import LoopState
from kvcr_actors.core.hit_policy import longest
from kvcr_actors.runtime.endings import run_endings
from kvcr_actors.runtime.foreign import Tasks
from kvcr_actors.types import MissReason


class SearchTasks:
    """Carries on each search in a task of its own; `end` takes what is over."""

    def __init__(self, state: LoopState, reader: PrefixReader, tasks: Tasks, end: EndSearch) -> None:
        self._state = state
        self._reader = reader
        self._tasks = tasks
        self._end = end

    def add(self, search: Search) -> None:
        """From now on give back what the search holds, whatever happens, and end it."""
        scope = anyio.CancelScope(deadline=search.deadline)
        self._tasks.start_soon(self._run, search, scope, name=f"prefetch {search.prefix.request.request_id}")
        search.interrupt = scope.cancel

    async def _run(self, search: Search, scope: anyio.CancelScope) -> None:
        """Read what can be read by the deadline; partial results count."""
        goes_on = False
        try:
            with scope:
                await self._reader.read(search.prefix, search.accord, search.question)
            if search.stopped is None:
                if scope.cancelled_caught and not search.asked_to_stop:
                    search.prefix.fail(MissReason.DEADLINE)
                if search.accord.is_shared:
                    await self._settle_on_one_length(search)
            goes_on = True
        finally:
            # Reached also when the actor stops or fails: the claim goes back and the engine hears of it.
            run_endings(partial(self._end, search, goes_on=goes_on))

    async def _settle_on_one_length(self, search: Search) -> None:
        """Hold exactly the prefix that every rank holds; nothing if a rank has left."""
        prefix, accord = search.prefix, search.accord
        layout = self._state.device.layout
        search.is_settling = True
        with anyio.CancelScope() as scope:
            search.interrupt = scope.cancel
            # Cut short while ranks agreed on what to read: it is withdrawn, and nobody makes the next agreement.
            accord.leave_if_open()
            if not (accord.is_over or accord.is_at_last):
                # Cut short between two agreements: the next one means something else to the other ranks than the last.
                if accord.has_begun:
                    accord.leave()
                else:
                    await self._reader.join(prefix, accord)
            agreed = 0
            if not accord.is_over:
                agreed = await accord.agree(prefix.boundaries(layout), last=True)
            prefix.truncate(layout)
            prefix.limit(longest(agreed), MissReason.RANKS_DISAGREED)
            prefix.agreed = agreed
