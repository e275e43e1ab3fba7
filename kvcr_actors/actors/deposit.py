"""Deposit, host to store: bounded batches, bounded retries, parents before children.

Each page that comes here ends stored, named in a `DepositFailed`, or owed (see `owed`): what finds the queue full is
offered again once the queue is empty.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import anyio
import attrs
import structlog

from kvcr_actors.actors.state import LoopState
from kvcr_actors.actors.store_guard import GuardedStore
from kvcr_actors.core.host_tier import HostPage
from kvcr_actors.core.ledger import Claim, ClaimState
from kvcr_actors.messages import DepositPages
from kvcr_actors.ports import BatchOutcome, PageBatch, PageOutcome
from kvcr_actors.runtime.endings import run_endings
from kvcr_actors.runtime.foreign import Tasks
from kvcr_actors.transfers import Operation
from kvcr_actors.types import SkipReason

log = structlog.get_logger()

_TERMINAL = {
    PageOutcome.FULL: SkipReason.STORE_FULL,
    PageOutcome.FAILED: SkipReason.STORE_FAILED,
    PageOutcome.MISS: SkipReason.STORE_FAILED,
}


@attrs.define(eq=False)
class _Order:
    """A message on its way: which pages it asked for, its claim, and the write that may still read their memory."""

    pages: Sequence[HostPage]
    claim: Claim
    write: Operation[BatchOutcome] | None = None
    writing: int = 0
    """Pages of that write: other than the order's, for missing parents are written with them, and batches are short."""
    failed: set[HostPage] = attrs.field(factory=set[HostPage])

    @property
    def is_forgotten(self) -> bool:
        """Whether a reset came: the store that is there now must not have these pages."""
        return any(page.is_forgotten for page in self.pages)


