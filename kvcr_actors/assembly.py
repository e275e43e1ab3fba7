"""One controller's life on a loop: ports open, actors run, everything closes in order."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import anyio
import anyio.abc
import structlog

from kvcr_actors.actors.backup import BackupActor
from kvcr_actors.actors.confirmation import ConfirmationActor
from kvcr_actors.actors.deposit import DepositActor
from kvcr_actors.actors.prefetch import PrefetchActor, end_ready
from kvcr_actors.actors.publisher import PublisherActor
from kvcr_actors.actors.reading import PrefixReader
from kvcr_actors.actors.restore import RestoreActor
from kvcr_actors.actors.state import Inboxes, LoopState
from kvcr_actors.actors.store_guard import GuardedStore
from kvcr_actors.config import ControllerConfig
from kvcr_actors.core.host_tier import HostTier
from kvcr_actors.core.inventory import InventoryEvent
from kvcr_actors.core.ledger import ClaimLedger
from kvcr_actors.core.stats import ControllerStats
from kvcr_actors.desk import EngineDesk
from kvcr_actors.errors import ControllerClosedError, DeadlineError
from kvcr_actors.messages import Completion, ControllerFailed
from kvcr_actors.ports import Device, EventSink, Ranks, RunningEventSink, Store
from kvcr_actors.runtime.bell import LoopBell
from kvcr_actors.runtime.breath import no_breath
from kvcr_actors.runtime.inbox import Inbox
from kvcr_actors.runtime.outbox import Outbox
from kvcr_actors.runtime.runtime import Runtime
from kvcr_actors.runtime.supervisor import ActorSpec, RestartPolicy, raising_sole_cause
from kvcr_actors.services import LoopServices, StoreServices
from kvcr_actors.types import MissReason

log = structlog.get_logger()

_UNBOUNDED = sys.maxsize


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
    ) -> None:
        limit = config.inbox_limit
        self.config = config
        self.device = device
        self.store = store
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
        self.stats = ControllerStats()
        self.ledger = ClaimLedger()
        self.host = HostTier(device.layout, device.host.slots)
        self._ranks = ranks
        self._sinks = sinks
        self._relay = relay
        self._breathe = breathe
        self._bell: LoopBell | None = None
        self._runtime: Runtime | None = None
        self._state: LoopState | None = None
        self._failed = False

    def make_desk(self) -> EngineDesk:
        """The engine's side of the hand-off."""
        return EngineDesk(
            self.inboxes,
            self.outbox,
            self.ring,
            pools=len(self.device.layout.pools),
            host_on=self.device.host.slots > 0,
            store_on=self.store is not None,
        )

    def ring(self) -> None:
        """Wake the actors that have messages; from any thread."""
        if self._bell is not None:
            self._bell.ring()

    def post(self, call: Callable[[], None]) -> bool:
        """Run a call on the loop soon, from any thread; False if there is no loop."""
        if self._bell is None:
            return False
        self._bell.post(call)
        return True

    async def main(self, started: Callable[[], None], stop: anyio.Event) -> None:
        """Open, run until `stop`, drain, close. What is still quarantined at the end is logged, and left mapped."""
        bell = LoopBell(_log_fault, relay=self._relay)
        try:
            with raising_sole_cause():
                async with anyio.create_task_group() as tasks:
                    self._bell = bell
                    await self._run_sinks(tasks, bell, started, stop)
                    tasks.cancel_scope.cancel()
        except Exception as error:
            self._tell_failure(error)
            raise
        finally:
            self._close_inboxes()
            self._bell = None
            bell.close()
            self._publish_last()
            if self.ledger.open:
                log.error("controller.claims_left", claims=[repr(claim) for claim in self.ledger.open_claims()])

    async def _run_sinks(
        self, tasks: anyio.abc.TaskGroup, bell: LoopBell, started: Callable[[], None], stop: anyio.Event
    ) -> None:
        services = LoopServices(tasks, bell, self._refuse_events)
        opened: list[RunningEventSink] = []
        try:
            for sink in self._sinks:
                if isinstance(sink, RunningEventSink):
                    await sink.open(services)
                    opened.append(sink)
            await self._run_ports(tasks, bell, started, stop)
        finally:
            self._publish_last()
            for sink in opened:
                await _close(f"event sink {type(sink).__name__}", sink.close, self.config.drain_budget_s)

    @staticmethod
    def _refuse_events(events: Sequence[InventoryEvent]) -> None:
        raise TypeError(f"an event sink published {len(events)} events; sinks only take them")

    async def _run_ports(
        self, tasks: anyio.abc.TaskGroup, bell: LoopBell, started: Callable[[], None], stop: anyio.Event
    ) -> None:
        def observe(events: Sequence[InventoryEvent]) -> None:
            state.observe_store(events)

        services = LoopServices(tasks, bell, observe)
        state = self._state = LoopState(
            config=self.config,
            host=self.host,
            ledger=self.ledger,
            stats=self.stats,
            device=self.device,
            store=None if self.store is None else GuardedStore(self.store, self.stats),
            ranks=self._ranks,
            inboxes=self.inboxes,
            outbox=self.outbox,
            breathe=self._breathe,
        )
        await self.device.open(services)
        try:
            if self.store is None:
                await self._run_actors(state, bell, started, stop)
            else:
                await self.store.open(StoreServices(tasks, bell, observe, self.stats), self.device.host)
                await self._run_with_store(self.store, state, bell, started, stop)
        finally:
            await _close("device", self.device.close, self.config.drain_budget_s)

    async def _run_with_store(
        self, store: Store, state: LoopState, bell: LoopBell, started: Callable[[], None], stop: anyio.Event
    ) -> None:
        try:
            await self._run_actors(state, bell, started, stop)
        finally:
            await _close("store", store.close, self.config.drain_budget_s)

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
            end_ready(state, MissReason.STOPPED)
            self._tell_failure(error)
            raise
        finally:
            end_ready(state, MissReason.STOPPED)

    def _specs(self, state: LoopState) -> list[ActorSpec[Any]]:
        """The actors in the order in which they drain: who feeds another drains before it."""
        config = self.config
        restart = RestartPolicy(config.restarts, config.restart_window_s, config.restart_backoff_s)
        spec = partial(ActorSpec[Any], restart=restart, drain_budget_s=config.drain_budget_s)
        boxes = self.inboxes
        store = state.store
        reader = None if store is None or not self.host.capacity else PrefixReader(state, store)
        specs = [
            spec("prefetch", lambda tasks: PrefetchActor(state, reader, tasks, self._poke), boxes.prefetch),
            spec("restore", lambda tasks: RestoreActor(state, tasks, self._poke), boxes.restore),
            spec("backup", lambda _: BackupActor(state), boxes.backup),
            spec("confirmation", lambda tasks: ConfirmationActor(state, tasks, self._poke), boxes.confirmation),
        ]
        if store is not None:
            specs.append(spec("deposit", lambda tasks: DepositActor(state, store, tasks, self._poke), boxes.deposit))
        specs.append(spec("publisher", lambda _: self._publisher(state), boxes.publisher))
        return specs

    def _publisher(self, state: LoopState) -> PublisherActor:
        return PublisherActor(self._sinks, self.stats, state.overflow)

    def _publish_last(self) -> None:
        """Publish what came when the publisher had stopped."""
        if self._state is not None and self._state.overflow:
            self._publisher(self._state).abandon((), ControllerClosedError("the publisher has stopped"))

    def _tell_failure(self, error: Exception) -> None:
        """Take no more orders, and tell the engine why, once."""
        if self._failed:
            return
        self._failed = True
        log.error("controller.failed", error=str(error))
        self._close_inboxes()
        self.outbox.deliver((ControllerFailed(str(error) or repr(error)),))

    def _poke(self) -> None:
        if self._runtime is not None:
            self._runtime.poke()

    def when_quiet(self, call: Callable[[], None]) -> None:
        """Run `call` once no actor has anything to do. On the loop, while the actors run."""
        if self._runtime is None:
            call()
        else:
            self._runtime.when_quiet(call)

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
            "device": self.device.describe(),
            "store": None if self.store is None else self.store.describe(),
            "outbox": len(self.outbox),
        }

    def _close_inboxes(self) -> None:
        boxes = self.inboxes
        for inbox in (boxes.backup, boxes.confirmation, boxes.deposit, boxes.prefetch, boxes.restore, boxes.publisher):
            inbox.close()


async def _close(what: str, close: Callable[[float], Awaitable[None]], budget_s: float) -> None:
    """Close a port within its budget, whatever happens around it."""
    with anyio.CancelScope(shield=True):
        try:
            with anyio.fail_after(budget_s * 2):
                await close(budget_s)
        except (DeadlineError, TimeoutError) as error:
            log.error("controller.close_deadline", port=what, error=str(error))


def _log_fault(error: Exception) -> None:
    log.error("loop.call_failed", exc_info=error)
