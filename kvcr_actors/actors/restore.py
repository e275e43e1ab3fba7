"""Restore, host to device: a step's orders become one submit, and their claims end when it is quiet.

An order may ask for less than stands ready, begin where the engine likes, and name no device page where it wants none.
So the pools' policies are asked again: what is copied and told ends at the longest prefix that every pool allows, given
what the device has before the order's first page, what the host has, and what the order names pages for. Ranks choose
among the lengths on which they agreed. An order that begins beyond what the device has would leave a hole: nothing is
copied then.
"""

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
from kvcr_actors.types import Components, MissReason, RestoreOrder

log = structlog.get_logger()


@attrs.frozen(eq=False)
class _Taken:
    """An order and the prefix that it took over."""

    order: RestoreOrder
    prefix: HeldPrefix
    end: int = 0
    """The page of the prefix up to which the device has it when the copy succeeds."""

    @property
    def count(self) -> int:
        """Pages to copy."""
        return max(0, self.end - self.order.first)

    @property
    def copied(self) -> tuple[Components, Components]:
        """The device pages and host slots of what is copied."""
        pages, first = self.order.pages, self.order.first
        slots = tuple(zip(*(page.slots for page in self.prefix.pages[first : self.end]), strict=True))
        return tuple(one[: self.count] for one in pages), slots


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
                taken.append(_Taken(order, prefix))
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
            copying = [one for one in taken if one.count]
            if copying:
                plan = plan_copy(Direction.TO_DEVICE, [one.copied for one in copying])
                copy = state.device.submit(plan, () if step.fence is None else (step.fence,))
                state.stats.restore_submits += 1
                self._tasks.start_soon(self._follow, copy, copying, name="restore")
                self._open.add(copy)
            handed_over = True
        finally:
            if handed_over or copy is None:
                self._finish([one for one in taken if not handed_over or not one.count], ok=handed_over)
            else:
                self._settle(copy, taken, None)

    def _take(self, order: RestoreOrder, taken: list[_Taken]) -> None:
        """Take over a ready prefix. One that was cancelled or expired has its own ending, so the order is moot."""
        prefix = self._state.prefixes.pop(order.request_id, None)
        if prefix is None:
            log.info("restore.moot", request_id=order.request_id)
            return
        prefix.advance(Phase.RESTORING)
        taken.append(_Taken(order, prefix))  # from here on it is answered, whatever raises
        layout, pages = self._state.device.layout, order.pages
        fits = prefix.fits(order) and len(pages) == len(layout.pools)
        if not fits or not is_within(pages, self._state.device_pages()):
            log.error("restore.refused", request_id=order.request_id, first=order.first, count=order.count)
            self._finish([taken.pop()], ok=False)
            return
        end = prefix.restore_end(order, layout)
        if end < order.first + order.count:
            log.info("restore.shortened", request_id=order.request_id, ordered=order.first + order.count, pages=end)
        taken[-1] = _Taken(order, prefix, end)

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
            size = sum(one.count for one in taken) * state.device.layout.page_bytes
            self._finish_when_quiet(copy, taken, size)
            return
        failed: Mapping[int, str] = {} if outcome is None else outcome.failed
        for pool, error in failed.items():
            log.error("restore.pool_failed", pool=state.device.layout.pools[pool].name, error=error)
        # Every policy asks for the last page of what is restored: no order can do without a pool.
        self._finish(taken, ok=outcome is not None and not failed)

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
        short = MissReason.INCOMPLETE if ok else MissReason.RESTORE_FAILED
        if not prefix.is_current:
            ok, short, self._state.ended_by_reset = False, MissReason.RESET, self._state.ended_by_reset + 1
        own = prefix.own_pages(order)
        used = one.end if ok else own
        account = prefix.account_for(order, used, short)
        answers.append(prefix.answer(RestoreFinished(order.request_id, used, account)))
        stats.settle(account)
        if used > own:
            stats.prefetch.used += 1
            stats.restored_pages += used - own
        elif order.count or not ok:
            stats.prefetch.failed += 1
        else:
            stats.prefetch.cancelled += 1
