"""The place of the store: one is attached at the start or later, under load, and detached again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import anyio
import attrs
import structlog

from kvcr_actors.actors.read_share import prefetch_admission
from kvcr_actors.actors.state import LoopState
from kvcr_actors.actors.store_guard import GuardedStore
from kvcr_actors.core.host_tier import HostPage, PageState
from kvcr_actors.core.inventory import InventoryEvent, Ownership, TierCleared
from kvcr_actors.errors import CheckpointError, ConfigError, DeadlineError, InboxClosedError, InboxFullError, StoreError
from kvcr_actors.messages import DepositPages, ResetCaches
from kvcr_actors.port_life import LatePorts, close_port, closed_if_cut_short
from kvcr_actors.ports import ClearOutcome, Services, Store
from kvcr_actors.transfers import Operation
from kvcr_actors.types import PageKey, Tier

log = structlog.get_logger()

_STORE_GONE = (TierCleared(Tier.STORE), *(TierCleared(tier, Ownership.STORE) for tier in Tier))
"""A store that is detached is heard of no more: all that it told of is taken back, its own copies in any tier, too."""

STORE_CLOSE_BUDGETS = 3
"""Drain budgets that a store may take to be quiet and to close."""


@attrs.define
class _Hearing:
    """Whether a store's events are still passed on."""

    on: bool = True


@attrs.frozen(eq=False)
class StoreReset:
    """What becomes of the store at a reset: `goes` is to be closed, `comes` takes its place."""

    goes: Store | None = None
    guarded: GuardedStore | None = None
    """The one through which pages of before were read and written: it starts nothing more."""
    cleared: Operation[ClearOutcome] | None = None
    stays: Store | None = None
    comes: Store | None = None
    number: int = 0
    """How many resets the slot has seen, this one too."""


@attrs.frozen
class HostCleared:
    """What `clear_host` did: `cleared` pages went; `claimed` stay for whoever holds them or a page below them.

    `filling` pages are on their way there, `forgotten` ones of an earlier generation are still under a copy.
    """

    cleared: int
    claimed: int = 0
    filling: int = 0
    forgotten: int = 0


