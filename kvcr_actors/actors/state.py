"""What lives on the loop and outlives every actor: the tiers, the claims, the ports and the counters."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import anyio
import attrs
import structlog

from kvcr_actors.actors.owed import OwedDeposits
from kvcr_actors.actors.store_guard import GuardedStore
from kvcr_actors.config import ControllerConfig
from kvcr_actors.core.host_tier import (
    Growth,
    HostPage,
    HostTier,
    PagesForgotten,
    PagesFreed,
    PagesRemoved,
    PagesStored,
    PageState,
)
from kvcr_actors.core.inventory import BlocksRemoved, BlocksStored, InventoryEvent, TierCleared
from kvcr_actors.core.ledger import Claim, ClaimLedger
from kvcr_actors.core.prefetch_state import HeldPrefix
from kvcr_actors.core.stats import ControllerStats
from kvcr_actors.events.contexts import ContextTable
from kvcr_actors.events.feed import EventFeed
from kvcr_actors.messages import (
    BackupAck,
    BackUpStep,
    Completion,
    CopyStarted,
    DepositPages,
    InventoryChanged,
    PrefetchOrder,
    RestoreStep,
)
from kvcr_actors.ports import Device, OperationId, Ranks, Services
from kvcr_actors.runtime.breath import no_breath
from kvcr_actors.runtime.inbox import Inbox
from kvcr_actors.runtime.outbox import Outbox
from kvcr_actors.runtime.progress import Progress
from kvcr_actors.transfers import Operation
from kvcr_actors.types import MissReason, NodeId, PageKey, RequestId, SkipReason, Tier

log = structlog.get_logger()


@attrs.frozen(eq=False)
class Inboxes:
    """The address book: one inbox an actor."""

    backup: Inbox[BackUpStep]
    confirmation: Inbox[CopyStarted]
    deposit: Inbox[DepositPages]
    prefetch: Inbox[PrefetchOrder]
    restore: Inbox[RestoreStep]
    publisher: Inbox[InventoryChanged]


def _nothing(*_: object) -> None:
    """There is nothing to do yet."""


@attrs.define(eq=False)
class LoopState:
    """The authoritative state. It is touched on the loop's thread only, and never across an await."""

    config: ControllerConfig
    host: HostTier
    ledger: ClaimLedger
    stats: ControllerStats
    device: Device
    store: GuardedStore | None
    ranks: Ranks
    inboxes: Inboxes
    outbox: Outbox[Completion]
    services: Services
    feed: EventFeed
    restores: Progress
    """The steps with restores that the device knows of, or that came to nothing."""
    contexts: ContextTable | None = None
    """What pages were computed from, where event sinks want to know."""
    breathe: Callable[[], None] = no_breath
    """Called once a node in loops over a step (see `runtime.breath`)."""
    prefixes: dict[RequestId, HeldPrefix] = attrs.field(factory=dict[RequestId, HeldPrefix])
    """Prefixes that stand ready, until a restore order, a cancel or the end of their life time takes them."""
    depositing: set[HostPage] = attrs.field(factory=set[HostPage])
    """Pages on their way to the store."""
    resets: int = 0
    """How many of the engine's resets were begun."""
    begin_resets: Callable[[], None] = _nothing
    """Begin those that the engine has given (see `actors.resetting`)."""
    end_searches: Callable[[MissReason], None] = _nothing
    """End every search that the prefetch actor follows."""
    ended_by_reset: int = 0
    """Nodes, prefetches and restores that ended for a reset."""
    owed: OwedDeposits = attrs.field(init=False)
    """Pages that found no room on that way."""
    _deposit_ended: anyio.Event = attrs.field(factory=anyio.Event)
    _claim_ended: anyio.Event = attrs.field(factory=anyio.Event)
    _reads: int = 0
    _reads_over: anyio.Event = attrs.field(factory=anyio.Event)
    _left: dict[HostPage, float] = attrs.field(factory=dict[HostPage, float])
    """Pages under a read that nobody follows any more, and until when they are worth waiting for."""
    _fills: dict[HostPage, anyio.Event] = attrs.field(factory=dict[HostPage, anyio.Event])

    def __attrs_post_init__(self) -> None:
        self.owed = OwedDeposits(self.stats, self.outbox)

    def acknowledge(
        self,
        step: int,
        done: Sequence[NodeId],
        failed: Sequence[tuple[NodeId, SkipReason]],
        missing: Mapping[NodeId, PageKey] | None = None,
    ) -> None:
        """Tell the engine that a step's device pages may change, and count what was not backed up."""
        for _, reason in failed:
            self.stats.backup.skipped[reason] += 1
            self.ended_by_reset += reason is SkipReason.RESET
        named = () if not missing else tuple(missing.items())
        self.outbox.deliver((BackupAck(step, tuple(done), tuple(failed), named),))

    def is_stale(self, resets: int) -> bool:
        """Whether an order was given before a reset that was begun; one given after a reset begins that first."""
        if resets > self.resets:
            self.begin_resets()
        return resets < self.resets

    def forget_host(self, when_gone: Callable[[], None]) -> int:
        """Make every page of the host unusable at once (see `HostTier.forget`); whoever waits for one waits no more."""
        count = self.host.forget(when_gone)
        fills, self._fills = self._fills, {}
        for event in fills.values():
            event.set()
        self.publish_changes()
        return count

    def commit(self, pages: Sequence[HostPage]) -> Sequence[HostPage]:
        """Make filled pages ready; returns those that became so (see `HostTier.commit`). Publish the changes next."""
        ready = self.host.commit(pages)
        self._wake(ready)
        return ready

    @contextmanager
    def reading(self) -> Generator[None]:
        """While reads of the store go on, deposits let them go first."""
        self._reads += 1
        try:
            yield
        finally:
            self._reads -= 1
            if not self._reads:
                self._reads_over.set()

    async def reads_over(self) -> None:
        """Wait until no prefix is being read. The caller sets the deadline."""
        while self._reads:
            self._reads_over = anyio.Event()
            await self._reads_over.wait()

    def device_pages(self) -> list[int]:
        """Pages in each pool of the device."""
        return [self.device.pages_of(pool) for pool in range(len(self.device.layout.pools))]

    @property
    def is_shared(self) -> bool:
        """Whether other ranks must end every operation alike."""
        return self.ranks.size > 1

    def join_without(self, operation: OperationId) -> None:
        """Open an operation of which this rank has nothing, so that the others need not wait for it."""
        if self.is_shared:
            self.ranks.propose(operation, 0).withdraw()

    def grow(self, growths: Sequence[Growth]) -> Sequence[HostPage]:
        """Give filled components to their pages; the store lacks them, so it must be told of those pages again."""
        gained = self.host.grow(growths)
        for page in gained:
            page.stored = False
        return gained

    def drop_growths(self, growths: Sequence[Growth]) -> None:
        """Give back the slots of components that never came to their pages."""
        if left := [growth for growth in growths if self.host.is_growing(growth)]:
            self.host.drop(left)
            self.publish_changes()

    def lacks_deposit(self, page: HostPage) -> bool:
        """Whether the store lacks a page that is not on its way there either."""
        return self.store is not None and not page.stored and page not in self.depositing

    def claim_pages(self, holder: RequestId, pages: Sequence[HostPage]) -> Claim:
        """Keep pages, and with each the path above it, from eviction until they are deposited."""
        for page in pages:
            self.host.pin(page)

        def unpin() -> None:
            for page in pages:
                self.host.unpin(page)

        return self.ledger.take("deposit", holder, unpin)

    def end_deposit(self, pages: Sequence[HostPage]) -> None:
        """Pages are no longer on their way to the store, whether or not they came there."""
        self.depositing.difference_update(pages)
        self._deposit_ended.set()

    async def deposit_over(self, page: HostPage) -> None:
        """Wait until a page is not on its way to the store. The caller sets the deadline."""
        while page in self.depositing:
            if self._deposit_ended.is_set():
                self._deposit_ended = anyio.Event()
            await self._deposit_ended.wait()

    def abandon_unfilled(self, pages: Sequence[HostPage]) -> None:
        """Give back the slots of the pages that were never committed."""
        lost = [page for page in pages if page.is_unfilled]
        if lost:
            self.host.abandon(lost)
            self._wake(lost)
            self.publish_changes()

    async def filled(self, page: HostPage) -> None:
        """Wait until a FILLING page is ready, gone or stuck. The caller sets the deadline."""
        while page.state is PageState.FILLING and not self.is_stuck(page):
            event = self._fills.setdefault(page, anyio.Event())
            with anyio.CancelScope(deadline=self._left.get(page, math.inf)):
                await event.wait()

    def leave_fill(self, pages: Sequence[HostPage], worth_until: float) -> None:
        """Follow the read of FILLING pages no longer: past `worth_until` (loop time) they are stuck."""
        self._left.update(dict.fromkeys(pages, worth_until))
        self._wake(pages)

    def end_fill(self, pages: Sequence[HostPage]) -> None:
        """The read of pages that it was `leave_fill` for is quiet."""
        for page in pages:
            self._left.pop(page, None)

    def is_stuck(self, page: HostPage) -> bool:
        """Whether a FILLING page is worth no wait: its read is over for everybody, but its memory is not quiet."""
        return page in self._left and self._left[page] <= anyio.current_time()

    def release_when_quiet(self, operation: Operation[Any] | None, claim: Claim, size: int) -> None:
        """End a claim now if native code no longer touches its memory (`size` bytes), else quarantine it until then.

        Where that broke off half way it can be asked for again.
        """
        if operation is None:
            self._release_if_open(claim)
            return
        if not operation.is_quiet:
            claim.quarantine(size)
            log.warning("claim.quarantined", kind=claim.kind, holder=claim.holder, bytes=size)
        operation.when_quiet(lambda: self._release_if_open(claim))

    async def claims_over(self) -> None:
        """Wait until no claim is open, once the actors have ended. The caller sets the deadline."""
        while self.ledger.open:
            self._claim_ended = anyio.Event()
            await self._claim_ended.wait()

    def publish_changes(self) -> None:
        """Publish what changed in the host tier, and poison freed slots where that is asked for."""
        events: list[InventoryEvent] = []
        freed: list[PagesFreed] = []
        for change in self.host.take_changes():
            match change:
                case PagesStored():
                    events.append(BlocksStored(Tier.HOST, change.keys, change.parents))
                case PagesRemoved():
                    self.stats.host_evicted += len(change.keys)
                    events.append(BlocksRemoved(Tier.HOST, change.keys))
                    self.owed.lose(change.keys)
                case PagesForgotten():
                    self.stats.host_evicted += change.count
                    events.append(TierCleared(Tier.HOST))
                    self.owed.end(SkipReason.RESET)
                case PagesFreed():
                    freed.append(change)
        self.publish(events)
        for change in freed:  # last: what it raises must not lose an event
            self._poison(change)

    def publish(self, events: Sequence[InventoryEvent]) -> None:
        """Leave events for the publisher, in order."""
        if events and not self.feed.tell(events):
            self.stats.events_dropped += len(events)

    def observe_store(self, events: Sequence[InventoryEvent]) -> None:
        """Take a store's own events: correct what host pages believe of it, count, publish."""
        for event in events:
            if isinstance(event, BlocksRemoved):
                self.stats.store_evicted += len(event.keys)
                for key in event.keys:
                    page = self.host.get(key)
                    if page is not None:
                        page.stored = False
            elif isinstance(event, TierCleared):
                for page in self.host.snapshot():
                    page.stored = False
        self.publish(events)

    def _poison(self, freed: PagesFreed) -> None:
        if self.config.poison_freed_pages:
            for pool, slots in enumerate(freed.slots):
                if slots:
                    self.device.host.poison(pool, slots)

    def _wake(self, pages: Sequence[HostPage]) -> None:
        if self._fills:
            for page in pages:
                event = self._fills.pop(page, None)
                if event is not None:
                    event.set()

    def _release_if_open(self, claim: Claim) -> None:
        try:
            if not claim.is_released:
                claim.release()
        finally:
            self._claim_ended.set()
