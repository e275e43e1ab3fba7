"""The front door for a synchronous scheduler loop; `aio.open_controller` is the one for asynchronous code."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from time import monotonic
from types import TracebackType
from typing import Any, Literal, TypeAlias, TypeVar

from kvcr_actors.assembly import Assembly
from kvcr_actors.config import ControllerConfig
from kvcr_actors.core.inventory import InventoryEvent
from kvcr_actors.core.ledger import ClaimLedger
from kvcr_actors.core.stats import ControllerStats
from kvcr_actors.core.values import checked_seconds
from kvcr_actors.errors import ConfigError, DeadlineError
from kvcr_actors.events.contexts import ContextTable
from kvcr_actors.messages import BackupAck, Completion
from kvcr_actors.port_life import check_store
from kvcr_actors.ports import Device, EventSink, Ranks, Store
from kvcr_actors.ranks.single import SingleRank
from kvcr_actors.runtime.breath import Breath, no_breath
from kvcr_actors.runtime.hosts import ThreadHost
from kvcr_actors.runtime.inline_host import InlineHost
from kvcr_actors.store_slot import HostCleared, StoreSlot
from kvcr_actors.types import BackupNode, PageKey, PrefetchRequest, RequestId, RestoreOrder

HostKind: TypeAlias = Literal["thread", "inline"]
Loop: TypeAlias = Literal["asyncio", "trio"]

T = TypeVar("T")


class CacheController:
    """The controller as a scheduler loop sees it: it appends, flushes once a step, and takes completions.

    With `host="thread"` the actors run on a loop in a thread of their own; with `host="inline"` they move only inside
    `pump`, `wait` and `close`, on the caller's thread. All methods but `close` belong to the engine's thread.
    `contexts` takes what the nodes say of their tokens; event sinks that name tokens read it.
    """

    def __init__(
        self,
        config: ControllerConfig | None = None,
        *,
        device: Device,
        store: Store | None = None,
        ranks: Ranks | None = None,
        sinks: Sequence[EventSink] = (),
        contexts: ContextTable | None = None,
        host: HostKind = "thread",
        loop: Loop = "asyncio",
    ) -> None:
        self.config = config or ControllerConfig()
        threaded = host == "thread"
        self._assembly = Assembly(
            self.config,
            device=device,
            store=store,
            ranks=ranks or SingleRank(),
            sinks=sinks,
            relay=threaded,
            breathe=Breath() if threaded else no_breath,
            contexts=contexts,
        )
        self._host: ThreadHost | InlineHost
        if host == "thread":
            self._host = ThreadHost(self._assembly.main, backend=loop)
        elif host == "inline":
            self._host = InlineHost(self._assembly.main, backend=loop)
        else:
            raise ConfigError(f"host {host!r}: choose 'thread' or 'inline'")
        self._desk = self._assembly.make_desk()
        self._set_aside: list[Completion] = []
        # The hot methods are the desk's own: a further call a node would be a third of its cost.
        self.write = self._desk.write
        self.flush_pending_backups = self._desk.flush_pending_backups

    def start(self, timeout_s: float = 60.0) -> CacheController:
        """Open device and store and start the actors; raises what keeps them from starting."""
        self._host.start(checked_seconds("timeout_s", timeout_s))
        return self

    def close(self, timeout_s: float | None = None) -> None:
        """Drain and stop; a second call has nothing to do. Completions can still be taken afterwards.

        Raises what the controller failed with, or DeadlineError that names what still runs: copies that were launched
        may then write host memory and device pages later. If it returns, nothing writes any memory. A timeout cuts the
        drain short; the default is as long as the configured budgets together.
        """
        budget_s = self._assembly.close_budget_s if timeout_s is None else checked_seconds("timeout_s", timeout_s)
        try:
            self._host.stop(budget_s)
        except DeadlineError as error:
            raise self._assembly.explained(error) from error.__cause__

    def __enter__(self) -> CacheController:
        return self.start()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def prefetch(self, request: PrefetchRequest) -> None:
        """Ask for a request's prefix; it leaves with the end of the step."""
        self._desk.prefetch(request)

    def restore(self, order: RestoreOrder) -> None:
        """Ask for a ready prefix in the device pages given; all restores of a step become one submit."""
        self._desk.restore(order)

    def cancel(self, request_id: RequestId) -> None:
        """End a prefetch, wherever it stands; it leaves with the end of the step."""
        self._desk.cancel(request_id)

    def stop_prefetch(self, request_id: RequestId) -> None:
        """Have a request do with what has arrived, unless its policy is to wait; it leaves with the end of the step."""
        self._desk.stop_prefetch(request_id)

    def publish(self, events: Sequence[InventoryEvent]) -> None:
        """Publish inventory events of the engine's own tier with the end of the step."""
        self._desk.publish(events)

    def take(self) -> list[Completion]:
        """Everything that completed since the last call; never waits."""
        if self._set_aside:
            self._desk.check_process()
            aside, self._set_aside = self._set_aside, []
            return [*aside, *self._desk.take()]
        return self._desk.take()

    def wait(self, timeout_s: float) -> bool:
        """For an idle engine: block until a completion can be taken, or the timeout; True if one can."""
        self._check_wait(timeout_s)
        if self._set_aside:
            return True
        if isinstance(self._host, InlineHost):
            return self._pump_until(lambda: len(self._assembly.outbox) > 0, timeout_s)
        return self._assembly.outbox.wait(timeout_s)

    def wait_restores_submitted(self, timeout_s: float = 1.0) -> None:
        """Block until the device knows of every restore that was flushed: then its `wait_layer` waits for them.

        For an engine that launches a step over pages that are being restored (docs/engines.md). One that comes to
        nothing is not waited for: its completion tells. DeadlineError after `timeout_s`; ControllerClosedError if the
        controller ended before.
        """
        self._check_wait(timeout_s)
        restores, number = self._assembly.restores, self._desk.restore_steps
        if isinstance(self._host, InlineHost):
            self._pump_until(lambda: restores.settles(number), timeout_s)
            restores.check(number, timeout_s)
        else:
            restores.wait(number, timeout_s)

    def write_back(
        self, nodes: Sequence[BackupNode], fence: object | None = None, timeout_s: float = 30.0
    ) -> BackupAck:
        """Back up nodes and wait for their ack: the last resort of a write-back policy.

        What is queued is flushed first, as a step of its own. DeadlineError names the step that did not end in time.
        """
        self._check_wait(timeout_s)
        self.flush_pending_backups(fence)
        self._desk.write_all(nodes)
        step = self.flush_pending_backups(fence)
        deadline = monotonic() + timeout_s
        while step is not None:
            found: BackupAck | None = None
            for completion in self._desk.take():
                if isinstance(completion, BackupAck) and completion.step == step:
                    found = completion
                else:
                    self._set_aside.append(completion)
            if found is not None:
                return found
            left = deadline - monotonic()
            if left <= 0 or not self._wait_outbox(left):
                raise DeadlineError(f"write_back: step {step} was not acknowledged within {timeout_s:g} s")
        return BackupAck(0, ())

    def pump(self, turns: int = 1) -> bool:
        """Run the actors for a while on this thread (`host="inline"` only); whether something is left to run."""
        if not isinstance(self._host, InlineHost):
            raise ConfigError("pump: the actors run on a thread of their own; it is for host='inline'")
        return self._host.pump(turns)

    def wait_quiet(self, timeout_s: float) -> None:
        """Wait until every actor has handled all that was handed over; DeadlineError after `timeout_s`.

        ControllerClosedError if the controller failed.
        """
        self._check_wait(timeout_s)
        self._answer("to be quiet", timeout_s, self._assembly.questions.run(self._assembly.wait_quiet))

    def attach_store(self, store: Store, timeout_s: float = 60.0) -> None:
        """Open a store and use it from now on; what stands in host memory is written to it. Works under load.

        If its namespace is another than that of the store before, host memory is forgotten first, as by a `reset`.
        Raises what the store refuses with, ConfigError if one is attached, or DeadlineError.
        """
        self._check_wait(timeout_s)
        check_store(store)
        if self._assembly.slot.is_foreign(store):
            self._desk.forget()

        async def attach(slot: StoreSlot) -> None:
            await slot.attach(store)
            await slot.deposit_all()

        self._on_slot(f"to attach store {store.name}", timeout_s, attach)

    def detach_store(self, timeout_s: float = 60.0) -> None:
        """Use the store no more, let what is in flight end, and close it; serving goes on. Without a store: nothing."""
        budget_s = self.config.drain_budget_s
        self._on_slot("to detach the store", timeout_s, lambda slot: slot.detach(budget_s))

    def checkpoint(self, label: str, timeout_s: float = 300.0) -> None:
        """Bring every page of host memory to the store, or raise CheckpointError. Every rank gives the same label."""
        self._on_slot("for a checkpoint", timeout_s, lambda slot: slot.checkpoint(label))

    def reset(self, label: RequestId, *, clear: bool = False, store: Store | None = None) -> None:
        """Forget every page that was computed so far: new weights, a new tenant. It is an order, and does not wait.

        From now on no such page is used, wherever it stands, in host memory or in the store; what is written after the
        reset is. `clear` empties the store that is attached; `store` takes its place, and what the old one keeps stays
        under its namespace. With a store attached one of both is needed: ConfigError. `ResetFinished` has the label,
        which is the same on every rank, and says when all is over.
        """
        self._desk.reset(label, clear=clear, store=store, attached=self._assembly.store)

    def clear_host(self, timeout_s: float = 30.0) -> HostCleared:
        """Evict from host memory whatever no claim protects; says how many pages went, and why others stay."""

        async def clear(slot: StoreSlot) -> HostCleared:
            return slot.clear_host()

        return self._on_slot("to clear host memory", timeout_s, clear)

    def describe(self, timeout_s: float = 5.0) -> dict[str, Any]:
        """Every actor, inbox and open claim, the tiers and the ports, as they are now."""
        self._check_wait(timeout_s)
        if not self._host.is_running:
            return self._assembly.describe()
        return self._answer("to describe itself", timeout_s, self._assembly.questions.ask(self._assembly.describe))

    @property
    def claims(self) -> ClaimLedger:
        """The ledger of all claims; read its counters, exact once the controller is quiet or closed."""
        return self._assembly.ledger

    def host_contents(self, timeout_s: float = 30.0) -> frozenset[PageKey]:
        """The keys that stand ready in host memory, for checks and tools; costs time in proportion."""
        self._check_wait(timeout_s)
        if not self._host.is_running:
            return self._assembly.host.contents()
        return self._answer(
            "to list its host pages", timeout_s, self._assembly.questions.ask(self._assembly.host.contents)
        )

    @property
    def stats(self) -> ControllerStats:
        """All counters, in a copy: those of the loop and those of this thread."""
        return self._assembly.stats.merged(self._desk.stats)

    def _check_wait(self, timeout_s: float) -> None:
        """Before anything is asked: RuntimeError in a forked child, ConfigError for a time that is none."""
        self._desk.check_process()
        checked_seconds("timeout_s", timeout_s)

    def _wait_outbox(self, timeout_s: float) -> bool:
        if isinstance(self._host, InlineHost):
            return self._pump_until(lambda: len(self._assembly.outbox) > 0, timeout_s)
        return self._assembly.outbox.wait(timeout_s)

    def _pump_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        assert isinstance(self._host, InlineHost)  # noqa: S101 - for the type checker
        host = self._host
        try:
            # Nothing moves in a controller that does not run: then what is there is all there will be.
            host.pump_until(lambda: condition() or not host.is_running, timeout_s)
        except DeadlineError:
            return False
        return condition()

    def _on_slot(self, what: str, timeout_s: float, task: Callable[[StoreSlot], Awaitable[T]]) -> T:
        """Run a task about the store on the loop, and wait for its end."""
        self._check_wait(timeout_s)
        return self._answer(what, timeout_s, self._assembly.questions.run(lambda: task(self._assembly.slot)))

    def _answer(self, what: str, timeout_s: float, answer: Future[T]) -> T:
        """Wait for what the loop was asked. DeadlineError after `timeout_s`: then the loop goes on with it."""
        if isinstance(self._host, InlineHost):
            self._pump_until(answer.done, timeout_s)
        try:
            return answer.result(0 if isinstance(self._host, InlineHost) else timeout_s)
        except TimeoutError:
            if answer.done():  # its own
                raise
            raise DeadlineError(f"the controller took more than {timeout_s:g} s {what}; it goes on with that") from None
