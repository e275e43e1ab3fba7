"""Confirmation: a step's copy is over, every rank agrees on its nodes, and only then are they real."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import anyio
import anyio.abc
import structlog

from kvcr_actors.actors.state import LoopState
from kvcr_actors.core.host_tier import HostPage, PageState
from kvcr_actors.core.ledger import ClaimState
from kvcr_actors.errors import InboxClosedError, InboxFullError
from kvcr_actors.messages import CopyStarted, DepositPages, StagedNode
from kvcr_actors.ports import Agreement, CopyOutcome
from kvcr_actors.types import NO_SLOT, NodeId, SkipReason

log = structlog.get_logger()


class ConfirmationActor:
    """Waits for each launched copy, commits what succeeded on every rank, and acknowledges the step."""

    name = "confirmation"

    def __init__(self, state: LoopState, tasks: anyio.abc.TaskGroup, poke: Callable[[], None]) -> None:
        self._state = state
        self._tasks = tasks
        self._poke = poke
        self._open: dict[int, CopyStarted] = {}
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
        for started in batch:
            # One that a task followed, until the failure ended it, was given up there.
            if started.claim.state is ClaimState.HELD and started.step not in self._open:
                self._give_up(started, SkipReason.STOPPED)

    async def drain(self) -> None:
        """Wait for the copies in flight; the supervisor sets the budget."""
        while self._open:
            self._idle = anyio.Event()
            await self._idle.wait()

    def describe(self) -> dict[str, Any]:
        """The open steps, for people."""
        return {"open_steps": sorted(self._open)}

    async def _confirm(self, started: CopyStarted) -> None:
        confirmed, reason = False, SkipReason.STOPPED
        agreement: Agreement | None = None
        pinned: list[HostPage] = []
        try:
            outcome = await self._copied(started)
            if outcome is None:
                reason = SkipReason.COPY_FAILED
            else:
                good = await self._good(started, outcome, pinned)
                agreement = self._state.ranks.propose(started.operation, good)
                self._settle(started, outcome, good, await agreement.outcome())
                confirmed = True
        finally:
            # Synchronous on purpose: a cancelled task must not need to wait in order to give back.
            if agreement is not None:
                agreement.withdraw()
            for page in pinned:
                self._state.host.unpin(page)
            if not confirmed:
                self._give_up(started, reason, joined=agreement is not None)
            del self._open[started.step]
            if not self._open:
                self._idle.set()
            self._poke()

    async def _copied(self, started: CopyStarted) -> CopyOutcome | None:
        with anyio.move_on_after(self._state.config.copy_deadline_s):
            return await started.copy.outcome()
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
        """Commit node by node what every rank has; the rest goes back with the claim, once the copy is quiet."""
        state = self._state
        state.stats.backup.slices += outcome.slices
        state.stats.backup.bytes += outcome.bytes
        done, failed = list(started.done), list(started.failed)
        ready: list[HostPage] = []
        tails: list[HostPage] = []
        kept = 0
        for node in started.staged:
            state.breathe()
            bit = 1 << node.position
            if not good & agreed & bit or node.needs & ~kept:
                failed.append((node.node_id, _reason(node, outcome, is_good=bool(good & 1 << node.position))))
                continue
            kept |= bit
            ready.extend(state.grow(node.growths))
            ready.extend(state.commit(node.pages))
            if node.tail is not None:
                tails.append(node.tail)
            done.append(node.node_id)
        state.publish_changes()
        self._deposit(started.step, ready, tails)
        state.release_when_quiet(started.copy, started.claim, self._size(started))
        state.acknowledge(started.step, done, failed)

    def _deposit(self, step: int, ready: Sequence[HostPage], tails: Sequence[HostPage]) -> None:
        """Send pages to the store: those that became ready, and tails of old ones that it lacks."""
        state = self._state
        pages = [page for page in dict.fromkeys([*ready, *tails]) if state.lacks_deposit(page)]
        if not pages:
            return
        for tail in tails:
            state.host.pin(tail)
        state.depositing.update(pages)

        def unpin() -> None:
            for tail in tails:
                state.host.unpin(tail)

        claim = state.ledger.take("deposit", step, unpin)
        try:
            state.inboxes.deposit.tell(DepositPages(pages, claim))
        except (InboxFullError, InboxClosedError) as refusal:
            reason = SkipReason.QUEUE_FULL if isinstance(refusal, InboxFullError) else SkipReason.STOPPED
            state.stats.deposit.skipped[reason] += len(pages)
            state.end_deposit(pages)
            claim.release()

    def _give_up(self, started: CopyStarted, reason: SkipReason, *, joined: bool = False) -> None:
        failed: list[tuple[NodeId, SkipReason]] = [
            *started.failed,
            *((node.node_id, reason) for node in started.staged),
        ]
        if not joined:
            self._state.join_without(started.operation)
        self._state.release_when_quiet(started.copy, started.claim, self._size(started))
        self._state.acknowledge(started.step, started.done, failed)

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