class DepositActor:
    """Writes confirmed pages to the store, one batch at a time, in the order in which they were confirmed."""

    name = "deposit"

    def __init__(self, state: LoopState, tasks: Tasks, poke: Callable[[], None]) -> None:
        self._state = state
        self._tasks = tasks
        self._poke = poke
        self._queue: deque[_Order] = deque()
        self._current: _Order | None = None
        # What waits cannot be evicted: never more than half of the host may.
        self._limit = min(state.config.deposit_queue_pages, max(1, state.host.capacity // 2))
        self._writer_runs = False
        self._idle = anyio.Event()
        if state.owed:  # by an incarnation before this one
            self._start_writer()

    @property
    def busy(self) -> int:
        """Orders that wait or are being written; at least 1 while the writer looks for what is owed."""
        return max(len(self._queue) + (self._current is not None), int(self._writer_runs))

    @property
    def _waiting_pages(self) -> int:
        current = 0 if self._current is None else len(self._current.pages)
        return current + sum(len(order.pages) for order in self._queue)

    async def handle(self, batch: Sequence[DepositPages]) -> None:
        """Queue the pages; beyond the queue's bound they are shed, to be offered again."""
        waiting = self._waiting_pages
        for message in batch:
            if waiting and waiting + len(message.pages) > self._limit:
                self._shed(message)
                continue
            self._queue.append(_Order(message.pages, message.claim))
            waiting += len(message.pages)
        if self._queue and not self._writer_runs:
            self._start_writer()

    def abandon(self, batch: Sequence[DepositPages], error: BaseException) -> None:
        """Give up what the writer, which has ended by now, did not give up itself."""
        del error
        # One that is quarantined it gave up: a write may still read the pages.
        left = [message for message in batch if message.claim.state is ClaimState.HELD]
        run_endings(*(partial(self._abandon, message) for message in left))

    async def drain(self) -> None:
        """Write what waits; the supervisor sets the budget."""
        while self.busy:
            self._idle = anyio.Event()
            await self._idle.wait()

    def describe(self) -> dict[str, Any]:
        """What waits, for people."""
        return {"waiting_pages": self._waiting_pages, "deposited": self._state.stats.deposit.deposited}

    def _abandon(self, message: DepositPages) -> None:
        keys = [page.key for page in message.pages if not page.stored]
        run_endings(partial(self._state.owed.fail, keys, SkipReason.STOPPED), partial(self._let_go, message))

    def _shed(self, message: DepositPages) -> None:
        run_endings(partial(self._let_go, message), partial(self._state.owed.owe, message.pages))

    def _let_go(self, message: DepositPages) -> None:
        run_endings(
            partial(self._state.end_deposit, message.pages),
            partial(self._state.release_when_quiet, None, message.claim, 0),
        )

    def _start_writer(self) -> None:
        self._tasks.start_soon(self._write_all, name="deposit writer")
        self._writer_runs = True

    def _take_owed(self) -> bool:
        """There is room: queue what was shed before and is still here, within the queue's bound."""
        state = self._state
        if state.store is None:
            state.owed.end(SkipReason.TIER_OFF)
            return False
        keys = state.owed.take()
        found = [page for page in map(state.host.get, keys) if page is not None and page.ready]
        lacking = [page for page in found if state.lacks_deposit(page)]
        pages, later = lacking[: self._limit], lacking[self._limit :]
        state.owed.put_back(page.key for page in later)
        if pages:
            claim = state.claim_pages("owed", pages)
            state.depositing.update(pages)
            self._queue.append(_Order(pages, claim))
        return bool(pages)

    async def _write_all(self) -> None:
        try:
            while self._queue or self._take_owed():
                self._current = order = self._queue.popleft()
                if order.is_forgotten:
                    self._give_up(order, SkipReason.RESET)
                    continue
                if (store := self._state.store) is None:
                    self._give_up(order, SkipReason.TIER_OFF)
                    continue
                await self._write_order(order, store)
                self._end(order)
        finally:
            # Reached with orders left only when the actor stops or fails.
            self._writer_runs = False
            left = [*([] if self._current is None else [self._current]), *self._queue]
            self._queue.clear()
            run_endings(*(partial(self._give_up, order) for order in left), self._idle.set, self._poke)

    def _end(self, order: _Order) -> None:
        size = order.writing * self._state.device.layout.page_bytes
        run_endings(
            partial(self._state.end_deposit, order.pages),
            partial(self._state.release_when_quiet, order.write, order.claim, size),
            self._leave_current,
            self._poke,
        )

    def _leave_current(self) -> None:
        self._current = None

    def _give_up(self, order: _Order, reason: SkipReason = SkipReason.STOPPED) -> None:
        left = [page for page in order.pages if not page.stored and page not in order.failed]
        order.failed.update(left)
        run_endings(partial(self._state.owed.fail, [page.key for page in left], reason), partial(self._end, order))

    async def _write_order(self, order: _Order, store: GuardedStore) -> None:
        pages = _with_missing_parents(order.pages)
        path = _path(order.pages[-1]) if self._state.config.refresh_store else ()
        if path:
            # Before, so that the batch does not evict its own parents; after, so that the tail leaves first.
            store.align(path)
        size = min(self._state.config.deposit_batch_pages, store.traits.batch_pages)
        for start in range(0, len(pages), size):
            if order.write is not None and not order.write.is_quiet:
                # One write that may still read its memory is all that the order's claim can wait for.
                left = [page for page in pages[start:] if not page.stored]
                self._fail(order, dict.fromkeys(left, SkipReason.STORE_FAILED))
                break
            with anyio.move_on_after(self._state.config.deposit_yield_s):
                await self._state.reads_over()
            await self._write_batch(order, pages[start : start + size], store)
        if path:
            for path in _paths(order.pages):
                store.align(path)

    async def _write_batch(self, order: _Order, pages: Sequence[HostPage], store: GuardedStore) -> None:
        """Write pages whose parents are stored; retry what failed, then count it as a terminal failure."""
        config, stats = self._state.config, self._state.stats.deposit
        left, reasons, done = list(pages), dict[HostPage, SkipReason](), set[HostPage]()
        for attempt in range(config.deposit_retries + 1):
            # A page whose parent did not make it would never be found, so it is not written.
            left = _whose_parents_are_stored_or_in(left)
            if not left:
                break
            if attempt:
                stats.retried += len(left)
                await anyio.sleep(config.deposit_backoff_s * 2 ** (attempt - 1))
            outcomes = await self._write(order, left, store, done)
            if store.is_retired:
                reasons = dict.fromkeys(left, SkipReason.RESET if order.is_forgotten else SkipReason.TIER_OFF)
                break
            for page, outcome in zip(left, outcomes, strict=True):
                reasons[page] = _TERMINAL.get(outcome, SkipReason.PARENT_ABSENT)
            left = [page for page in left if page not in done]
            quiet = order.write is None or order.write.is_quiet
            if not left or not quiet or PageOutcome.FAILED not in outcomes:
                break
        lost = {page: reasons.get(page, SkipReason.PARENT_ABSENT) for page in pages if page not in done}
        self._fail(order, lost)

    def _note(self, pages: Sequence[HostPage], outcome: BatchOutcome, store: GuardedStore, done: set[HostPage]) -> None:
        """Note what the store has, in the turn in which it says so: it may tell of its next eviction in the following.

        A page that made it without its parent counts as not stored: it is written again, for nothing, once its parent
        is there.
        """
        if store.is_retired:
            return
        for page, result in zip(pages, outcome.pages, strict=True):
            if result is PageOutcome.OK and (page.parent is None or page.parent.stored):
                page.stored = True
                done.add(page)
                self._state.owed.settle(page.key)
                self._state.stats.deposit.deposited += 1

    async def _write(
        self, order: _Order, pages: Sequence[HostPage], store: GuardedStore, done: set[HostPage]
    ) -> Sequence[PageOutcome]:
        batch = PageBatch(
            keys=tuple(page.key for page in pages),
            slots=tuple(zip(*(page.slots for page in pages), strict=True)),
            parents=tuple(None if page.parent is None else page.parent.key for page in pages),
        )
        order.write = write = store.write(batch)
        order.writing = len(pages)
        write.when_settled(lambda outcome: self._note(pages, outcome, store, done))
        outcome: BatchOutcome | None = None
        with anyio.move_on_after(store.traits.write_budget_s):
            outcome = await write.outcome()
            if PageOutcome.OK in outcome.pages:
                await write.quiet()
        if outcome is None:
            log.error("deposit.deadline", pages=len(pages), seconds=store.traits.write_budget_s)
            return [PageOutcome.FAILED] * len(pages)
        if outcome.error is not None:
            log.warning("deposit.fault", pages=len(pages), error=outcome.error)
        return outcome.pages

    def _fail(self, order: _Order, lost: Mapping[HostPage, SkipReason]) -> None:
        order.failed.update(lost)
        for reason in dict.fromkeys(lost.values()):
            self._state.owed.fail([page.key for page, why in lost.items() if why is reason], reason)


def _with_missing_parents(pages: Sequence[HostPage]) -> list[HostPage]:
    """The pages, each preceded by its ancestors that the store lost or never had."""
    result: list[HostPage] = []
    seen: set[HostPage] = set()
    for page in pages:
        missing: list[HostPage] = []
        step: HostPage | None = page
        while step is not None and step not in seen:
            seen.add(step)
            if not step.stored:
                missing.append(step)
            step = step.parent
        result.extend(reversed(missing))
    return result


def _whose_parents_are_stored_or_in(pages: Sequence[HostPage]) -> list[HostPage]:
    going: set[HostPage] = set()
    for page in pages:
        if page.parent is None or page.parent.stored or page.parent in going:
            going.add(page)
    return [page for page in pages if page in going]


def _path(page: HostPage) -> list[bytes]:
    """The keys from the root to a page."""
    keys: list[bytes] = []
    step: HostPage | None = page
    while step is not None:
        keys.append(step.key)
        step = step.parent
    keys.reverse()
    return keys


def _paths(pages: Sequence[HostPage]) -> list[list[bytes]]:
    """The paths of the deepest pages: those that no other page of the order continues."""
    parents = {page.parent for page in pages}
    return [_path(page) for page in pages if page not in parents]
