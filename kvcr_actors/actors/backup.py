"""Backup, device to host: a step's nodes, over all pools, become one submit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import attrs
import structlog

from kvcr_actors.actors.state import LoopState
from kvcr_actors.core.copy_plan import Direction, plan_copy
from kvcr_actors.core.hit_policy import component_masks
from kvcr_actors.core.host_tier import Growth, HostPage, PageState
from kvcr_actors.core.rounds import step_operation
from kvcr_actors.errors import InboxClosedError, InboxFullError, NoHostMemoryError
from kvcr_actors.messages import BackUpStep, CopyStarted, StagedNode
from kvcr_actors.ports import CopyOutcome
from kvcr_actors.runtime.endings import run_endings
from kvcr_actors.runtime.operation import Operation
from kvcr_actors.types import BackupNode, Components, NodeId, PageKey, SkipReason

log = structlog.get_logger()


class _Staging:
    """The nodes of one step while their host slots are being reserved."""

    def __init__(self) -> None:
        self.nodes: list[StagedNode] = []
        self.pages: list[HostPage] = []
        self.growths: list[Growth] = []
        self.parts: list[tuple[Components, Components]] = []
        self.copied: set[NodeId] = set()
        """Nodes with something to copy."""
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
        staging = _Staging()
        claim = state.ledger.take("backup", step.step, partial(run_endings, partial(self._give_back, staging)))
        copy: Operation[CopyOutcome] | None = None
        operation = ("backup", step.step)
        if state.is_shared:
            operation = step_operation(node.node_id for node in step.nodes)
        handed_over = False
        try:
            for position, node in enumerate(step.nodes):
                self._stage(position, node, staging)
                state.breathe()
            if state.is_shared:
                needs = _needs(step.nodes)
                staging.nodes = [attrs.evolve(node, needs=needs[node.position]) for node in staging.nodes]
            state.publish_changes()
            if not staging.nodes:
                state.join_without(operation)
                state.acknowledge(step.step, staging.done, staging.failed)
                return
            copy = self._launch(step, staging)
            done, failed = tuple(staging.done), tuple(staging.failed)
            handed_over = self._hand_over(CopyStarted(step.step, copy, staging.nodes, claim, done, failed, operation))
        finally:
            if not handed_over:
                size = (len(staging.pages) + len(staging.growths)) * state.device.layout.page_bytes
                state.release_when_quiet(copy, claim, size)

    def _give_back(self, staging: _Staging) -> None:
        """What the confirmation did not use goes back, once the copy is quiet."""
        run_endings(
            partial(self._state.drop_growths, staging.growths), partial(self._state.abandon_unfilled, staging.pages)
        )

    def _launch(self, step: BackUpStep, staging: _Staging) -> Operation[CopyOutcome]:
        if not staging.parts:
            return Operation[CopyOutcome].finished(CopyOutcome(0, slices=0))
        device, totals = self._state.device, self._state.stats.backup
        totals.steps += 1
        totals.nodes += len(staging.copied)
        launched = device.backup_submits
        copy = device.submit(plan_copy(Direction.TO_HOST, staging.parts), step.fence)
        totals.submits += device.backup_submits - launched
        return copy

    def _hand_over(self, started: CopyStarted) -> bool:
        """Pass the copy on; False, and its nodes are acknowledged as failed, if the confirmation takes no more."""
        try:
            self._state.inboxes.confirmation.tell(started)
        except (InboxFullError, InboxClosedError) as refusal:
            reason = SkipReason.QUEUE_FULL if isinstance(refusal, InboxFullError) else SkipReason.STOPPED
            failed = [*started.failed, *((node.node_id, reason) for node in started.staged)]
            self._state.join_without(started.operation)
            self._state.acknowledge(started.step, started.done, failed)
            return False
        return True

    def _note_contexts(self, step: BackUpStep) -> None:
        """Before any event about the pages can come."""
        if (contexts := self._state.contexts) is not None:
            for node in step.nodes:
                if node.context is not None:
                    contexts.note(node.keys, node.context)

    def _stage(self, position: int, node: BackupNode, staging: _Staging) -> None:
        """Reserve slots for what the host lacks of the node's pages, or note why not."""
        host = self._state.host
        parent = None
        if node.parent is not None:
            parent = host.get(node.parent)
            if parent is None:
                staging.failed.append((node.node_id, SkipReason.PARENT_ABSENT))
                return
        held: list[HostPage] = []
        for key in node.keys:
            page = host.get(key)
            if page is None:
                break
            held.append(page)
        present = len(held)
        parent = held[-1] if held else parent
        try:
            growths = self._stage_growths(node, held, staging)
        except NoHostMemoryError:
            staging.failed.append((node.node_id, SkipReason.NO_HOST_MEMORY))
            return
        if present == len(node.keys):
            self._stage_present(position, node, parent, growths, staging)
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
        staging.nodes.append(StagedNode(node.node_id, pages, parent, position, growths))
        staging.pages.extend(pages)
        slots = tuple(zip(*(page.slots for page in pages), strict=True))
        staging.parts.append((wanted, slots))
        staging.copied.add(node.node_id)

    def _stage_growths(self, node: BackupNode, held: Sequence[HostPage], staging: _Staging) -> Sequence[Growth]:
        """Reserve slots for components that pages of the host lack and the node has. NoHostMemoryError: none."""
        if not held:
            return ()
        masks = component_masks(tuple(pages[: len(held)] for pages in node.pages))
        lacking = [
            (index, page, mask & ~page.mask)
            for index, (page, mask) in enumerate(zip(held, masks, strict=True))
            if mask & ~page.mask and page.state is PageState.READY
        ]
        if not lacking:
            return ()
        growths = self._state.host.reserve_more([(page, mask) for _, page, mask in lacking])
        staging.growths.extend(growths)
        wanted = tuple(tuple(pages[index] for index, _, _ in lacking) for pages in node.pages)
        staging.parts.append((wanted, tuple(zip(*(growth.slots for growth in growths), strict=True))))
        staging.copied.add(node.node_id)
        return growths

    def _stage_present(
        self, position: int, node: BackupNode, tail: HostPage | None, growths: Sequence[Growth], staging: _Staging
    ) -> None:
        """No page is to be added: the node is done if its bytes are in place and the store has it or soon will."""
        state = self._state
        at_rest = tail is not None and tail.state is PageState.READY and not state.lacks_deposit(tail)
        if at_rest and not growths and not state.is_shared:
            staging.done.append(node.node_id)
            return
        staging.nodes.append(StagedNode(node.node_id, (), tail, position, growths))


def _needs(nodes: Sequence[BackupNode]) -> list[int]:
    """For each node the bits of those before it that name its parent or a page of its own.

    It follows from the step alone, so every rank finds the same, whatever its host holds.
    """
    named: dict[PageKey, int] = {}
    needs: list[int] = []
    for position, node in enumerate(nodes):
        above = 0 if node.parent is None else named.get(node.parent, 0)
        for key in node.keys:
            before = named.get(key, 0)
            above |= before
            named[key] = before | 1 << position
        needs.append(above)
    return needs
