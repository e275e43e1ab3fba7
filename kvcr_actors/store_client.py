"""A store alone, without a controller: for engines' own storage tiers, for scripts, for tests of a store.

`StoreClient` is for synchronous callers on any thread, `aio_store.open_store_client` for asynchronous code. Neither
lends the store the caller's memory: pages pass through bounce slots, and only the caller's own call, before it returns,
writes to the caller's slots. So once a call has returned, whatever it says, the caller's memory is the caller's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Any, Final, TypeVar

import attrs

from kvcr_actors.batches import joined, late_words
from kvcr_actors.bounce import Lease
from kvcr_actors.errors import DeadlineError
from kvcr_actors.ports import BatchOutcome, ClearOutcome, Description, EventSink, HostMemory, PageBatch, Store
from kvcr_actors.runtime.hosts import Backend, ThreadHost
from kvcr_actors.store_session import OWNER, PARTS_AT_ONCE, StoreSession
from kvcr_actors.stores.threaded import all_failed
from kvcr_actors.types import PageKey, RequestId

T = TypeVar("T")

_CALL_S: Final = 30.0


@attrs.define(eq=False)
class _Flight:
    """A part under way, and what its call holds for it."""

    part: PageBatch
    lease: Lease
    answer: Future[BatchOutcome]


class StoreClient:
    """A store for synchronous callers, on a loop in a thread of its own; use it with `with`, or start and close it.

    `host` is the caller's memory: batches name its slots. Every method is for any thread, several at once; none may be
    called from a sink or from the store itself. A process that was forked gets a RuntimeError: make a client there.
    `bounce_pages` pages of memory are mapped beside it (2 full batches unless given): they bound what is under way.
    `sinks` hear what the store tells of its contents.
    """

    def __init__(
        self,
        store: Store,
        host: HostMemory,
        *,
        loop: Backend = "asyncio",
        bounce_pages: int | None = None,
        drain_budget_s: float = 10.0,
        sinks: Sequence[EventSink] = (),
    ) -> None:
        self._session = StoreSession(store, host, bounce_pages=bounce_pages, drain_budget_s=drain_budget_s, sinks=sinks)
        self._host = ThreadHost(self._session.main, backend=loop, name=f"kvcr-store-{store.name}")

    def start(self, timeout_s: float = 60.0) -> StoreClient:
        """Open the store; raises what it refuses with, StoreError if it cannot store, DeadlineError."""
        self._host.start(timeout_s)
        return self

    def close(self, timeout_s: float | None = None) -> None:
        """Let calls end, end what requests are open, and close the store; a second call has nothing to do.

        Raises what the store's close raised, or DeadlineError. The default is as long as the budgets together.
        """
        self._host.stop(self._session.close_budget_s if timeout_s is None else timeout_s)

    def __enter__(self) -> StoreClient:
        return self.start()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def begin_request(self, request_id: RequestId, hints: object = None, timeout_s: float = _CALL_S) -> None:
        """Lend the store a request's router hints until `end_request`. InvalidNodeError if the request is open."""
        self._ask("to begin a request", timeout_s, lambda: self._session.begin_request(request_id, hints))

    def end_request(self, request_id: RequestId, timeout_s: float = _CALL_S) -> None:
        """Have the store discard a request's hints and claims. InvalidNodeError if the request is not open."""
        self._ask("to end a request", timeout_s, lambda: self._session.end_request(request_id))

    def lookup(
        self, keys: Sequence[PageKey], request_id: RequestId = None, timeout_s: float | None = None
    ) -> tuple[int, ...]:
        """For each key a bit set of the pools held (bit `i` is pool `i`; 0 is a miss, and a store's fault, too).

        DeadlineError after `timeout_s`; the store's own budget for a read unless given.
        """
        limit_s = self._session.read_budget_s(0) if timeout_s is None else timeout_s
        return self._run("to look keys up", limit_s, lambda: self._session.lookup(tuple(keys), request_id, limit_s))

    def confirm(self, keys: Sequence[PageKey], request_id: RequestId, timeout_s: float | None = None) -> bool:
        """Make sure of a prefix that a lookup promised, for a store that asks for it. DeadlineError."""
        limit_s = self._session.read_budget_s(len(keys)) if timeout_s is None else timeout_s
        return self._run("to confirm keys", limit_s, lambda: self._session.confirm(tuple(keys), request_id, limit_s))

    def read(self, batch: PageBatch, request_id: RequestId = None, timeout_s: float | None = None) -> BatchOutcome:
        """Copy pages into the host slots of a batch of any length; slots of pages that are not OK keep their bytes.

        Pages that did not come by the deadline are FAILED, and `error` says so: those that came before it are OK. By
        default the deadline is the store's budget for so many pages.
        """
        session, parts = self._session, self._parts(batch)
        deadline = monotonic() + (session.read_budget_s(len(batch.keys)) if timeout_s is None else timeout_s)
        flights: dict[Future[BatchOutcome], tuple[int, _Flight]] = {}
        outcomes: dict[int, BatchOutcome] = {}
        try:
            for number, part in enumerate(parts):
                lease, left_s = Lease(), deadline - monotonic()
                answer = session.questions.run(partial(session.read, lease, part, request_id, left_s))
                flights[answer] = number, _Flight(part, lease, answer)
                if len(flights) == PARTS_AT_ONCE:
                    self._land_first(flights, outcomes, deadline)
            while flights:
                self._land_first(flights, outcomes, deadline)
        finally:
            for _, flight in flights.values():
                self._let_go(flight.lease)
        return joined([outcomes[number] for number in range(len(parts))])

    def write(self, batch: PageBatch, timeout_s: float | None = None) -> BatchOutcome:
        """Copy pages out of the host slots of a batch of any length; what is held already is OK.

        Pages of which nothing was heard by the deadline are FAILED, and `error` says so; they may still be stored, with
        the bytes that they had. By default the deadline is the store's budget for each operation.
        """
        session, parts = self._session, self._parts(batch)
        deadline = monotonic() + (session.write_budget_s(len(parts)) if timeout_s is None else timeout_s)
        flights: deque[_Flight] = deque()
        outcomes: list[BatchOutcome] = []
        for part in parts:
            if len(flights) == PARTS_AT_ONCE:
                outcomes.append(self._outcome("write", flights.popleft(), deadline))
            flights.append(self._launch_write(part, deadline))
        outcomes.extend(self._outcome("write", flight, deadline) for flight in flights)
        return joined(outcomes)

    def align(self, keys: Sequence[PageKey], timeout_s: float = _CALL_S) -> None:
        """Refresh the recency of a prefix (root to tail), so that its tail is evicted before its head."""
        self._ask("to align keys", timeout_s, lambda: self._session.align(tuple(keys)))

    def clear(self, timeout_s: float | None = None) -> ClearOutcome:
        """Have the store forget every page, for good; an outcome with an error says why it could not. DeadlineError."""
        limit_s = self._session.write_budget_s(1) if timeout_s is None else timeout_s
        return self._run("to clear itself", limit_s, lambda: self._session.clear(limit_s))

    def contents(self, timeout_s: float = _CALL_S) -> frozenset[PageKey]:
        """The keys held now, for checks and tools; costs time in proportion."""
        return self._ask("to list its contents", timeout_s, self._session.contents)

    def describe(self, timeout_s: float = _CALL_S) -> Description:
        """The state of the store and of the client."""
        if not self._host.is_running:
            return self._session.describe()
        return self._ask("to describe itself", timeout_s, self._session.describe)

    def _parts(self, batch: PageBatch) -> list[PageBatch]:
        self._host.check()
        return self._session.parts(batch)

    def _land_first(
        self,
        flights: dict[Future[BatchOutcome], tuple[int, _Flight]],
        outcomes: dict[int, BatchOutcome],
        deadline: float,
    ) -> None:
        """Land the part that is over first: another may wait for the very slots that it holds."""
        over, under_way = wait(flights, max(0.0, deadline - monotonic()), FIRST_COMPLETED)
        number, flight = flights.pop(next(iter(over or under_way)))
        outcomes[number] = self._land_read(flight, deadline)

    def _land_read(self, flight: _Flight, deadline: float) -> BatchOutcome:
        """Wait for a part and copy what came of it, on this thread; in each case its slots are given back."""
        try:
            outcome = self._outcome("read", flight, deadline)
            self._session.copy_out(flight.part, flight.lease, outcome)
            return outcome
        finally:
            self._let_go(flight.lease)

    def _launch_write(self, part: PageBatch, deadline: float) -> _Flight:
        session, lease = self._session, Lease()
        try:
            left_s = deadline - monotonic()
            taken = session.questions.run(partial(session.take_slots, lease, part, left_s))
            if not self._in_time(taken, deadline, otherwise=False):
                late: Future[BatchOutcome] = Future()
                late.set_result(self._late("write", part))
                self._let_go(lease)
                return _Flight(part, lease, late)
            session.copy_in(part, lease)
            left_s = deadline - monotonic()
            return _Flight(part, lease, session.questions.run(partial(session.write, lease, part, left_s)))
        except BaseException:
            self._let_go(lease)
            raise

    def _outcome(self, verb: str, flight: _Flight, deadline: float) -> BatchOutcome:
        return self._in_time(flight.answer, deadline, otherwise=self._late(verb, flight.part))

    def _late(self, verb: str, part: PageBatch) -> BatchOutcome:
        return all_failed(part, late_words(verb, self._session.store.name, self._session.slots.free))

    def _let_go(self, lease: Lease) -> None:
        self._session.questions.ask(lambda: self._session.slots.let_go(lease))

    @staticmethod
    def _in_time(answer: Future[T], deadline: float, *, otherwise: T) -> T:
        """What the loop answers by the deadline: it has one of its own, but it may hang."""
        try:
            return answer.result(max(0.0, deadline - monotonic()))
        except TimeoutError:
            return otherwise

    def _ask(self, what: str, timeout_s: float, question: Callable[[], T]) -> T:
        self._host.check()
        return self._answer(what, timeout_s, self._session.questions.ask(question))

    def _run(self, what: str, timeout_s: float, task: Callable[[], Coroutine[Any, Any, T]]) -> T:
        self._host.check()
        return self._answer(what, timeout_s, self._session.questions.run(task))

    @staticmethod
    def _answer(what: str, timeout_s: float, answer: Future[T]) -> T:
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            raise DeadlineError(f"{OWNER} took more than {timeout_s:g} s {what}") from None
