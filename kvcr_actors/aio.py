"""The controller for asynchronous code: Jupyter cells, test harnesses, services. Orders are awaited."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import attrs
import structlog

from kvcr_actors.assembly import Assembly
from kvcr_actors.config import ControllerConfig
from kvcr_actors.core.inventory import InventoryEvent
from kvcr_actors.core.ledger import ClaimLedger
from kvcr_actors.core.stats import ControllerStats
from kvcr_actors.core.values import check_request_id, checked_seconds, named
from kvcr_actors.errors import ControllerClosedError, DeadlineError, InvalidNodeError
from kvcr_actors.events.contexts import ContextTable
from kvcr_actors.messages import (
    BackupAck,
    Completion,
    ControllerFailed,
    DepositFailed,
    PrefetchCancelled,
    PrefetchReady,
    ResetFinished,
    RestoreFinished,
)
from kvcr_actors.port_life import check_store
from kvcr_actors.ports import Device, EventSink, Ranks, Store
from kvcr_actors.ranks.single import SingleRank
from kvcr_actors.runtime.hosts import TaskHost
from kvcr_actors.runtime.supervisor import raising_sole_cause
from kvcr_actors.store_slot import HostCleared
from kvcr_actors.types import BackupNode, PageKey, PrefetchRequest, RequestId, RestoreOrder

log = structlog.get_logger()


KEPT = 4096
"""The most of what nobody has asked for that an `AsyncController` keeps of a kind; the oldest go first."""


@attrs.define(eq=False)
class _Waiter:
    """Somebody who waits for one completion."""

    arrived: anyio.Event = attrs.field(factory=anyio.Event)
    completion: Completion | None = None


class AsyncController:
    """The controller as a task of the loop that runs. Made by `open_controller`, or started and closed by hand.

    Start and close may happen in different tasks, such as two cells of a notebook. All methods belong to the loop's
    thread; each await has a deadline and raises DeadlineError past it.
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
    ) -> None:
        self.config = config or ControllerConfig()
        self._assembly = Assembly(
            self.config,
            device=device,
            store=store,
            ranks=ranks or SingleRank(),
            sinks=sinks,
            relay=True,
            contexts=contexts,
        )
        self._desk = self._assembly.make_desk()
        self._host = TaskHost(self._main)
        self._waiters: dict[Hashable, _Waiter] = {}
        self._ready: set[RequestId] = set()
        """Prefixes that stand ready for a restore."""
        self._expired: dict[RequestId, tuple[float, PrefetchCancelled]] = {}
        """How those ended that were given up first, and until when that is kept for their restore; oldest first."""
        self._left = Counter[RequestId]()
        """Cancelled prefetches whose end is to come: before the answer to a later request of the same id."""
        self._left_restores: set[RequestId] = set()
        """Restores whose caller has gone; their ids are in use until they are over."""
        self._failure: str | None = None
        self.unclaimed_acks: deque[BackupAck] = deque(maxlen=KEPT)
        """Acks of backups whose caller was cancelled or ran out of time, the newest; the caller may clear it."""
        self.failed_deposits: deque[DepositFailed] = deque(maxlen=KEPT)
        """Pages that stay out of the store, the newest; the caller may clear it, and `stats` counts all of them."""

    async def start(self, timeout_s: float = 60.0) -> AsyncController:
        """Open device and store and start the actors; raises what keeps them from starting."""
        await self._host.start(checked_seconds("timeout_s", timeout_s))
        return self

    async def close(self, timeout_s: float | None = None) -> None:
        """Drain and stop; a second call has nothing to do.

        Raises what the controller failed with, or DeadlineError that names what still runs: copies that were launched
        may then write host memory and device pages later. If it returns, nothing writes any memory. The default timeout
        is as long as the configured budgets together.
        """
        budget_s = self._assembly.close_budget_s if timeout_s is None else checked_seconds("timeout_s", timeout_s)
        try:
            await self._host.stop(budget_s)
        except DeadlineError as error:
            raise self._assembly.explained(error) from error.__cause__

    async def backup(
        self, nodes: Sequence[BackupNode], fence: object | None = None, timeout_s: float = 60.0
    ) -> BackupAck:
        """Back up nodes as one step, in one submit, and wait for its ack.

        The ack of a caller that is cancelled meanwhile, or runs out of time, goes to `unclaimed_acks`.
        """
        self._check_wait(timeout_s)
        self._desk.write_all(nodes)
        step = self._desk.flush_pending_backups(fence)
        if step is None:
            return BackupAck(0, ())
        what = f"the ack of step {step}"
        answer = await self._completion(("backup", step), what, timeout_s)
        if not isinstance(answer, BackupAck):
            raise InvalidNodeError(f"{what} was answered by {answer!r}")
        return answer

    async def prefetch(self, request: PrefetchRequest, timeout_s: float = 60.0) -> PrefetchReady:
        """Bring a prefix to host memory. Without an account in the answer, restore or cancel it.

        A caller that is cancelled meanwhile, or runs out of time, cancels the prefetch.
        """
        self._check_wait(timeout_s)
        self._desk.check_order(request, PrefetchRequest)
        what = f"the prefetch of {named(request.request_id)}"
        if ("request", request.request_id) in self._waiters or request.request_id in self._ready:
            raise InvalidNodeError(f"{what} is awaited already, or stands ready; use another request id")
        if request.request_id in self._left_restores:
            raise InvalidNodeError(f"{what}: a restore of that id is not over; use another request id")
        self._expired.pop(request.request_id, None)
        self._desk.prefetch(request)
        self._desk.flush_pending_backups()
        left = partial(self._left.update, (request.request_id,))
        try:
            answer = await self._completion(("request", request.request_id), what, timeout_s, left)
        except BaseException:
            self.cancel(request.request_id)
            raise
        if isinstance(answer, PrefetchCancelled):
            return PrefetchReady(request.request_id, request.device_pages, answer.account)
        if not isinstance(answer, PrefetchReady):
            raise InvalidNodeError(f"{what} was answered by {answer!r}; use a request id for one request at a time")
        return answer

    async def restore(
        self, order: RestoreOrder, fence: object | None = None, timeout_s: float = 60.0
    ) -> RestoreFinished | PrefetchCancelled:
        """Copy a ready prefix to device pages, and wait until it is there (or was cancelled, or expired).

        How a prefix expired is told for another `claim_lifetime_s`; after that it holds nothing.
        Past a DeadlineError the copy may still write to the device pages: do not reuse them.
        """
        self._check_wait(timeout_s)
        self._desk.check_order(order, RestoreOrder)
        what = f"the restore of {named(order.request_id)}"
        if (expired := self._expired.pop(order.request_id, None)) is not None:
            return expired[1]
        if order.request_id not in self._ready:
            raise InvalidNodeError(f"{what}: it holds nothing; await its prefetch first, and restore it once")
        self._desk.restore(order)
        self._ready.remove(order.request_id)
        self._desk.flush_pending_backups(fence)
        left = partial(self._left_restores.add, order.request_id)
        answer = await self._completion(("request", order.request_id), what, timeout_s, left)
        if not isinstance(answer, RestoreFinished | PrefetchCancelled):
            raise InvalidNodeError(f"{what} was answered by {answer!r}; use a request id for one request at a time")
        return answer

    async def wait_restores_submitted(self, timeout_s: float = 1.0) -> None:
        """Wait until the device knows of every restore that was begun: then its `wait_layer` waits for them.

        DeadlineError after `timeout_s`; ControllerClosedError if the controller ended before.
        """
        self._desk.check_process()
        checked_seconds("timeout_s", timeout_s)
        await self._assembly.restores.wait_async(self._desk.restore_steps, timeout_s)

    def cancel(self, request_id: RequestId) -> None:
        """End a prefetch, wherever it stands."""
        self._desk.check_process()
        check_request_id(request_id)
        if request_id in self._ready:
            self._ready.remove(request_id)
            self._left[request_id] += 1
        self._expired.pop(request_id, None)
        self._desk.cancel(request_id)
        self._desk.flush_pending_backups()

    def stop_prefetch(self, request_id: RequestId) -> None:
        """Have a request do with what has arrived, unless its policy is to wait."""
        self._desk.stop_prefetch(request_id)
        self._desk.flush_pending_backups()

    def publish(self, events: Sequence[InventoryEvent]) -> None:
        """Publish inventory events of the engine's own tier."""
        self._desk.publish(events)
        self._desk.flush_pending_backups()

    async def wait_quiet(self, timeout_s: float = 60.0) -> None:
        """Wait until every actor has handled all that was handed over."""
        self._check_wait(timeout_s)
        with anyio.move_on_after(timeout_s):
            await self._assembly.wait_quiet()
            return
        raise DeadlineError(f"the controller took more than {timeout_s:g} s to be quiet")

    async def attach_store(self, store: Store, timeout_s: float = 60.0) -> None:
        """Open a store and use it from now on; what stands in host memory is written to it. Works under load.

        If its namespace is another than that of the store before, host memory is forgotten first, as by a `reset`.
        Raises what the store refuses with, ConfigError if one is attached, or DeadlineError.
        """
        self._check_wait(timeout_s)
        check_store(store)
        if self._assembly.slot.is_foreign(store):
            self._desk.forget()
        with anyio.move_on_after(timeout_s):
            await self._assembly.slot.attach(store)
            await self._assembly.slot.deposit_all()
            return
        raise DeadlineError(f"store {store.name} was not attached and filled within {timeout_s:g} s")

    async def detach_store(self, timeout_s: float = 60.0) -> None:
        """Use the store no more, let what is in flight end, and close it; serving goes on. Without a store: nothing."""
        self._check_wait(timeout_s)
        with anyio.move_on_after(timeout_s):
            await self._assembly.slot.detach(self.config.drain_budget_s)
            return
        raise DeadlineError(f"the store was not closed within {timeout_s:g} s")

    async def checkpoint(self, label: str, timeout_s: float = 300.0) -> None:
        """Bring every page of host memory to the store, or raise CheckpointError. Every rank gives the same label."""
        self._check_wait(timeout_s)
        with anyio.move_on_after(timeout_s):
            await self._assembly.slot.checkpoint(label)
            return
        raise DeadlineError(f"checkpoint {label} was not over within {timeout_s:g} s")

    async def reset(
        self, label: RequestId, *, clear: bool = False, store: Store | None = None, timeout_s: float = 300.0
    ) -> ResetFinished:
        """Forget every page that was computed so far (see `CacheController.reset`), and wait until that is over.

        It holds from the call on, also for a caller that is cancelled or runs out of time.
        """
        self._check_wait(timeout_s)
        if label is not None:  # the desk's to refuse
            check_request_id(label, "label")
        what = f"the end of reset {named(label)}"
        if ("reset", label) in self._waiters:
            raise InvalidNodeError(f"{what} is awaited already; use another label")
        self._desk.reset(label, clear=clear, store=store, attached=self._assembly.store)
        answer = await self._completion(("reset", label), what, timeout_s)
        if not isinstance(answer, ResetFinished):
            raise InvalidNodeError(f"{what} was answered by {answer!r}")
        return answer

    def clear_host(self) -> HostCleared:
        """Evict from host memory whatever no claim protects; says how many pages went, and why others stay."""
        return self._assembly.slot.clear_host()

    def describe(self) -> dict[str, Any]:
        """Every actor, inbox and open claim, the tiers and the ports, as they are now."""
        return self._assembly.describe()

    def host_contents(self) -> frozenset[PageKey]:
        """The keys that stand ready in host memory; costs time in proportion."""
        return self._assembly.host.contents()

    @property
    def claims(self) -> ClaimLedger:
        """The ledger of all claims, for its counters."""
        return self._assembly.ledger

    @property
    def stats(self) -> ControllerStats:
        """All counters, in a copy."""
        return self._assembly.stats.merged(self._desk.stats)

    async def _main(self, started: Callable[[], None], stop: anyio.Event) -> None:
        with raising_sole_cause():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._dispatch, name="kvcr-actors completions")
                try:
                    await self._assembly.main(started, stop)
                finally:
                    self._hand_out()
                    self._failure = self._failure or "it was closed"
                    for waiter in self._waiters.values():
                        waiter.arrived.set()
                tasks.cancel_scope.cancel()

    async def _dispatch(self) -> None:
        while True:
            until = next(iter(self._expired.values()))[0] if self._expired else math.inf
            with anyio.CancelScope(deadline=until):
                await self._assembly.outbox.wait_async()
            self._hand_out()
            self._forget_expired()

    def _forget_expired(self) -> None:
        """Drop what was kept long enough: a caller who left between prefetch and restore does not come back."""
        now = anyio.current_time()
        while self._expired:
            request_id, (until, _) = next(iter(self._expired.items()))
            if until > now and len(self._expired) <= KEPT:
                break
            del self._expired[request_id]

    def _hand_out(self) -> None:
        for completion in self._desk.take():
            match completion:
                case BackupAck():
                    if not self._give(("backup", completion.step), completion):
                        self.unclaimed_acks.append(completion)
                case PrefetchReady() | PrefetchCancelled() | RestoreFinished():
                    self._give_request(completion)
                case DepositFailed():
                    self.failed_deposits.append(completion)
                case ResetFinished():
                    self._give(("reset", completion.label), completion)
                case ControllerFailed():
                    self._failure = completion.error

    def _give_request(self, completion: PrefetchReady | PrefetchCancelled | RestoreFinished) -> None:
        request_id = completion.request_id
        is_ready = isinstance(completion, PrefetchReady) and completion.account is None
        if request_id in self._left_restores:
            self._left_restores.remove(request_id)
            log.debug("completion.unclaimed", completion=completion)
        elif self._left[request_id]:
            self._left[request_id] -= not is_ready  # one that became ready is still to be cancelled
            log.debug("completion.unclaimed", completion=completion)
        elif self._give(("request", request_id), completion):
            if is_ready:
                self._ready.add(request_id)
        elif isinstance(completion, PrefetchCancelled) and request_id in self._ready:
            self._ready.remove(request_id)
            self._expired[request_id] = (anyio.current_time() + self.config.claim_lifetime_s, completion)
        if not self._left[request_id]:
            del self._left[request_id]

    def _give(self, key: Hashable, completion: Completion) -> bool:
        """Hand a completion to whom waits for it; False if nobody does."""
        waiter = self._waiters.pop(key, None)
        if waiter is None:
            return False
        waiter.completion = completion
        waiter.arrived.set()
        return True

    async def _completion(
        self, key: Hashable, what: str, timeout_s: float, left: Callable[[], object] | None = None
    ) -> Completion:
        """Wait for a completion; `left` is called if it is given up before that came."""
        waiter = self._waiters[key] = _Waiter()
        try:
            with anyio.move_on_after(timeout_s):
                await waiter.arrived.wait()
        finally:
            if self._waiters.get(key) is waiter:
                del self._waiters[key]
                if left is not None:
                    left()
        if waiter.completion is not None:
            return waiter.completion
        self._check_running()
        raise DeadlineError(f"{what} did not come within {timeout_s:g} s")

    def _check_wait(self, timeout_s: float) -> None:
        """Before anything is asked: ConfigError for a time that is none, else as `_check_running`."""
        checked_seconds("timeout_s", timeout_s)
        self._check_running()

    def _check_running(self) -> None:
        self._desk.check_process()
        if self._failure is not None or not self._host.is_running:
            raise ControllerClosedError(f"the controller does not run: {self._failure or 'start it first'}")


@asynccontextmanager
async def open_controller(
    config: ControllerConfig | None = None,
    *,
    device: Device,
    store: Store | None = None,
    ranks: Ranks | None = None,
    sinks: Sequence[EventSink] = (),
    contexts: ContextTable | None = None,
) -> AsyncGenerator[AsyncController]:
    """Run a controller as a task of this loop, asyncio or trio, for the length of an `async with` block."""
    controller = AsyncController(config, device=device, store=store, ranks=ranks, sinks=sinks, contexts=contexts)
    await controller.start()
    try:
        yield controller
    finally:
        with anyio.CancelScope(shield=True):
            await controller.close()
