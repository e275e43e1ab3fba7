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
from kvcr_actors.ports import CopyOutcome
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
        try:
            outcome = await self._copied(started)
            if outcome is None:
                reason = SkipReason.COPY_FAILED
            else:
                await self._commit(started, outcome)
                confirmed = True
        finally:
            # Synchronous on purpose: a cancelled task must not need to wait in order to give back.
            if not confirmed:
                self._give_up(started, reason)
            del self._open[started.step]
            if not self._open:
                self._idle.set()
            self._poke()

    async def _copied(self, started: CopyStarted) -> CopyOutcome | None:
        with anyio.move_on_after(self._state.config.copy_deadline_s):
            return await started.copy.outcome()
        log.error("backup.deadline", step=started.step, seconds=self._state.config.copy_deadline_s)
        return None

    async def _commit(self, started: CopyStarted, outcome: CopyOutcome) -> None:
        """Agree, wait for the pages that the nodes hang from, then commit node by node."""
        state = self._state
        for pool, error in outcome.failed.items():
            log.error("backup.pool_failed", step=started.step, pool=state.device.layout.pools[pool].name, error=error)
        good = 0
        for index, node in enumerate(started.staged):
            if not _uses_any(node, outcome.failed):
                good |= 1 << index
        agreed = await state.ranks.agree(("backup", started.step), good)
        with anyio.move_on_after(state.config.copy_deadline_s):
            own = {page for node in started.staged for page in node.pages}
            for node in started.staged:
                if node.above is not None and node.above not in own:
                    await state.filled(node.above)
        state.stats.backup.slices += outcome.slices
        state.stats.backup.bytes += outcome.bytes
        self._settle(started, good, agreed)

    def _settle(self, started: CopyStarted, good: int, agreed: int) -> None:
        state = self._state
        done, failed = list(started.done), list(started.failed)
        ready: list[HostPage] = []
        tails: list[HostPage] = []
        for index, node in enumerate(started.staged):
            state.breathe()
            reason = _verdict(good >> index & 1, agreed >> index & 1, node)
            if reason is None:
                ready.extend(state.commit(node.pages))
                if node.tail is not None:
                    tails.append(node.tail)
                done.append(node.node_id)
            else:
                # Its slots go back with the claim: the copy may not be quiet yet.
                failed.append((node.node_id, reason))
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
            state.depositing.difference_update(pages)
            claim.release()

    def _give_up(self, started: CopyStarted, reason: SkipReason) -> None:
        failed: list[tuple[NodeId, SkipReason]] = [
            *started.failed,
            *((node.node_id, reason) for node in started.staged),
        ]
        self._state.release_when_quiet(started.copy, started.claim, self._size(started))
        self._state.acknowledge(started.step, started.done, failed)

    def _size(self, started: CopyStarted) -> int:
        return sum(len(node.pages) for node in started.staged) * self._state.device.layout.page_bytes


def _uses_any(node: StagedNode, pools: Iterable[int]) -> bool:
    return any(page.slots[pool] != NO_SLOT for pool in pools for page in node.pages)


def _verdict(good: int, agreed: int, node: StagedNode) -> SkipReason | None:
    """Why a node cannot be committed; None if it can."""
    if not good:
        return SkipReason.COPY_FAILED
    if not agreed:
        return SkipReason.RANKS_DISAGREED
    if node.above is not None and node.above.state is not PageState.READY:
        return SkipReason.PARENT_ABSENT
    return None
