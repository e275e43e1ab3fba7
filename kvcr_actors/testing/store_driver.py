"""A store under test, opened with host memory and services, and the moves that a contract makes with it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager

import anyio
import attrs

from kvcr_actors.ports import BatchOutcome, ClearOutcome, PageBatch, PageOutcome, Store
from kvcr_actors.testing.host_memory import BytesHostMemory
from kvcr_actors.testing.services import RecordingServices, open_services
from kvcr_actors.transfers import Operation
from kvcr_actors.types import NO_SLOT, CacheLayout, PageKey, PoolSpec

LAYOUT = CacheLayout((PoolSpec("kv", 2, 96), PoolSpec("swa", 1, 40), PoolSpec("mamba", 1, 7)))
"""Three pools of unlike sizes, one of them odd."""

ALL_POOLS = (1 << len(LAYOUT.pools)) - 1


class ContractError(AssertionError):
    """A store or a device does not do what its port says; the message tells which promise it broke."""


def expect(condition: bool, promise: str) -> None:
    """Raise ContractError unless the condition holds."""
    if not condition:
        raise ContractError(promise)


def chain(name: str, pages: int) -> tuple[PageKey, ...]:
    """The keys of a prefix of so many pages, root to tail; the same name gives the same keys."""
    return tuple(hashlib.sha256(f"{name}/{index}".encode()).digest() for index in range(pages))


def page_bytes(key: PageKey, pool: int, *, version: int = 0) -> bytes:
    """The bytes that belong to a component, a function of its key, pool and version alone."""
    return random.Random(f"{key.hex()}/{pool}/{version}").randbytes(LAYOUT.pools[pool].page_bytes)


@attrs.define
class StoreDriver:
    """Moves pages between a store and host slots that it picks; waits are bounded by `deadline_s`.

    Host slots are dealt in a shuffled order, so that neighbouring pages are not neighbours in memory.
    """

    store: Store
    host: BytesHostMemory
    services: RecordingServices
    deadline_s: float = 20.0

    async def write(
        self,
        keys: Sequence[PageKey],
        *,
        pools: int = ALL_POOLS,
        parents: Sequence[PageKey | None] | None = None,
        version: int = 0,
    ) -> tuple[PageOutcome, ...]:
        """Write a run of pages with the bytes that belong to them; `parents` as in a chain unless given."""
        slots = self._slots(len(keys), pools)
        for pool, chosen in enumerate(slots):
            for key, slot in zip(keys, chosen, strict=True):
                if slot != NO_SLOT:
                    self.host.page(pool, slot)[:] = page_bytes(key, pool, version=version)
        chained = (None, *keys[:-1]) if parents is None else tuple(parents)
        return (await self._outcome(PageBatch(tuple(keys), slots, chained), is_write=True)).pages

    async def read(self, keys: Sequence[PageKey], *, pools: int = ALL_POOLS, version: int = 0) -> str:
        """Read pages into poisoned slots; one letter a page: `o`k, `m`iss, `f`ailed. Wrong bytes under OK raise."""
        slots = self._slots(len(keys), pools)
        for pool in range(len(slots)):
            self.host.poison(pool, range(self.host.slots))
        outcomes = (await self._outcome(PageBatch(tuple(keys), slots), is_write=False)).pages
        for index, (key, outcome) in enumerate(zip(keys, outcomes, strict=True)):
            for pool, chosen in enumerate(slots):
                if outcome is PageOutcome.OK and chosen[index] != NO_SLOT:
                    same = bytes(self.host.page(pool, chosen[index])) == page_bytes(key, pool, version=version)
                    expect(same, f"page {index} is OK, so the bytes of its pool {pool} are those that were written")
        return letters(outcomes)

    async def lookup(self, keys: Sequence[PageKey]) -> tuple[int, ...]:
        """The pools held for each key."""
        with anyio.fail_after(self.deadline_s):
            return await self.store.lookup(keys, "contract").outcome()

    async def cleared(self, clearing: Operation[ClearOutcome]) -> ClearOutcome:
        """How a clear ended."""
        with anyio.fail_after(self.deadline_s):
            outcome = await clearing.outcome()
            await clearing.quiet()
        return outcome

    async def settle(self) -> None:
        """Wait for everything asked for so far, alignments included."""
        await self.read(chain("never written", 1), pools=1)

    async def _outcome(self, batch: PageBatch, *, is_write: bool) -> BatchOutcome:
        operation = self.store.write(batch) if is_write else self.store.read(batch, "contract")
        with anyio.fail_after(self.deadline_s):
            outcome = await operation.outcome()
            await operation.quiet()
        expect(len(outcome.pages) == len(batch.keys), "a batch has one outcome a page")
        return outcome

    def _slots(self, pages: int, pools: int) -> tuple[tuple[int, ...], ...]:
        order = list(range(self.host.slots))
        random.Random(pages).shuffle(order)
        return tuple(
            tuple(order[:pages]) if pools >> pool & 1 else (NO_SLOT,) * pages for pool in range(len(LAYOUT.pools))
        )


def letters(outcomes: Sequence[PageOutcome]) -> str:
    """Outcomes as one letter each: `o`k, `m`iss, `F`ull, `f`ailed."""
    words = {PageOutcome.OK: "o", PageOutcome.MISS: "m", PageOutcome.FULL: "F", PageOutcome.FAILED: "f"}
    return "".join(words[outcome] for outcome in outcomes)


@asynccontextmanager
async def driven(make: Callable[[], Store], *, slots: int = 64) -> AsyncGenerator[StoreDriver]:
    """Make and open a store, and close it at the end of the block."""
    async with open_services() as services:
        store = make()
        driver = StoreDriver(store, BytesHostMemory(LAYOUT, slots), services)
        await store.open(services, driver.host)
        try:
            yield driver
        finally:
            with anyio.CancelScope(shield=True):
                await store.close(driver.deadline_s)
