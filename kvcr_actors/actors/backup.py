"""Backup, device to host: a step's nodes, over all pools, become one submit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import structlog

from kvcr_actors.actors.state import LoopState
from kvcr_actors.core.copy_plan import Direction, plan_copy
from kvcr_actors.core.hit_policy import component_masks
from kvcr_actors.core.host_tier import HostPage, PageState
from kvcr_actors.errors import InboxClosedError, InboxFullError, NoHostMemoryError
from kvcr_actors.messages import BackUpStep, CopyStarted, StagedNode
from kvcr_actors.ports import CopyOutcome
from kvcr_actors.runtime.operation import Operation
from kvcr_actors.types import BackupNode, Components, NodeId, SkipReason

log = structlog.get_logger()


class _Staging:
    """The nodes of one step while their host slots are being reserved."""

    def __init__(self) -> None:
        self.nodes: list[StagedNode] = []
        self.pages: list[HostPage] = []
        self.parts: list[tuple[Components, Components]] = []
        self.done: list[NodeId] = []
        self.failed: list[tuple[NodeId, SkipReason]] = []


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
            self._submit(step)
            self._settled_step = step.step

    def abandon(self, batch: Sequence[BackUpStep], error: BaseException) -> None:
        """Acknowledge the steps that were not submitted, each node as failed; step numbers only grow."""
        for step in batch:
            if step.step > self._settled_step:
                log.error("backup.abandoned", step=step.step, nodes=len(step.nodes), error=repr(error))
                self._state.acknowledge(step.step, (), [(node.node_id, SkipReason.STOPPED) for node in step.nodes])

    async def drain(self) -> None:
        """Nothing is in flight here: a launched copy belongs to the confirmation."""

    def describe(self) -> dict[str, Any]:
        """Totals for people."""
        totals = self._state.stats.backup
        return {"steps": totals.steps, "nodes": totals.nodes, "skipped": dict(totals.skipped)}

    def _submit(self, step: BackUpStep) -> None:
        state = self._state
        staging = _Staging()
        claim = state.ledger.take("backup", step.step, lambda: state.abandon_unfilled(staging.pages))
        copy: Operation[CopyOutcome] | None = None
        handed_over = False
        try:
            for node in step.nodes:
                self._stage(node, staging)
                state.breathe()
            state.publish_changes()
            if not staging.nodes:
                state.acknowledge(step.step, staging.done, staging.failed)
                return
            copy = self._launch(step, staging)
            handed_over = self._hand_over(
                CopyStarted(step.step, copy, staging.nodes, claim, tuple(staging.done), tuple(staging.failed))
            )
        finally:
            if not handed_over:
                size = len(staging.pages) * state.device.layout.page_bytes
                state.release_when_quiet(copy, claim, size)

    def _launch(self, step: BackUpStep, staging: _Staging) -> Operation[CopyOutcome]:
        if not staging.parts:
            return Operation[CopyOutcome].finished(CopyOutcome(0, slices=0))
        copy = self._state.device.submit(plan_copy(Direction.TO_HOST, staging.parts), step.fence)
        totals = self._state.stats.backup
        totals.steps += 1
        totals.nodes += len(staging.parts)
        return copy

    def _hand_over(self, started: CopyStarted) -> bool:
        """Pass the copy on; False, and its nodes are acknowledged as failed, if the confirmation takes no more."""
        try:
            self._state.inboxes.confirmation.tell(started)
        except (InboxFullError, InboxClosedError) as refusal:
            reason = SkipReason.QUEUE_FULL if isinstance(refusal, InboxFullError) else SkipReason.STOPPED
            failed = [*started.failed, *((node.node_id, reason) for node in started.staged)]
            self._state.acknowledge(started.step, started.done, failed)
            return False
        return True

    def _stage(self, node: BackupNode, staging: _Staging) -> None:
        """Reserve slots for the node's pages that the host lacks, or note why not."""
        host = self._state.host
        parent = None
        if node.parent is not None:
            parent = host.get(node.parent)
            if parent is None:
                staging.failed.append((node.node_id, SkipReason.PARENT_ABSENT))
                return
        present = 0
        for key in node.keys:
            page = host.get(key)
            if page is None:
                break
            parent = page
            present += 1
        if present == len(node.keys):
            self._stage_present(node, parent, staging)
            return
        if host.absent_run(node.keys[present:]) < len(node.keys) - present:
            # A page of a given-up parent is still filling further down: it blocks its key until its copy is quiet.
            staging.failed.append((node.node_id, SkipReason.PARENT_ABSENT))
            return
        wanted = tuple(pages[present:] for pages in node.pages)
        try:
            pages = host.reserve(parent, node.keys[present:], component_masks(wanted))
        except NoHostMemoryError:
            staging.failed.append((node.node_id, SkipReason.NO_HOST_MEMORY))
            return
        staging.nodes.append(StagedNode(node.node_id, pages, parent))
        staging.pages.extend(pages)
        slots = tuple(zip(*(page.slots for page in pages), strict=True))
        staging.parts.append((wanted, slots))

    def _stage_present(self, node: BackupNode, tail: HostPage | None, staging: _Staging) -> None:
        """Nothing is to be copied: the node is done if its bytes are in place and the store has it or soon will."""
        if tail is not None and tail.state is PageState.READY and not self._state.lacks_deposit(tail):
            staging.done.append(node.node_id)
        else:
            staging.nodes.append(StagedNode(node.node_id, (), tail))
