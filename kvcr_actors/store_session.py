"""A store's life without a controller, on one loop: what both faces of `store_client` share.

The store is opened over bounce slots of the session's own, never over the caller's memory: an operation may be late,
and then writes (or reads) where nobody looks, until it is quiet (see `bounce`). A call comes in parts of at most the
pages that the store takes at once. A part has one deadline for its slots and its outcome; past it the part has failed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

import anyio
import anyio.abc
import attrs
import structlog

from kvcr_actors.actors.publisher import Outlets, PublisherActor
from kvcr_actors.actors.store_guard import GuardedStore
from kvcr_actors.batches import check_batch, late_words, pages_here, split_batch
from kvcr_actors.bounce import BounceSlots, CopySide, Lease, copy_pages
from kvcr_actors.core.inventory import InventoryEvent
from kvcr_actors.core.stats import ControllerStats
from kvcr_actors.errors import ConfigError, ControllerClosedError, DeadlineError, InvalidNodeError, StoreError
from kvcr_actors.events.feed import EventFeed
from kvcr_actors.host_buffers import HostBuffers
from kvcr_actors.messages import InventoryChanged
from kvcr_actors.port_life import PORT_CLOSE_BUDGETS, LatePorts, closed_if_cut_short, open_sinks
from kvcr_actors.ports import BatchOutcome, ClearOutcome, Description, EventSink, HostMemory, PageBatch, Store
from kvcr_actors.runtime.bell import LoopBell
from kvcr_actors.runtime.foreign import ContainedTasks, containing
from kvcr_actors.runtime.inbox import Inbox
from kvcr_actors.runtime.questions import Questions
from kvcr_actors.runtime.supervisor import raising_sole_cause
from kvcr_actors.runtime.traces import traced
from kvcr_actors.services import LoopServices, StoreServices, refuse_events
from kvcr_actors.stores.threaded import all_failed
from kvcr_actors.types import PageKey, RequestId

log = structlog.get_logger()

OWNER: Final = "the store client"
PARTS_AT_ONCE: Final = 2
"""Parts of one call under way at once, and what bounce slots hold by default: one is read while another is copied."""
_NOTICES: Final = 1 << 10
_CLOSE_MARGIN_S: Final = 5.0

_left_mapped: list[HostBuffers] = []
"""Memory that a store still used when its session ended; it stays until the process ends."""


class StoreSession:
    """One store from its open to its close. `main` is the program that a host runs, once; the rest is on its loop."""

    def __init__(
        self,
        store: Store,
        host: HostMemory,
        *,
        bounce_pages: int | None,
        drain_budget_s: float,
        sinks: Sequence[EventSink],
    ) -> None:
        batch_pages = store.traits.batch_pages
        pages = PARTS_AT_ONCE * batch_pages if bounce_pages is None else bounce_pages
        if pages < 1:
            raise ConfigError(f"bounce_pages: {pages}; give 1 or more, or None for {PARTS_AT_ONCE * batch_pages}")
        if drain_budget_s <= 0:
            raise ConfigError(f"drain_budget_s: {drain_budget_s:g}; give more than 0")
        self.store = store
        self.host = host
        self.questions = Questions(OWNER)
        self.slots = BounceSlots(pages)
        self.part_pages = min(batch_pages, pages)
        self.budget_s = drain_budget_s
        memory = self._memory = HostBuffers.mapped(host.layout, pages)
        self._bounce, self._callers = CopySide(memory), CopySide(host)
        self._sinks = sinks
        self._stats = ControllerStats()
        self._guarded = GuardedStore(store, self._stats)
        self._inbox: Inbox[InventoryChanged] = Inbox("publisher", _NOTICES)
        self._feed = EventFeed(self._inbox, has_sinks=bool(sinks))
        self._outlets = Outlets(sinks, self._feed, self._stats)
        self._requests: dict[RequestId, object] = {}
        self._is_open = False
        self._calls = 0
        self._idle = anyio.Event()
        self._late = 0
        self._ports = LatePorts()

    async def main(self, started: Callable[[], None], stop: anyio.Event) -> None:
        """Open, serve until `stop`, close. Raises what the store refuses with, and DeadlineError for a late close."""
        bell = LoopBell(_log_fault, relay=False)
        try:
            with raising_sole_cause(), containing():
                async with anyio.create_task_group() as tasks:
                    async with AsyncExitStack() as stack:
                        services = LoopServices(tasks, bell, refuse_events)
                        await open_sinks(stack, self._sinks, services, self.budget_s, self._ports)
                        await self._serve(tasks, bell, started, stop)
                    tasks.cancel_scope.cancel()
        except Exception as error:
            self.questions.fail(error)
            raise
        finally:
            self._is_open = False
            self.questions.end()
            bell.close()

    @property
    def close_budget_s(self) -> float:
        """The most that an orderly close takes: for calls, for quiet, and twice the budget for the store and sinks."""
        return self.budget_s * (4 + PORT_CLOSE_BUDGETS * len(self._sinks)) + _CLOSE_MARGIN_S

    def read_budget_s(self, pages: int) -> float:
        """The store's own time for a read."""
        traits = self.store.traits
        return traits.read_budget_s + pages * traits.read_budget_page_s

    def write_budget_s(self, operations: int) -> float:
        """The store's own time for so many writes, one after the other."""
        return self.store.traits.write_budget_s * max(1, operations)

    def check_open(self) -> None:
        """Raise ControllerClosedError before the start, and once the close has begun."""
        if not self._is_open:
            raise ControllerClosedError(f"{OWNER} is not running; start it first")

    def parts(self, batch: PageBatch) -> list[PageBatch]:
        """Check a batch and cut it into what the store takes at once; InvalidNodeError says what is wrong with it."""
        check_batch(batch, self.host)
        return split_batch(batch, self.part_pages)

    def copy_out(self, part: PageBatch, lease: Lease, outcome: BatchOutcome) -> None:
        """Bring what was read to the caller's slots. On any thread."""
        if pages := pages_here(outcome):
            copy_pages(self._callers, part.slots, self._bounce, lease.components(part.slots), pages)

    def copy_in(self, part: PageBatch, lease: Lease) -> None:
        """Bring what is to be written to the bounce slots. On any thread."""
        copy_pages(self._bounce, lease.components(part.slots), self._callers, part.slots, range(len(part.keys)))

    async def read(self, lease: Lease, part: PageBatch, request_id: RequestId, timeout_s: float) -> BatchOutcome:
        """Read a part into the lease's slots; the caller copies the pages that are OK, then lets the lease go."""
        async with self._call():
            with anyio.move_on_after(timeout_s):
                if await self.slots.take(lease, len(part.keys)):
                    batch = attrs.evolve(part, slots=lease.components(part.slots))
                    operation = self._guarded.read(batch, request_id)
                    self.slots.lend(lease, operation)
                    return self._checked("read", part, await operation.outcome())
            return self._too_late("read", part)

    async def take_slots(self, lease: Lease, part: PageBatch, timeout_s: float) -> bool:
        """Have slots for a part that is to be written; False past the deadline."""
        async with self._call():
            with anyio.move_on_after(timeout_s):
                return await self.slots.take(lease, len(part.keys))
            return False

    async def write(self, lease: Lease, part: PageBatch, timeout_s: float) -> BatchOutcome:
        """Write a part out of the lease's slots, which the caller has filled and needs no more."""
        async with self._call():
            operation = self._guarded.write(attrs.evolve(part, slots=lease.components(part.slots)))
            self.slots.lend(lease, operation)
            self.slots.let_go(lease)
            with anyio.move_on_after(timeout_s):
                return self._checked("write", part, await operation.outcome())
            return self._too_late("write", part)

    async def lookup(self, keys: Sequence[PageKey], request_id: RequestId, timeout_s: float) -> tuple[int, ...]:
        """The pools held for each key; DeadlineError."""
        async with self._call():
            with anyio.move_on_after(timeout_s):
                masks = await self._guarded.lookup(keys, request_id).outcome()
                if len(masks) != len(keys):
                    raise StoreError(
                        f"store {self.store.name} answered {len(masks)} of {len(keys)} keys; it is at fault"
                    )
                return masks
            raise self._late_error(f"looked {len(keys)} keys up", timeout_s)

    async def confirm(self, keys: Sequence[PageKey], request_id: RequestId, timeout_s: float) -> bool:
        """Whether a promised prefix is here; DeadlineError."""
        async with self._call():
            with anyio.move_on_after(timeout_s):
                return await self._guarded.confirm(keys, request_id).outcome()
            raise self._late_error(f"confirmed {len(keys)} keys", timeout_s)

    async def clear(self, timeout_s: float) -> ClearOutcome:
        """Forget every page; DeadlineError."""
        async with self._call():
            with anyio.move_on_after(timeout_s):
                return await self._guarded.clear().outcome()
            raise self._late_error("cleared itself", timeout_s)

    def begin_request(self, request_id: RequestId, hints: object) -> None:
        """Lend the store a request's hints; InvalidNodeError if it is open already."""
        self.check_open()
        if request_id in self._requests:
            raise InvalidNodeError(f"request {request_id!r} is open; end it before it begins again")
        if hints is not None:
            self.store.begin_request(request_id, hints)
        self._requests[request_id] = hints

    def end_request(self, request_id: RequestId) -> None:
        """Have the store release what it claimed for a request; InvalidNodeError if it is not open."""
        self.check_open()
        if request_id not in self._requests:
            raise InvalidNodeError(f"request {request_id!r} is not open; begin it first, and end it once")
        self._end_request(request_id)

    def align(self, keys: Sequence[PageKey]) -> None:
        """Refresh the recency of a prefix."""
        self.check_open()
        self._guarded.align(keys)

    def contents(self) -> frozenset[PageKey]:
        """The keys held now."""
        self.check_open()
        return self.store.contents()

    def describe(self) -> Description:
        """The store's state, and the client's own."""
        return {
            "store": self.store.describe(),
            "open": self._is_open,
            "requests": len(self._requests),
            "calls": self._calls,
            "late": self._late,
            "store_faults": self._stats.store_faults,
            "bounce": {"pages": self.slots.capacity, "free": self.slots.free},
        }

    async def _serve(
        self, tasks: anyio.abc.TaskGroup, bell: LoopBell, started: Callable[[], None], stop: anyio.Event
    ) -> None:
        store = self.store
        publisher = PublisherActor(self._outlets, ContainedTasks(tasks))
        tasks.start_soon(self._publish, publisher, name="store events")
        try:
            async with closed_if_cut_short(f"store {store.name}", store, self.budget_s, self._ports, uses_memory=True):
                await store.open(StoreServices(tasks, bell, self._observe, self._stats), self._memory)
                if store.traits.cannot_store:
                    raise StoreError(f"store {store.name} cannot be used: {store.traits.cannot_store}")
            self.questions.start(bell, tasks)
            self._is_open = True
            try:
                started()
                await stop.wait()
            finally:
                with anyio.CancelScope(shield=True):
                    await self._close()
        finally:
            self._outlets.publish(last=True)

    def _observe(self, events: Sequence[InventoryEvent]) -> None:
        self._feed.tell(events)

    async def _publish(self, publisher: PublisherActor) -> None:
        while batch := await self._inbox.take():
            await publisher.handle(batch)

    async def _close(self) -> None:
        """Let calls end, then what the store does for them, then close it: each within the budget."""
        self._is_open = False
        with anyio.move_on_after(self.budget_s):
            while self._calls:
                self._idle = anyio.Event()
                await self._idle.wait()
        for request_id in tuple(self._requests):
            try:
                self._end_request(request_id)
            except Exception as error:  # noqa: BLE001 - a store is foreign code; the others must end all the same
                log.error("store.call_raised", store=self.store.name, call="end_request", error=repr(error))
        self._guarded.retire()
        with anyio.move_on_after(self.budget_s) as waiting:
            await self._guarded.quiet()
        if waiting.cancelled_caught:
            _left_mapped.append(self._memory)
        with anyio.move_on_after(2 * self.budget_s):
            await self.store.close(self.budget_s)
            return
        raise DeadlineError(f"store {self.store.name} did not close within {2 * self.budget_s:g} s")

    def _end_request(self, request_id: RequestId) -> None:
        hints = self._requests.pop(request_id)
        if hints is not None or self.store.traits.requires_confirmation:
            self.store.end_request(request_id)

    @asynccontextmanager
    async def _call(self) -> AsyncGenerator[None]:
        self.check_open()
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._idle.set()

    def _checked(self, verb: str, part: PageBatch, outcome: BatchOutcome) -> BatchOutcome:
        if len(outcome.pages) == len(part.keys):
            return outcome
        answered = f"{verb}: store {self.store.name} answered {len(outcome.pages)} of {len(part.keys)} pages"
        return all_failed(part, f"{answered}; it is at fault")

    def _too_late(self, verb: str, part: PageBatch) -> BatchOutcome:
        self._late += 1
        return all_failed(part, late_words(verb, self.store.name, self.slots.free))

    def _late_error(self, what: str, timeout_s: float) -> DeadlineError:
        self._late += 1
        return DeadlineError(f"store {self.store.name} has not {what} within {timeout_s:g} s")


def _log_fault(error: Exception) -> None:
    log.error("loop.call_failed", traceback=traced(error))