class StoreSlot:
    """Attaches and detaches stores of one controller. Everything is on the loop, and one call runs at a time."""

    def __init__(
        self,
        state: LoopState,
        make_services: Callable[[Callable[[Sequence[InventoryEvent]], None]], Services],
        late: LatePorts,
    ) -> None:
        self._state = state
        self._make_services = make_services
        self._late = late
        self._store: Store | None = None
        self._hearing = _Hearing()
        self._closed = False
        self._given_up: list[Store] = []
        """Stores that were detached and not quiet in time: they may still use memory."""
        self._turn = anyio.Lock()
        self._resets = 0
        self._last_reset: ResetCaches | None = None
        self._emptied = 0
        """Pages that a store lost which a reset met on its way here; that reset tells of them."""
        self.namespace = b""
        """That of the last store that named one: pages in host memory are of it."""

    def is_foreign(self, store: Store) -> bool:
        """Whether a store keeps pages of another namespace than those that host memory may hold."""
        named = store.traits.namespace
        return self._store is None and bool(named and self.namespace) and named != self.namespace

    @property
    def store(self) -> Store | None:
        """What is attached."""
        return self._store

    @property
    def given_up(self) -> int:
        """Stores that were detached without coming to their end."""
        return len(self._given_up)

    async def attach(self, store: Store) -> None:
        """Open a store and use it from now on. ConfigError or StoreError say why it cannot be used."""
        self._state.begin_resets()
        asked = self._resets
        async with self._turn:
            await self._attach(store, asked)

    async def _attach(self, store: Store, asked: int) -> None:
        """Attach a store that was asked for after so many resets: what it keeps may be older than those since."""
        state, hearing = self._state, _Hearing()
        if self._store is not None:
            raise ConfigError(f"store {self._store.name} is attached; detach it before store {store.name} comes")
        if state.host.capacity:
            prefetch_admission(state.config, state.host.capacity)  # refused now, not at the first request
        guarded = GuardedStore(store, state.stats)

        def observe(events: Sequence[InventoryEvent]) -> None:
            if hearing.on:
                state.observe_store(events)

        budget_s = state.config.drain_budget_s
        async with closed_if_cut_short(f"store {store.name}", store, budget_s, self._late, uses_memory=True):
            await store.open(self._make_services(observe), state.device.host)
            try:
                while asked != self._resets:
                    asked = self._resets
                    await self._forget_on_its_way(store, guarded)
            except BaseException:
                hearing.on = False
                state.publish(_STORE_GONE)
                raise
        self._store, self._hearing = store, hearing
        self.namespace = store.traits.namespace or self.namespace
        if reason := store.traits.cannot_store:
            log.warning("store.stands_aside", store=store.name, reason=reason)
        else:
            state.store = guarded

    async def _forget_on_its_way(self, store: Store, guarded: GuardedStore) -> None:
        """Do to a store that is not in use yet what the last reset would have done to it; StoreError if it cannot."""
        order = self._last_reset
        if order is None or order.store is not None or not order.clear:
            raise StoreError("a reset began while it was on its way, and did not say that it is to be cleared")
        outcome = await self._outcome(guarded.clear(), guarded)
        if outcome.error is not None:
            raise StoreError(f"a reset began while it was on its way, and it was not cleared: {outcome.error}")
        self._emptied += outcome.pages

    async def _outcome(self, cleared: Operation[ClearOutcome], guarded: GuardedStore) -> ClearOutcome:
        """Wait for a clear, no longer than a write may take."""
        with anyio.move_on_after(max(self._state.config.drain_budget_s, guarded.traits.write_budget_s)):
            return await cleared.outcome()
        return ClearOutcome(error="it did not end in time")

    async def detach(self, budget_s: float, *, for_good: bool = False) -> None:
        """Use the store no more: what is in flight ends, then it is closed. DeadlineError if it is not quiet by then.

        `for_good` is the controller's own end: nobody is told that the tier is gone.
        """
        async with self._turn:
            self._closed = self._closed or for_good
            guarded, store = self._state.store, self._store
            if store is None:
                return
            self._let_go(guarded, for_good=for_good)
            await self._close(store, guarded, budget_s)

    def begin_reset(self, order: ResetCaches) -> StoreReset:
        """In the turn of a reset: nothing that was computed before it is read, written or looked up any more."""
        state, store, guarded = self._state, self._store, self._state.store
        if order.label is None:
            return StoreReset()
        self._resets, self._last_reset = self._resets + 1, order
        if store is None:
            return StoreReset(comes=order.store, number=self._resets)
        if guarded is not None:
            guarded.retire()
        cleared = guarded.clear() if order.clear and guarded is not None else None
        if order.clear and order.store is None:
            state.store = None if guarded is None else GuardedStore(store, state.stats)
            return StoreReset(guarded=guarded, cleared=cleared, stays=store, number=self._resets)
        self._let_go(guarded)
        return StoreReset(store, guarded, cleared, comes=order.store, number=self._resets)

    async def end_reset(self, reset: StoreReset) -> tuple[int, list[str]]:
        """Wait until the store is cleared, or exchanged; returns the pages cleared and what went wrong, in words.

        A store that could not be cleared is detached: it might serve what it should have forgotten.
        """
        budget_s, errors, goes = self._state.config.drain_budget_s, list[str](), reset.goes
        async with self._turn:
            pages, self._emptied = self._emptied, 0
            if reset.cleared is not None and reset.guarded is not None:
                outcome = await self._outcome(reset.cleared, reset.guarded)
                pages += outcome.pages
                if outcome.error is not None:
                    errors.append(f"the store was not cleared, and is detached: {outcome.error}")
                    if self._store is not None and self._store is reset.stays:
                        goes = self._store
                        self._let_go(self._state.store)
            try:
                if goes is not None:
                    await self._close(goes, reset.guarded, budget_s)
            except Exception as error:  # noqa: BLE001 - a store is foreign code; it is detached all the same
                errors.append(f"store {goes.name} was not closed: {error}" if goes else str(error))
            try:
                if reset.comes is not None and not self._closed:
                    await self._attach(reset.comes, reset.number)
            except Exception as error:  # noqa: BLE001 - as above
                errors.append(f"store {reset.comes.name} was not attached: {error}" if reset.comes else str(error))
        return pages, errors

    def _let_go(self, guarded: GuardedStore | None, *, for_good: bool = False) -> None:
        """Use the store that is attached no more, and tell that what it held is gone."""
        state = self._state
        state.store = self._store = None
        self._hearing.on = False
        if guarded is not None:
            guarded.retire()
        if not for_good:
            for page in state.host.snapshot():
                page.stored = False
            state.publish(_STORE_GONE)

    async def deposit_all(self) -> list[PageKey]:
        """Write every page that stands ready in host memory; returns those that the store lacks afterwards."""
        pages = self._state.host.snapshot()
        size = self._state.config.deposit_batch_pages
        for start in range(0, len(pages), size):
            await self._deposit(pages[start : start + size])
        return [page.key for page in pages if page.state is PageState.READY and not page.stored]

    async def checkpoint(self, label: str) -> None:
        """Bring all of the host to the store, on every rank, or raise CheckpointError; ranks know it by its label."""
        if self._store is None:
            await self._state.ranks.agree(("checkpoint", label), 0)
            raise CheckpointError("no store is attached; attach one before the checkpoint")
        missing = await self.deposit_all()
        agreed = await self._state.ranks.agree(("checkpoint", label), 0 if missing else 1)
        if missing:
            raise CheckpointError(f"{len(missing)} pages did not come to the store, the first is {missing[0].hex()}")
        if not agreed:
            raise CheckpointError("another rank could not bring its pages to its store, or did not answer")

    def clear_host(self) -> HostCleared:
        """Evict from host memory whatever no claim protects, and say what stays."""
        host = self._state.host
        cleared = host.clear()
        self._state.publish_changes()
        return HostCleared(cleared, host.ready_pages, host.filling_pages, host.forgotten_pages)

    async def _deposit(self, pages: Sequence[HostPage]) -> None:
        """Send what the store lacks of some pages (parents first) to the deposit actor, and wait for the end of it."""
        state = self._state
        while lacking := [page for page in pages if page.state is PageState.READY and page in state.depositing]:
            await state.deposit_over(lacking[0])
        lacking = [page for page in pages if page.state is PageState.READY and state.lacks_deposit(page)]
        if not lacking:
            return
        claim = state.claim_pages("checkpoint", lacking)
        state.depositing.update(lacking)
        try:
            state.inboxes.deposit.tell(DepositPages(lacking, claim))
        except (InboxFullError, InboxClosedError):
            state.end_deposit(lacking)
            claim.release()
            state.owed.owe(lacking)
            await anyio.sleep(state.config.deposit_backoff_s)
            return
        await state.deposit_over(lacking[-1])

    async def _close(self, store: Store, guarded: GuardedStore | None, budget_s: float) -> None:
        """Let what is in flight end, then close a store; one that is not quiet in time is closed again at the end."""
        if guarded is not None:
            with anyio.move_on_after(budget_s):
                await guarded.quiet()
        try:
            await store.close(budget_s)
        except DeadlineError:
            if not self._closed:
                self._given_up.append(store)
            raise

    async def close(self, budget_s: float) -> None:
        """At the controller's end: close what is attached, and what was given up. StoreError if it failed."""
        late = self._late
        try:
            closing = partial(self.detach, for_good=True)
            await close_port("store", closing, budget_s, late, uses_memory=True, budgets=STORE_CLOSE_BUDGETS)
        finally:
            for number, store in enumerate(self._given_up, 1):
                name = f"store {store.name}, detached as number {number}"
                await close_port(name, store.close, budget_s, late, uses_memory=True, budgets=STORE_CLOSE_BUDGETS)
