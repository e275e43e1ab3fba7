"""Confirmation: a step's copy is over, every rank agrees on its nodes, and only then are they real."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import anyio
import structlog

from kvcr_actors.actors.state import LoopState
from kvcr_actors.core.host_page import first_not_ready
from kvcr_actors.core.host_tier import HostPage, PageState
from kvcr_actors.core.ledger import ClaimState
from kvcr_actors.errors import InboxClosedError, InboxFullError
from kvcr_actors.messages import CopyStarted, DepositPages, StagedNode
from kvcr_actors.ports import Agreement, CopyOutcome
from kvcr_actors.runtime.breath import PAGES_A_CALL
from kvcr_actors.runtime.endings import run_endings
from kvcr_actors.runtime.foreign import Tasks
from kvcr_actors.types import NO_SLOT, NodeId, PageKey, SkipReason

log = structlog.get_logger()

_Answer: TypeAlias = tuple[Sequence[NodeId], Sequence[tuple[NodeId, SkipReason]], Mapping[NodeId, PageKey]]
"""The nodes of a step that are done, those that failed, and what is missing of the paths of some of them."""


class ConfirmationActor:
    """Waits for each launched copy, commits what succeeded on every rank, and acknowledges the step."""

    name = "confirmation"

    def __init__(self, state: LoopState, tasks: Tasks, poke: Callable[[], None]) -> None:
        self._state = state
        self._tasks = tasks
        self._poke = poke
        self._open: dict[int, CopyStarted] = {}
        self._settled: dict[int, _Answer] = {}
        """How the nodes of open steps ended that are committed."""
        self._idle = anyio.Event()

    @property
    def busy(self) -> int:
        """Copies that are not confirmed yet."""
        return len(self._open)

    async def handle(self, batch: Sequence[CopyStarted]) -> None:
        """Follow each copy in a task of its own, so that a stalled one delays no other."""
        for started in batch:
            self._tasks.start_soon(self._confirm, started, name=f"confirm step {started.step}")
            self._open[started.step] = started

    def abandon(self, batch: Sequence[CopyStarted], error: BaseException) -> None:
        """Give up the copies that no task follows."""
        del error
        # One that a task followed, until the failure ended it, was given up there.
        left = [one for one in batch if one.claim.state is ClaimState.HELD and one.step not in self._open]
        run_endings(*(partial(self._give_up, started, SkipReason.STOPPED) for started in left))

    async def drain(self) -> None:
        """Wait for the copies in flight; the supervisor sets the budget."""
        while self._open:
            self._idle = anyio.Event()
            await self._idle.wait()

    def describe(self) -> dict[str, Any]:
        """The open steps, for people."""
        return {"open_steps": sorted(self._open)}

    async def _confirm(self, started: CopyStarted) -> None:
        reason = SkipReason.STOPPED
        agreement: Agreement | None = None
        pinned: list[HostPage] = []
        try:
            outcome = await self._copied(started)
            if self._is_forgotten(started):
                reason = SkipReason.RESET
            elif outcome is None:
                reason = SkipReason.COPY_FAILED
            else:
                good = await self._good(started, outcome, pinned)
                agreement = self._state.ranks.propose(started.operation, good)
                agreed = await agreement.outcome()
                if self._is_forgotten(started):
                    reason = SkipReason.RESET
                else:
                    self._settle(started, outcome, good, agreed)
        finally:
            # Synchronous on purpose: a cancelled task must not need to wait in order to give back.
            if agreement is not None:
                agreement.withdraw()
            answer = self._settled.get(started.step)
            run_endings(
                partial(self._unpin, pinned),
                partial(self._give_up, started, reason, joined=agreement is not None)
                if answer is None
                else partial(self._end, started, answer),
                partial(self._forget, started.step),
                self._poke,
            )

    def _unpin(self, pinned: list[HostPage]) -> None:
        while pinned:
            self._state.host.unpin(pinned.pop())

    def _forget(self, step: int) -> None:
        self._settled.pop(step, None)
        self._open.pop(step, None)
        if not self._open:
            self._idle.set()

    def _is_forgotten(self, started: CopyStarted) -> bool:
        """Whether a reset came since the step was staged: what was copied belongs to nobody."""
        return started.generation != self._state.host.generation

    async def _copied(self, started: CopyStarted) -> CopyOutcome | None:
        with anyio.move_on_after(self._state.config.copy_deadline_s):
            outcome = await started.copy.outcome()
            if self._is_forgotten(started):  # no rank waits for it, and its device pages are free when it is quiet
                await started.copy.quiet()
            return outcome
        log.error("backup.deadline", step=started.step, seconds=self._state.config.copy_deadline_s)
        return None

    async def _good(self, started: CopyStarted, outcome: CopyOutcome, pinned: list[HostPage]) -> int:
        """The nodes that this rank can commit, as bits: their bytes are in place, and so is what they hang from.

        What a node without new pages stands on is pinned until the ranks have agreed on it.
        """
        state = self._state
        for pool, error in outcome.failed.items():
            log.error("backup.pool_failed", step=started.step, pool=state.device.layout.pools[pool].name, error=error)
        own = {page for node in started.staged for page in node.pages}
        with anyio.move_on_after(state.config.copy_deadline_s):
            for node in started.staged:
                if node.above is not None and node.above not in own:
                    await state.filled(node.above)
        if self._is_forgotten(started):
            return 0
        good = 0
        sound: set[HostPage] = set()
        for node in started.staged:
            above = node.above
            stands = above is None or above in sound or (above not in own and above.state is PageState.READY)
            if stands and not _uses_any(node, outcome.failed):
                good |= 1 << node.position
                sound.update(node.pages)
                if above is not None and above.state is PageState.READY:
                    state.host.pin(above)
                    pinned.append(above)
        return good

    def _settle(self, started: CopyStarted, outcome: CopyOutcome, good: int, agreed: int) -> None:
        """Commit node by node what every rank has, and note how each ended; the claim has the rest."""
        state = self._state
        state.stats.backup.slices += outcome.slices
        state.stats.backup.bytes += outcome.bytes
        done, failed, missing = list(started.done), list(started.failed), dict(started.missing)
        ready: list[HostPage] = []
        tails: list[HostPage] = []
        filled: list[HostPage] = []
        kept = 0
        for node in started.staged:
            state.breathe()
            bit = 1 << node.position
            if not good & agreed & bit or node.needs & ~kept:
                reason = _reason(node, outcome, is_good=bool(good & 1 << node.position))
                failed.append((node.node_id, reason))
                if reason is SkipReason.PARENT_ABSENT and node.above is not None:
                    missing[node.node_id] = first_not_ready(node.above).key
                continue
            kept |= bit
            if node.growths:
                ready.extend(state.grow(node.growths))
            filled.extend(node.pages)
            if len(filled) >= PAGES_A_CALL:
                ready.extend(state.commit(filled))
                filled.clear()
            if node.tail is not None:
                tails.append(node.tail)
            done.append(node.node_id)
        ready.extend(state.commit(filled))
        state.publish_changes()
        self._deposit(started.step, ready, tails)
        self._settled[started.step] = (done, failed, missing)

    def _deposit(self, step: int, ready: Sequence[HostPage], tails: Sequence[HostPage]) -> None:
        """Send pages to the store: those that became ready, and tails of old ones that it lacks."""
        state = self._state
        if state.store is None:
            return
        pages = [page for page in dict.fromkeys([*ready, *tails]) if state.lacks_deposit(page)]
        if not pages:
            return
        claim = state.claim_pages(step, tails)
        try:
            state.depositing.update(pages)
            state.inboxes.deposit.tell(DepositPages(pages, claim))
        except Exception as refusal:
            run_endings(partial(state.end_deposit, pages), partial(state.release_when_quiet, None, claim, 0))
            if not isinstance(refusal, InboxFullError | InboxClosedError):
                raise
            if isinstance(refusal, InboxFullError):
                state.owed.owe(pages)
            else:
                state.owed.fail([page.key for page in pages], SkipReason.STOPPED)

    def _give_up(self, started: CopyStarted, reason: SkipReason, *, joined: bool = False) -> None:
        failed = [*started.failed, *((node.node_id, reason) for node in started.staged)]
        done = started.done
        if reason is SkipReason.RESET:  # what they stood on is gone as well
            done, failed = (), [*failed, *((node_id, reason) for node_id in done)]
        if not joined:
            self._state.join_without(started.operation)
        self._end(started, (done, failed, started.missing))

    def _end(self, started: CopyStarted, answer: _Answer) -> None:
        state, (done, failed, missing) = self._state, answer
        run_endings(
            partial(state.release_when_quiet, started.copy, started.claim, self._size(started)),
            partial(state.acknowledge, started.step, done, failed, missing),
        )

    def _size(self, started: CopyStarted) -> int:
        pages = sum(len(node.pages) + len(node.growths) for node in started.staged)
        return pages * self._state.device.layout.page_bytes


def _uses_any(node: StagedNode, pools: Iterable[int]) -> bool:
    return any(one.slots[pool] != NO_SLOT for pool in pools for one in (*node.pages, *node.growths))


def _reason(node: StagedNode, outcome: CopyOutcome, *, is_good: bool) -> SkipReason:
    """Why a node was not committed."""
    if is_good:
        return SkipReason.RANKS_DISAGREED
    return SkipReason.COPY_FAILED if _uses_any(node, outcome.failed) else SkipReason.PARENT_ABSENT
