"""One controller's life on a loop: ports open, actors run, everything closes in order."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import anyio
import anyio.abc
import attrs
import structlog

from kvcr_actors.actors.backup import BackupActor
from kvcr_actors.actors.confirmation import ConfirmationActor
from kvcr_actors.actors.deposit import DepositActor
from kvcr_actors.actors.prefetch import PrefetchActor, end_ready
from kvcr_actors.actors.publisher import Outlets, PublisherActor
from kvcr_actors.actors.reading import PrefixReader
from kvcr_actors.actors.resetting import Resets
from kvcr_actors.actors.restore import RestoreActor
from kvcr_actors.actors.state import Inboxes, LoopState
from kvcr_actors.config import ControllerConfig
from kvcr_actors.core.host_tier import HostPage, HostTier
from kvcr_actors.core.ledger import ClaimLedger
from kvcr_actors.core.policy_names import eviction_policy
from kvcr_actors.core.stats import ControllerStats
from kvcr_actors.desk import EngineDesk
from kvcr_actors.ending import Ending
from kvcr_actors.errors import ControllerClosedError, DeadlineError, ForeignExitError
from kvcr_actors.events.contexts import ContextTable
from kvcr_actors.events.feed import EventFeed
from kvcr_actors.messages import Completion
from kvcr_actors.port_life import PORT_CLOSE_BUDGETS, give_back, open_sinks, opened
from kvcr_actors.ports import Description, Device, EventSink, OperationId, Ranks, RankTerms, Store
from kvcr_actors.runtime.bell import LoopBell
from kvcr_actors.runtime.breath import no_breath
from kvcr_actors.runtime.endings import run_endings
from kvcr_actors.runtime.foreign import containing
from kvcr_actors.runtime.inbox import Inbox
from kvcr_actors.runtime.memory_lease import take_memory
from kvcr_actors.runtime.outbox import Outbox
from kvcr_actors.runtime.progress import Progress
from kvcr_actors.runtime.questions import Questions
from kvcr_actors.runtime.runtime import Runtime
from kvcr_actors.runtime.supervisor import ActorSpec, RestartPolicy, raising_sole_cause
from kvcr_actors.runtime.traces import traced
from kvcr_actors.services import LoopServices, StoreServices, refuse_events
from kvcr_actors.store_slot import STORE_CLOSE_BUDGETS, StoreSlot
from kvcr_actors.types import MissReason, SkipReason

log = structlog.get_logger()

_UNBOUNDED = sys.maxsize
_CLOSE_MARGIN_S = 5.0
_QUIET_BUDGETS = 1
"""Drain budgets for the memory of a controller that failed to become quiet."""


class Assembly:
    """The parts of one controller. Made on any thread; `main` is the program that a host runs, once.

    `relay` says whether other threads ring the bell (see `LoopBell`), `breathe` is for a loop in a thread of its own.
    """

    def __init__(
        self,
        config: ControllerConfig,
        *,
        device: Device,
        store: Store | None,
        ranks: Ranks,
        sinks: Sequence[EventSink],
        relay: bool,
        breathe: Callable[[], None] = no_breath,
        contexts: ContextTable | None = None,
    ) -> None:
        limit = config.inbox_limit
        self.config = config
        self.device = device
        self._first_store = store
        self._slot: StoreSlot | None = None
        self.inboxes = Inboxes(
            backup=Inbox("backup", limit),
            # Never shed: its messages are bounded by the steps in flight.
            confirmation=Inbox("confirmation", _UNBOUNDED),
            deposit=Inbox("deposit", limit),
            prefetch=Inbox("prefetch", limit),
            restore=Inbox("restore", limit),
            publisher=Inbox("publisher", limit),
        )
        self.outbox: Outbox[Completion] = Outbox()
        self.questions = Questions()
        """What other threads want of the loop."""
        self.resets = Resets(self.outbox, self.questions)
        self.stats = ControllerStats()
        self.ledger = ClaimLedger()
        self.restores = Progress("steps with restores that the device knows of")
        slots = device.host.slots
        self.host = HostTier(device.layout, slots, eviction_policy(config.host_eviction, slots, HostPage))
        self._ranks = ranks
        self._sinks = sinks
        self._feed = EventFeed(self.inboxes.publisher, has_sinks=bool(sinks))
        self._outlets = Outlets(sinks, self._feed, self.stats)
        self._relay = relay
        self._breathe = breathe
        self._contexts = contexts
        self._bell: LoopBell | None = None
        self._runtime: Runtime | None = None
        self._state: LoopState | None = None
        self._ending = Ending(self.ledger, self.outbox)
        self._has_started = False
        self.has_ended = False
        """Whether `main` is over."""

    @property
    def failure(self) -> Exception | None:
        """What ended the controller, if it was not its stop."""
        return self._ending.failure

    def explained(self, error: DeadlineError) -> DeadlineError:
        """The error of a close that ran out of time, with what has not ended. From any thread."""
        if self.has_ended:
            return error
        actors = () if self._runtime is None else self._runtime.unfinished
        words = (*(f"actor {name} runs" for name in actors), *self._ending.describe())
        return DeadlineError("; ".join((str(error), *words)))

    @property
    def store(self) -> Store | None:
        """The store that is attached, or will be at the start."""
        return self._first_store if self._slot is None else self._slot.store

    @property
    def stores(self) -> bool:
        """Whether there is a store, and this rank can use it."""
        store = self.store
        return store is not None and not store.traits.cannot_store

    @property
    def slot(self) -> StoreSlot:
        """Where stores are attached. ControllerClosedError before the start and after the end."""
        if self._slot is None or not self.questions.is_open:
            raise ControllerClosedError("the controller is not running; start it first")
        return self._slot

    @property
    def close_budget_s(self) -> float:
        """The most that an orderly close takes, where every actor and port uses up its budget, and must be given up."""
        others = len(attrs.fields(Inboxes)) + len(self._sinks) + 2  # the device and the ranks
        stores = 1 if self._slot is None else 1 + self._slot.given_up
        budgets = PORT_CLOSE_BUDGETS * others + STORE_CLOSE_BUDGETS * stores + _QUIET_BUDGETS
        return self.config.drain_budget_s * budgets + _CLOSE_MARGIN_S

    def make_desk(self) -> EngineDesk:
        """The engine's side of the hand-off."""
        return EngineDesk(
            self.inboxes,
            self.outbox,
            self.ring,
            self.ring_later,
            feed=self._feed,
            pools=len(self.device.layout.pools),
            host_on=self.device.host.slots > 0,
            store_on=lambda: self.stores,
            give_reset=self.resets.give,
            join_without=self._join_without if self._ranks.size > 1 else None,
        )

    def _join_without(self, operations: Sequence[OperationId]) -> None:
        """From the engine's thread: what never reaches the actors is joined with nothing, for the other ranks."""

        async def join() -> None:
            for operation in operations:
                self._ranks.propose(operation, 0).withdraw()

        self.questions.send(join)

    def ring(self) -> None:
        """Wake the actors that have messages; from any thread."""
        if self._bell is not None:
            self._bell.ring()

    def ring_later(self) -> None:
        """Wake the loop soon, for what can wait for a moment; from any thread."""
        if self._bell is not None:
            self._bell.ring_later()

    async def main(self, started: Callable[[], None], stop: anyio.Event) -> None:
        """Open, run until `stop`, drain, close.

        ConfigError before anything is opened if another controller has the memory; DeadlineError at the end if what was
        launched has not ended. What is still quarantined then is logged, and left mapped.
        """
        lease = take_memory(self.device, self.device.host)
        bell = LoopBell(self._note_fault, relay=self._relay)

        def note_started() -> None:
            self._has_started = True
            started()

        try:
            with raising_sole_cause(), containing():
                async with anyio.create_task_group() as tasks:
                    self._bell = bell
                    await self._run_sinks(tasks, bell, note_started, stop)
                    tasks.cancel_scope.cancel()
        except Exception as error:
            self._note_failure(error)
            for words in self._ending.describe():
                error.add_note(words)
            raise
        finally:
            self.has_ended = True
            run_endings(partial(self._end, bell), self._ending.tell, partial(give_back, lease, self._ending.late))
        self._ending.check()

    def _end(self, bell: LoopBell) -> None:
        self._close_inboxes()
        self.restores.end()
        self._bell = None
        bell.close()
        self.questions.end()
        self.resets.end()
        self._feed.close()
        self._outlets.publish(last=True)
        if self.ledger.open:
            log.error("controller.claims_left", claims=[repr(claim) for claim in self.ledger.open_claims()])

    async def _run_sinks(
        self, tasks: anyio.abc.TaskGroup, bell: LoopBell, started: Callable[[], None], stop: anyio.Event
    ) -> None:
        services = LoopServices(tasks, bell, refuse_events)
        async with AsyncExitStack() as sinks:
            await open_sinks(sinks, self._sinks, services, self.config.drain_budget_s, self._ending.late)
            try:
                await self._run_ports(tasks, bell, started, stop)
            finally:
                run_endings(self._ending.settle, partial(self._outlets.publish, last=True))

    async def _run_ports(
        self, tasks: anyio.abc.TaskGroup, bell: LoopBell, started: Callable[[], None], stop: anyio.Event
    ) -> None:
        services = LoopServices(tasks, bell, refuse_events)
        state = self._state = LoopState(
            config=self.config,
            host=self.host,
            ledger=self.ledger,
            stats=self.stats,
            device=self.device,
            store=None,
            ranks=self._ranks,
            inboxes=self.inboxes,
            outbox=self.outbox,
            services=services,
            feed=self._feed,
            restores=self.restores,
            breathe=self._breathe,
            contexts=self._contexts,
        )
        self.questions.start(bell, tasks)
        late, budget_s, terms = self._ending.late, self.config.drain_budget_s, self._rank_terms()
        slot = self._slot = StoreSlot(state, lambda observe: StoreServices(tasks, bell, observe, self.stats), late)
        self.resets.start(state, slot)
        async with (
            opened("device", self.device, partial(self.device.open, services), budget_s, late, uses_memory=True),
            opened("ranks", self._ranks, partial(self._ranks.open, services, terms), budget_s, late),
        ):
            try:
                if self._first_store is not None:
                    await slot.attach(self._first_store)
                await self._run_actors(state, bell, started, stop)
            finally:
                await slot.close(budget_s)

    def _rank_terms(self) -> RankTerms:
        """What all ranks must share: prefixes are agreed in pages, deadlines and policies decide what each proposes."""
        settings = {name: str(value) for name, (value, _) in self.config.effective().items()}
        return RankTerms(
            self.config.agreement_deadline_s, {**settings, "page_tokens": str(self.device.layout.page_tokens)}
        )

    async def _run_actors(
        self, state: LoopState, bell: LoopBell, started: Callable[[], None], stop: anyio.Event
    ) -> None:
        specs = self._specs(state)
        for spec in specs:
            bell.attach(spec.inbox)
        runtime = self._runtime = Runtime(specs, log)
        try:
            await runtime.run(started, stop)
        except Exception as error:
            self._note_failure(error)
            self._end_open(state)
            await self._ending.wait_quiet(state, self.config.drain_budget_s, self.resets)
            raise
        finally:
            self._end_open(state)

    @staticmethod
    def _end_open(state: LoopState) -> None:
        run_endings(partial(end_ready, state, MissReason.STOPPED), partial(state.owed.end, SkipReason.STOPPED))

    def _specs(self, state: LoopState) -> list[ActorSpec[Any]]:
        """The actors in the order in which they drain: who feeds another drains before it."""
        config = self.config
        restart = RestartPolicy(config.restarts, config.restart_window_s, config.restart_backoff_s)
        spec = partial(ActorSpec[Any], restart=restart, drain_budget_s=config.drain_budget_s)
        boxes = self.inboxes
        reader = PrefixReader(state)
        specs = [
            spec("prefetch", lambda tasks: PrefetchActor(state, reader, tasks, self._poke), boxes.prefetch),
            spec("restore", lambda tasks: RestoreActor(state, tasks, self._poke), boxes.restore),
            spec("backup", lambda _: BackupActor(state), boxes.backup),
            spec("confirmation", lambda tasks: ConfirmationActor(state, tasks, self._poke), boxes.confirmation),
            spec("deposit", lambda tasks: DepositActor(state, tasks, self._poke), boxes.deposit),
        ]
        specs.append(spec("publisher", lambda tasks: PublisherActor(self._outlets, tasks), boxes.publisher))
        return specs

    def _note_failure(self, error: Exception) -> None:
        """Take no more orders; the engine is told why when its memory is quiet."""
        if self._ending.failure is not None:
            return
        self._ending.failure = error
        self.questions.fail(error)
        if self._has_started:  # else `start` raises it
            log.error("controller.failed", error=str(error))
        self._close_inboxes()

    def _note_fault(self, error: Exception) -> None:
        """A call that another thread posted has raised; what is no `Exception` ends the controller."""
        log.error("loop.call_failed", traceback=traced(error))
        if isinstance(error, ForeignExitError):
            self.questions.send(partial(_raise, error))

    def _poke(self) -> None:
        if self._runtime is not None:
            self._runtime.poke()

    async def wait_quiet(self) -> None:
        """Wait until no actor has anything to do; ControllerClosedError if they failed. On the loop."""
        if self._runtime is not None:
            await self._runtime.wait_quiet()

    def describe(self) -> dict[str, Any]:
        """Every actor, inbox and open claim, the tiers and the ports. On the loop."""
        return {
            "actors": {} if self._runtime is None else self._runtime.describe(),
            "claims": {
                "taken": self.ledger.taken,
                "released": self.ledger.released,
                "open": [repr(claim) for claim in self.ledger.open_claims()],
                "quarantined_bytes": self.ledger.quarantined_bytes,
            },
            "host": {
                "capacity": self.host.capacity,
                "ready_pages": self.host.ready_pages,
                "filling_pages": self.host.filling_pages,
            },
            "device": _described(self.device.describe),
            "store": None if self.store is None else _described(self.store.describe),
            "ranks": _described(self._ranks.describe),
            "outbox": len(self.outbox),
        }

    def _close_inboxes(self) -> None:
        boxes = self.inboxes
        for inbox in (boxes.backup, boxes.confirmation, boxes.deposit, boxes.prefetch, boxes.restore, boxes.publisher):
            inbox.close()


def _described(describe: Callable[[], Description]) -> Description:
    """A port that cannot describe itself must not hide the rest: its error stands in its place."""
    try:
        return describe()
    except Exception as error:  # noqa: BLE001 - told in the place of what it hides
        log.warning("controller.port_not_described", traceback=traced(error))
        return {"error": repr(error)}


async def _raise(error: Exception) -> None:
    raise error
