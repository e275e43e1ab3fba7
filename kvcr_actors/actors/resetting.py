"""Reset: every page that was computed so far is forgotten, in one turn of the loop, wherever it stands.

The engine numbers its resets, and orders say how many were given before them. So it does not matter in which inbox an
order travels: one that was given before a reset is answered with `reset`, and one that was given after it begins the
reset, should it be the first to arrive. What is under way belongs to the generation of host pages in which it began
(see `HostTier.forget`): it cannot commit, deposit or restore any more, and its memory comes back when it is quiet.
The store is closed to all of that in the same turn. What takes time is awaited by a task, which tells of the end.
"""

from __future__ import annotations

from collections import deque
from functools import partial

import anyio
import attrs
import structlog

from kvcr_actors.actors.prefix_end import end_ready
from kvcr_actors.actors.state import LoopState
from kvcr_actors.messages import Completion, ResetCaches, ResetFinished
from kvcr_actors.ports import Agreement
from kvcr_actors.runtime.outbox import Outbox
from kvcr_actors.runtime.questions import Questions
from kvcr_actors.store_slot import StoreReset, StoreSlot
from kvcr_actors.types import MissReason, RequestId

log = structlog.get_logger()

_STOPPED = "the controller stopped before the reset was over"


@attrs.frozen(eq=False)
class _Begun:
    """A reset whose pages are forgotten; what is left is to wait."""

    label: RequestId
    host_pages: int
    gone: anyio.Event
    """Whether the slots of all of them are free."""
    gone_by: float
    ended_before: int
    store: StoreReset
    agreement: Agreement


class Resets:
    """The resets of one controller. `give` is for the engine's thread, the rest belongs to the loop."""

    def __init__(self, outbox: Outbox[Completion], questions: Questions) -> None:
        self._outbox = outbox
        self._questions = questions
        self._given: deque[ResetCaches] = deque()
        self._parts: tuple[LoopState, StoreSlot] | None = None
        self._running = 0

    @property
    def open(self) -> int:
        """Resets that are not answered."""
        return len(self._given) + self._running

    def give(self, order: ResetCaches) -> None:
        """Have a reset begin soon: before any order that is handed over after it."""
        self._given.append(order)
        if not self._questions.send(self._errand):
            self.end()

    def start(self, state: LoopState, slot: StoreSlot) -> None:
        """From now on there is something to forget."""
        self._parts = state, slot
        state.begin_resets = self.begin

    def begin(self) -> None:
        """Begin what was given: when this returns nothing of before can be used."""
        while self._parts is not None and self._given:
            self._begin(self._given.popleft(), *self._parts)

    def end(self) -> None:
        """Answer those that never began."""
        while self._given:
            label = self._given.popleft().label
            if label is not None:
                self._outbox.deliver((ResetFinished(label, 0, error=_STOPPED),))

    async def _errand(self) -> None:
        self.begin()

    def _begin(self, order: ResetCaches, state: LoopState, slot: StoreSlot) -> None:
        state.resets = order.number
        gone, ended_before = anyio.Event(), state.ended_by_reset
        begun = slot.begin_reset(order)
        host_pages = state.forget_host(gone.set)
        state.end_searches(MissReason.RESET)
        end_ready(state, MissReason.RESET)
        state.publish_changes()
        log.info("reset.begun", label=order.label, host_pages=host_pages)
        if order.label is None:
            return
        gone_by = anyio.current_time() + max(state.config.copy_deadline_s, state.config.drain_budget_s)
        agreement = state.ranks.propose(("reset", order.label), 1)
        reset = _Begun(order.label, host_pages, gone, gone_by, ended_before, begun, agreement)
        self._running += 1
        state.services.spawn(partial(self._finish, reset, state, slot), f"reset {order.label}")

    async def _finish(self, reset: _Begun, state: LoopState, slot: StoreSlot) -> None:
        errors, store_pages = [_STOPPED], 0
        try:
            store_pages, found = await slot.end_reset(reset.store)
            with anyio.CancelScope(deadline=reset.gone_by):
                await reset.gone.wait()
            if not await reset.agreement.outcome():
                found.append("another rank did not reset, or did not answer")
            errors = found
        finally:
            reset.agreement.withdraw()
            ended, kept = state.ended_by_reset - reset.ended_before, 0
            if not reset.gone.is_set():
                kept = state.host.forgotten_pages
            finished = ResetFinished(reset.label, reset.host_pages, store_pages, ended, kept, "; ".join(errors) or None)
            log.info("reset.finished", **attrs.asdict(finished))
            state.outbox.deliver((finished,))
            self._running -= 1
        if reset.store.comes is not None:
            await slot.deposit_all()  # pages that were backed up while there was no store
