"""Follows the searches that wait for the store alone: one task and one deadline for all of them, not for each."""

from __future__ import annotations

import math
from functools import partial

import anyio
from anyio.lowlevel import checkpoint

from kvcr_actors.actors.reading import PrefixReader
from kvcr_actors.actors.search import EndSearch, Search
from kvcr_actors.actors.search_tasks import SearchTasks
from kvcr_actors.actors.state import LoopState
from kvcr_actors.runtime.endings import run_endings
from kvcr_actors.runtime.foreign import Tasks
from kvcr_actors.types import MissReason

_STEPS_A_TURN = 8
"""Searches that are carried on before the loop turns."""


class SearchFollower:
    """Carries on each search when its lookup or read has ended, is late, or the engine wants it to end.

    `others` take a search that turns out to wait for more; `end` takes what is over.
    """

    def __init__(
        self,
        state: LoopState,
        reader: PrefixReader,
        tasks: Tasks,
        others: SearchTasks,
        end: EndSearch,
    ) -> None:
        self._state = state
        self._reader = reader
        self._tasks = tasks
        self._others = others
        self._end = end
        self._open: dict[Search, None] = {}
        self._woken: dict[Search, None] = {}
        self._due = math.inf
        """No search is due before; perhaps none then either."""
        self._changed: anyio.Event | None = None
        self._runs = False

    def add(self, search: Search) -> None:
        """From now on give back what the search holds, whatever happens, and answer it."""
        if not self._runs:
            self._tasks.start_soon(self._run, name="prefetch reads")
            self._runs, self._due = True, math.inf
        self._open[search] = None
        wake = search.interrupt = partial(self._wake, search)
        if search.question is not None and search.question.masks is None:
            search.question.lookup.when_settled(lambda _: wake())

    def step(self, search: Search, now: float) -> None:
        """Carry a search on as far as it goes without a wait."""
        filling = search.filling
        if search.is_to_end:
            self._conclude(search, goes_on=True)
        elif filling is None:
            self._begin(search, now)
        elif filling.advance(now):
            self._reader.align(search.prefix)
            self._conclude(search, goes_on=True)
        else:
            self._keep(search, filling.due, now)

    def _begin(self, search: Search, now: float) -> None:
        prefix, question = search.prefix, search.question
        if question is not None and not self._reader.is_answered(prefix, question, now):
            self._keep(search, question.late_at, now)
        elif question is None or not self._reader.needs_only_reads(prefix, question):
            self._others.add(search)
            del self._open[search]
        else:
            filling = search.filling = self._reader.begin(prefix, question, search.interrupt, now)
            if filling is None:
                self._conclude(search, goes_on=True)
            else:
                self._keep(search, filling.due, now)

    def _keep(self, search: Search, due: float, now: float) -> None:
        """Wait for the search to be woken or due; it ends here if its time is up."""
        if now >= search.deadline:
            search.prefix.fail(MissReason.DEADLINE)
            self._conclude(search, goes_on=True)
        else:
            search.due = min(due, search.deadline)
            self._due = min(self._due, search.due)

    def _conclude(self, search: Search, *, goes_on: bool) -> None:
        """Give back what was being read, and end the search, once."""
        leave = () if search.filling is None else (search.filling.leave,)
        run_endings(*leave, partial(self._end, search, goes_on=goes_on), partial(self._open.pop, search, None))

    def _wake(self, search: Search) -> None:
        if search in self._open:
            self._woken[search] = None
            if self._changed is not None:
                self._changed.set()

    async def _run(self) -> None:
        try:
            with self._state.reading():
                while self._open:
                    await self._wait()
                    await self._step_all()
        finally:
            # Reached also when the actor stops or fails: the claims go back and the engine hears of it.
            self._runs = False
            run_endings(*[partial(self._conclude, search, goes_on=False) for search in self._open])

    async def _wait(self) -> None:
        if self._woken:
            await checkpoint()
            return
        self._changed = anyio.Event()
        with anyio.CancelScope(deadline=self._due):
            await self._changed.wait()
        self._changed = None

    async def _step_all(self) -> None:
        """Carry on what was woken, and what is due."""
        searches, self._woken = list(self._woken), {}
        now = anyio.current_time()
        if now >= self._due:
            searches += [search for search in self._open if search.due <= now]
            self._due = min((search.due for search in self._open if search.due > now), default=math.inf)
        for index, search in enumerate(searches):
            if index and not index % _STEPS_A_TURN:
                await checkpoint()
                now = anyio.current_time()
            if search in self._open:
                self.step(search, now)
