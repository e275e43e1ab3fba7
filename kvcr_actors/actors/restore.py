"""Restore, host to device: a step's orders become one submit, and their claims end when it is quiet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import anyio
import attrs
import structlog

from kvcr_actors.actors.state import LoopState
from kvcr_actors.core.copy_plan import Direction, is_within, plan_copy
from kvcr_actors.core.prefetch_state import HeldPrefix, Phase
from kvcr_actors.messages import RestoreFinished, RestoreStep
from kvcr_actors.ports import CopyOutcome
from kvcr_actors.runtime.endings import run_endings
from kvcr_actors.runtime.foreign import Tasks
from kvcr_actors.transfers import Operation
from kvcr_actors.types import NO_SLOT, Components, MissReason, RestoreOrder

log = structlog.get_logger()


@attrs.frozen(eq=False)
class _Taken:
    """An order and the prefix that it took over."""

    order: RestoreOrder
    prefix: HeldPrefix
    slots: Components = ()
    first: int = 0
    """The page of the prefix up to which the device had it before."""


class RestoreActor:
    """Copies prefixes that stand ready to the device pages that the engine names."""

    name = "restore"

    def __init__(self, state: LoopState, tasks: Tasks, poke: Callable[[], None]) -> None:
        self._state = state
        self._tasks = tasks
        self._poke = poke
        self._open: set[Operation[CopyOutcome]] = set()
        self._idle = anyio.Event()

    @property
    def busy(self) -> int:
        """Submits in flight."""
        return len(self._open)

    async def handle(self, batch: Sequence[RestoreStep]) -> None:
        """Submit each step's orders together."""
        for step in batch:
            # What stood ready before a reset ended with it; an id may name a later request by now.
            if not self._state.is_stale(step.resets):
                self._submit(step)
            self._state.restores.reach(step.number)

    def abandon(self, batch: Sequence[RestoreStep], error: BaseException) -> None:
        """End the orders of the batch whose prefix still stands ready, as failed."""
        log.error("restore.abandoned", error=repr(error))
        taken: list[_Taken] = []
        for order in (order for step in batch if not self._state.is_stale(step.resets) for order in step.orders):
            prefix = self._state.prefixes.pop(order.request_id, None)
            if prefix is not None:
                prefix.advance(Phase.RESTORING)
                taken.append(_Taken(order, prefix, first=order.first))
        run_endings(
            partial(self._finish, taken, ok=False),
            *(partial(self._state.restores.reach, step.number) for step in batch),
        )

    async def drain(self) -> None:
        """Wait for the copies in flight; the supervisor sets the budget."""
        while self._open:
            self._idle = anyio.Event()
            await self._idle.wait()

    def describe(self) -> dict[str, Any]:
        """Copies in flight and restored pages, for people."""
        return {"in_flight": self.busy, "restored_pages": self._state.stats.restored_pages}

    def _submit(self, step: RestoreStep) -> None:
        state = self._state
        taken: list[_Taken] = []
        copy: Operation[CopyOutcome] | None = None
        handed_over = False
        try:
            for order in step.orders:
                self._take(order, taken)
            copying = [one for one in taken if one.order.count]
            if copying:
                plan = plan_copy(Direction.TO_DEVICE, [(one.order.pages, one.slots) for one in copying])
                copy = state.device.submit(plan, () if step.fence is None else (step.fence,))
                state.stats.restore_submits += 1
                self._tasks.start_soon(self._follow, copy, copying, name="restore")
                self._open.add(copy)
            handed_over = True
        finally:
            if handed_over or copy is None:
                self._finish([one for one in taken if not handed_over or not one.order.count], ok=handed_over)
            else:
                self._settle(copy, taken, None)

    def _take(self, order: RestoreOrder, taken: list[_Taken]) -> None:
        """Take over a ready prefix. One that was cancelled or expired has its own ending, so the order is moot."""
        prefix = self._state.prefixes.pop(order.request_id, None)
        if prefix is None:
            log.info("restore.moot", request_id=order.request_id)
            return
        prefix.advance(Phase.RESTORING)
        pages = prefix.pages[order.first : order.first + order.count]
        pools = len(self._state.device.layout.pools)
        fits = prefix.request.device_pages <= order.first <= len(prefix.pages) - order.count
        if not fits or len(order.pages) != pools or not is_within(order.pages, self._state.device_pages()):
            log.error("restore.refused", request_id=order.request_id, first=order.first, count=order.count)
            first = order.first if order.first <= len(prefix.pages) else prefix.request.device_pages
            self._finish([_Taken(order, prefix, first=first)], ok=False)
            return
        slots = tuple(zip(*(page.slots for page in pages), strict=True)) if pages else ()
        taken.append(_Taken(order, prefix, slots, order.first))

    async def _follow(self, copy: Operation[CopyOutcome], taken: Sequence[_Taken]) -> None:
        """Wait for the copy to be quiet: until then the engine must not reuse its pages, nor the host its slots."""
        outcome: CopyOutcome | None = None
        try:
            with anyio.move_on_after(self._state.config.copy_deadline_s):
                outcome = await copy.outcome()
                await copy.quiet()
            if outcome is None or not copy.is_quiet:
                log.error("restore.deadline", orders=len(taken), seconds=self._state.config.copy_deadline_s)
                outcome = None
        finally:
            # The claims stay while the copy may still read the slots.
            run_endings(partial(self._settle, copy, taken, outcome), partial(self._forget, copy), self._poke)

    def _forget(self, copy: Operation[CopyOutcome]) -> None:
        self._open.discard(copy)
        if not self._open:
            self._idle.set()

    def _settle(self, copy: Operation[CopyOutcome], taken: Sequence[_Taken], outcome: CopyOutcome | None) -> None:
        state = self._state
        if not copy.is_quiet:
            size = sum(one.order.count for one in taken) * state.device.layout.page_bytes
            self._finish_when_quiet(copy, taken, size)
            return
        failed: Mapping[int, str] = {} if outcome is None else outcome.failed
        for pool, error in failed.items():
            log.error("restore.pool_failed", pool=state.device.layout.pools[pool].name, error=error)
        hurt = [one for one in taken if any(slot != NO_SLOT for pool in failed for slot in one.slots[pool])]
        self._finish([one for one in taken if one not in hurt], ok=outcome is not None)
        self._finish(hurt, ok=False)

    def _finish_when_quiet(self, copy: Operation[CopyOutcome], taken: Sequence[_Taken], size: int) -> None:
        finish = partial(run_endings, partial(self._finish, taken, ok=False))
        claim = self._state.ledger.take("restore", "late copy", finish)
        run_endings(partial(self._state.release_when_quiet, copy, claim, size))

    def _finish(self, taken: Sequence[_Taken], *, ok: bool) -> None:
        """Release the prefixes and tell the engine how far the device has each."""
        answers: list[RestoreFinished] = []
        endings = [partial(self._end, one, answers, ok=ok) for one in taken]
        run_endings(*endings, partial(self._state.outbox.deliver, answers))

    def _end(self, one: _Taken, answers: list[RestoreFinished], *, ok: bool) -> None:
        order, prefix, stats = one.order, one.prefix, self._state.stats
        if not prefix.is_over:
            prefix.end()
        if prefix.answered:
            return
        if not prefix.is_current:
            ok, self._state.ended_by_reset = False, self._state.ended_by_reset + 1
        used = one.first + order.count if ok else one.first
        failure = MissReason.RESTORE_FAILED if prefix.is_current else MissReason.RESET
        account = prefix.account(used, MissReason.NOT_RESTORED if ok else failure, one.first)
        answers.append(prefix.answer(RestoreFinished(order.request_id, used, account)))
        stats.settle(account)
        if not ok:
            stats.prefetch.failed += 1
        elif order.count:
            stats.prefetch.used += 1
            stats.restored_pages += order.count
        else:
            stats.prefetch.cancelled += 1
