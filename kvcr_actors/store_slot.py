"""The place of the store: one is attached at the start or later, under load, and detached again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import anyio
import structlog

from kvcr_actors.actors.read_share import prefetch_admission
from kvcr_actors.actors.state import LoopState
from kvcr_actors.actors.store_guard import GuardedStore
from kvcr_actors.core.host_tier import HostPage, PageState
from kvcr_actors.core.inventory import InventoryEvent, Ownership, TierCleared
from kvcr_actors.errors import CheckpointError, ConfigError, InboxClosedError, InboxFullError
from kvcr_actors.messages import DepositPages
from kvcr_actors.port_life import close_port, closed_if_cut_short
from kvcr_actors.ports import Services, Store
from kvcr_actors.types import PageKey, Tier

log = structlog.get_logger()

_STORE_GONE = (TierCleared(Tier.STORE), *(TierCleared(tier, Ownership.STORE) for tier in Tier))
"""A store that is detached is heard of no more: all that it told of is taken back, its own copies in any tier, too."""

STORE_CLOSE_BUDGETS = 3
"""Drain budgets that a store may take to be quiet and to close."""


class StoreSlot:
    """Attaches and detaches stores of one controller. Everything is on the loop, and one call runs at a time."""

    def __init__(
        self, state: LoopState, make_services: Callable[[Callable[[Sequence[InventoryEvent]], None]], Services]
    ) -> None:
        self._state = state
        self._make_services = make_services
        self._store: Store | None = None
        self._turn = anyio.Lock()

    @property
    def store(self) -> Store | None:
        """What is attached."""
        return self._store

    async def attach(self, store: Store) -> None:
        """Open a store and use it from now on. ConfigError or StoreError say why it cannot be used."""
        state = self._state
        async with self._turn:
            if self._store is not None:
                raise ConfigError(f"store {self._store.name} is attached; detach it before store {store.name} comes")
            if state.host.capacity:
                prefetch_admission(state.config, state.host.capacity)  # refused now, not at the first request
            guarded = GuardedStore(store, state.stats)

            def observe(events: Sequence[InventoryEvent]) -> None:
                if not guarded.is_retired:
                    state.observe_store(events)

            async with closed_if_cut_short(f"store {store.name}", store, state.config.drain_budget_s):
                await store.open(self._make_services(observe), state.device.host)
            self._store = store
            if reason := store.traits.cannot_store:
                log.warning("store.stands_aside", store=store.name, reason=reason)
            else:
                state.store = guarded

    async def detach(self, budget_s: float, *, for_good: bool = False) -> None:
        """Use the store no more: what is in flight ends, then it is closed. DeadlineError if it is not quiet by then.

        `for_good` is the controller's own end: nobody is told that the tier is gone.
        """
        state = self._state
        async with self._turn:
            guarded, store = state.store, self._store
            if store is None:
                return
            state.store = self._store = None
            try:
                if guarded is not None:
                    guarded.retire()
                    with anyio.move_on_after(budget_s):
                        await guarded.quiet()
                await store.close(budget_s)
            finally:
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

    def clear_host(self) -> None:
        """Evict from host memory whatever no claim protects."""
        self._state.host.clear()
        self._state.publish_changes()

    async def _deposit(self, pages: Sequence[HostPage]) -> None:
        """Send what the store lacks of some pages (parents first) to the deposit actor, and wait for the end of it."""
        state = self._state
        while lacking := [page for page in pages if page.state is PageState.READY and page in state.depositing]:
            await state.deposit_over(lacking[0])
        lacking = [page for page in pages if page.state is PageState.READY and state.lacks_deposit(page)]
        if not lacking:
            return
        for page in lacking:
            state.host.pin(page)

        def unpin() -> None:
            for page in lacking:
                state.host.unpin(page)

        claim = state.ledger.take("deposit", "checkpoint", unpin)
        state.depositing.update(lacking)
        try:
            state.inboxes.deposit.tell(DepositPages(lacking, claim))
        except (InboxFullError, InboxClosedError):
            state.end_deposit(lacking)
            claim.release()
            await anyio.sleep(state.config.deposit_backoff_s)
            return
        await state.deposit_over(lacking[-1])


async def close_slot(slot: StoreSlot, budget_s: float) -> None:
    """At the controller's end: close what is attached, and log what it did not do in time. StoreError if it failed."""
    await close_port("store", partial(slot.detach, for_good=True), budget_s, STORE_CLOSE_BUDGETS)
