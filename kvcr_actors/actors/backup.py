"""Backup, device to host: a step's nodes, over all pools, become one submit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import structlog

from kvcr_actors.actors.staging import StepStaging
from kvcr_actors.actors.state import LoopState
from kvcr_actors.core.copy_plan import Direction, plan_copy
from kvcr_actors.core.rounds import step_operation
from kvcr_actors.errors import InboxClosedError, InboxFullError
from kvcr_actors.messages import BackUpStep, CopyStarted
from kvcr_actors.ports import CopyOutcome
from kvcr_actors.runtime.endings import run_endings
from kvcr_actors.transfers import Operation
from kvcr_actors.types import SkipReason

log = structlog.get_logger()


class BackupActor:
    """Reserves host slots for each step, launches its one copy and hands both to the confirmation."""

    name = "backup"
    busy = 0

    def __init__(self, state: LoopState) -> None:
        self._state = state
        self._settled_step = -1

    async def handle(self, batch: Sequence[BackUpStep]) -> None:
        """Submit each step of the batch by itself: steps have their own fences and are never merged."""
        for step in batch:
            self._note_contexts(step)
            self._submit(step)
            self._settled_step = step.step

    def abandon(self, batch: Sequence[BackUpStep], error: BaseException) -> None:
        """Acknowledge the steps that were not submitted, each node as failed; step numbers only grow."""
        for step in batch:
            if step.step > self._settled_step:
                log.error("backup.abandoned", step=step.step, nodes=len(step.nodes), error=repr(error))
                self._state.join_without(step_operation(node.node_id for node in step.nodes))
                self._state.acknowledge(step.step, (), [(node.node_id, SkipReason.STOPPED) for node in step.nodes])

    async def drain(self) -> None:
        """Nothing is in flight here: a launched copy belongs to the confirmation."""

    def describe(self) -> dict[str, Any]:
        """Totals for people."""
        totals = self._state.stats.backup
        return {"steps": totals.steps, "nodes": totals.nodes, "skipped": dict(totals.skipped)}

    def _submit(self, step: BackUpStep) -> None:
        state = self._state
        stale = len(step.nodes) if state.is_stale(step.resets) else step.stale
        staging = StepStaging(state)
        claim = state.ledger.take("backup", step.step, staging.give_back)
        copy: Operation[CopyOutcome] | None = None
        operation = ("backup", step.step)
        if state.is_shared:
            operation = step_operation(node.node_id for node in step.nodes)
        handed_over = False
        try:
            staging.stage(step.nodes, stale)
            state.publish_changes()
            if not staging.nodes:
                state.join_without(operation)
                self._settled_step = step.step
                state.acknowledge(step.step, staging.done, staging.failed, staging.missing)
                return
            copy = self._launch(step, staging)
            done, failed, generation = tuple(staging.done), tuple(staging.failed), state.host.generation
            started = CopyStarted(
                step.step, copy, staging.nodes, claim, done, failed, staging.missing, operation, generation
            )
            handed_over = self._hand_over(started)
        finally:
            if not handed_over:
                size = (len(staging.pages) + len(staging.growths)) * state.device.layout.page_bytes
                run_endings(partial(state.release_when_quiet, copy, claim, size))

    def _launch(self, step: BackUpStep, staging: StepStaging) -> Operation[CopyOutcome]:
        if not staging.parts:
            return Operation[CopyOutcome].finished(CopyOutcome(0, slices=0))
        device, totals = self._state.device, self._state.stats.backup
        totals.steps += 1
        totals.nodes += len(staging.copied)
        fences = () if step.fence is None else (step.fence,)
        copy = device.submit(plan_copy(Direction.TO_HOST, staging.parts), fences)
        copy.when_settled(self._count_launches)
        return copy

    def _count_launches(self, outcome: CopyOutcome) -> None:
        self._state.stats.backup.submits += outcome.launches

    def _hand_over(self, started: CopyStarted) -> bool:
        """Pass the copy on; False, and its nodes are acknowledged as failed, if the confirmation takes no more."""
        try:
            self._state.inboxes.confirmation.tell(started)
        except (InboxFullError, InboxClosedError) as refusal:
            reason = SkipReason.QUEUE_FULL if isinstance(refusal, InboxFullError) else SkipReason.STOPPED
            failed = [*started.failed, *((node.node_id, reason) for node in started.staged)]
            self._state.join_without(started.operation)
            self._settled_step = started.step
            self._state.acknowledge(started.step, started.done, failed, started.missing)
            return False
        return True

    def _note_contexts(self, step: BackUpStep) -> None:
        """Before any event about the pages can come."""
        if (contexts := self._state.contexts) is not None:
            for node in step.nodes:
                if node.context is not None:
                    contexts.note(node.keys, node.context)
