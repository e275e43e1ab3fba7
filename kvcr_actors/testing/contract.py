"""The store contract: checks that a `Store` keeps the promises of its port, for any implementation to run.

Each check takes a factory that makes a fresh, empty store of a capacity in pages (see `StoreFactory`) and raises
ContractError. `EVERY_STORE` holds for all stores, `BOUNDED_LRU` for those that evict exactly the least recently
used page and merge components.

    @pytest.mark.parametrize("check", EVERY_STORE, ids=lambda check: check.__name__)
    async def test_contract(check, make_store): await check(make_store)
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

import anyio

from kvcr_actors.core.inventory import BlocksRemoved, BlocksStored
from kvcr_actors.ports import ClearOutcome, PageBatch, PageOutcome, Store
from kvcr_actors.testing.store_driver import ALL_POOLS, StoreDriver, chain, driven, expect, letters
from kvcr_actors.types import Tier

StoreFactory: TypeAlias = Callable[[int], Store]
"""Makes a fresh, empty store that holds so many pages of `store_driver.LAYOUT`."""

Check: TypeAlias = Callable[[StoreFactory], Awaitable[None]]


async def pages_come_back_as_they_were_written(make: StoreFactory) -> None:
    """Random bytes over several pools, read in another order and by parts."""
    async with driven(lambda: make(64)) as driver:
        keys = chain("a", 24)
        expect(letters(await driver.write(keys)) == "o" * 24, "pages with room are OK")
        expect(await driver.lookup(keys) == (ALL_POOLS,) * 24, "a lookup tells every pool that was written")
        expect(await driver.read(keys[::-1]) == "o" * 24, "what was written can be read in any order")
        expect(await driver.read(keys[5:9], pools=0b010) == "oooo", "a pool can be read alone")
        expect(driver.store.contents() == frozenset(keys), "the contents are the keys that were written")


async def absent_pages_are_misses(make: StoreFactory) -> None:
    """A key that was never written is a miss among others that are not."""
    async with driven(lambda: make(8)) as driver:
        held, absent = chain("a", 2), chain("b", 1)
        await driver.write(held)
        asked = (held[0], *absent, held[1])
        expect(await driver.lookup(asked) == (ALL_POOLS, 0, ALL_POOLS), "a lookup of an absent page is 0")
        expect(await driver.read(asked) == "omo", "an absent page is a miss, and the others are read")


async def a_page_with_some_pools_serves_only_those(make: StoreFactory) -> None:
    """Partial presence is told by the lookup; asking for more is a miss that drops nothing."""
    async with driven(lambda: make(8)) as driver:
        keys = chain("a", 2)
        await driver.write(keys, pools=0b101)
        expect(await driver.lookup(keys) == (0b101, 0b101), "a lookup tells the pools held and no others")
        expect(await driver.read(keys) == "mm", "a page that lacks a component asked for is a miss")
        expect(await driver.read(keys, pools=0b101) == "oo", "the components held can still be read")


async def a_held_page_stays_as_it_is(make: StoreFactory) -> None:
    """A second write of a held page is OK, changes no byte and tells no event."""
    async with driven(lambda: make(8)) as driver:
        keys = chain("a", 3)
        await driver.write(keys)
        events = len(driver.services.events)
        expect(letters(await driver.write(keys, version=1)) == "ooo", "a page that is held already is OK")
        expect(await driver.read(keys) == "ooo", "a page that is held already keeps its bytes")
        expect(len(driver.services.events) == events, "a page that is held already is not announced again")


async def events_rebuild_the_contents(make: StoreFactory) -> None:
    """Through eviction, the events alone give the contents; parents come first and leaves go first."""
    async with driven(lambda: make(40)) as driver:
        for turn in range(12):
            keys = chain(f"prefix {turn % 7}", 10)
            expect(PageOutcome.FAILED not in await driver.write(keys), "a write without faults does not fail")
            driver.store.align(keys)
            await driver.settle()
            _expect_true_inventory(driver)
        _expect_order(driver)


async def close_ends_what_was_accepted(make: StoreFactory) -> None:
    """A write accepted before the close ends; work after it fails at once, and a second close is harmless."""
    async with driven(lambda: make(64)) as driver:
        keys = chain("a", 16)
        slots = (tuple(range(16)), (-1,) * 16, (-1,) * 16)
        running = driver.store.write(PageBatch(keys, slots, (None, *keys[:-1])))
        await driver.store.close(driver.deadline_s)
        expect(running.is_settled and running.is_quiet, "an operation accepted before the close is over after it")
        late = driver.store.write(PageBatch(keys, slots, (None, *keys[:-1])))
        with anyio.fail_after(driver.deadline_s):
            outcome = await late.outcome()
        expect(letters(outcome.pages) == "f" * 16, "a write after the close fails")
        expect(late.is_quiet, "a write after the close touches no memory")
        expect(await driver.lookup(keys) == (0,) * 16, "a lookup after the close is a miss")
        failed = await driver.cleared(driver.store.clear())
        expect(failed.error is not None, "a clear after the close fails")
        await driver.store.close(driver.deadline_s)


async def capacity_holds_and_the_oldest_leave(make: StoreFactory) -> None:
    """Beyond the capacity exactly the least recently used pages go, reads and alignments counting as uses."""
    async with driven(lambda: make(6)) as driver:
        a, b, c, d = chain("a", 2), chain("b", 2), chain("c", 2), chain("d", 4)
        for keys in (a, b, c):
            await driver.write(keys)
        expect(await driver.read(a) == "oo", "a full store serves what it holds")
        driver.store.align(b)
        await driver.write(d[:2])
        expect(driver.store.contents() == frozenset(a + b + d[:2]), "the pages not used for the longest time leave")
        await driver.write(d[2:], parents=d[1:3])
        expect(driver.store.contents() == frozenset(b + d), "a read is a use, an alignment a later one")
        _expect_true_inventory(driver)


async def a_tail_leaves_before_its_head(make: StoreFactory) -> None:
    """A prefix written in one batch or in several that are aligned is evicted from its tail."""
    async with driven(lambda: make(6)) as driver:
        keys = chain("a", 6)
        await driver.write(keys[:3])
        await driver.write(keys[3:], parents=keys[2:5])
        driver.store.align(keys)
        for length, key in zip((5, 4, 3), chain("b", 3), strict=True):
            await driver.write([key], parents=[None])
            expect(keys[length] not in driver.store.contents(), "the tail of an aligned prefix leaves first")
            expect(frozenset(keys[:length]) <= driver.store.contents(), "the head of an aligned prefix stays")


async def a_batch_beyond_the_capacity_is_full(make: StoreFactory) -> None:
    """A batch evicts none of its own pages: its head is stored, the rest refused."""
    async with driven(lambda: make(5)) as driver:
        await driver.write(chain("old", 5))
        keys = chain("a", 8)
        expect(letters(await driver.write(keys)) == "oooooFFF", "what finds no room beside its own batch is FULL")
        expect(await driver.read(keys) == "ooooommm", "the pages that were OK are held, those that were FULL are not")
        expect(
            letters(await driver.write(keys[:5] + chain("b", 1))) == "oooooF", "held pages of a batch keep their room"
        )


async def new_components_are_merged(make: StoreFactory) -> None:
    """A page gains components without a new event, and keeps those that it had."""
    async with driven(lambda: make(8)) as driver:
        keys = chain("a", 2)
        await driver.write(keys, pools=0b001)
        events = len(driver.services.events)
        expect(letters(await driver.write(keys, pools=0b110)) == "oo", "a page gains components")
        expect(await driver.lookup(keys) == (ALL_POOLS, ALL_POOLS), "a lookup tells components that were added")
        expect(await driver.read(keys) == "oo", "old and new components are read together")
        expect(len(driver.services.events) == events, "a page that gains components was stored before")


async def a_clear_forgets_every_page(make: StoreFactory) -> None:
    """Lookups miss from the call on; afterwards nothing is held, and the same keys can be written with other bytes."""
    async with driven(lambda: make(64)) as driver:
        keys = chain("a", 12)
        await driver.write(keys)
        clearing = driver.store.clear()
        expect(await driver.lookup(keys) == (0,) * 12, "a lookup after the call of a clear is a miss")
        outcome = await driver.cleared(clearing)
        expect(outcome == ClearOutcome(12), "a clear tells how many pages went, and that it did not fail")
        expect(driver.store.contents() == frozenset(), "a cleared store holds nothing")
        expect(await driver.read(keys) == "m" * 12, "a cleared page is a miss")
        _expect_true_inventory(driver)
        expect(letters(await driver.write(keys, version=1)) == "o" * 12, "a cleared page can be written")
        expect(await driver.read(keys, version=1) == "o" * 12, "what is written after a clear has its own bytes")
        _expect_true_inventory(driver)
        expect(await driver.cleared(driver.store.clear()) == ClearOutcome(12), "a store can be cleared again")
        expect(await driver.cleared(driver.store.clear()) == ClearOutcome(), "an empty store can be cleared")


async def a_clear_takes_what_is_being_written(make: StoreFactory) -> None:
    """A write asked for before a clear leaves nothing behind, whenever it ends; one asked for after it is held."""
    async with driven(lambda: make(64)) as driver:
        before, after = chain("before", 16), chain("after", 3)
        running = driver.store.write(
            PageBatch(before, (tuple(range(16)), (-1,) * 16, (-1,) * 16), (None, *before[:-1]))
        )
        clearing = driver.store.clear()
        expect(letters(await driver.write(after)) == "ooo", "a write after a clear is OK")
        with anyio.fail_after(driver.deadline_s):
            await running.outcome()
            await running.quiet()
        expect((await driver.cleared(clearing)).error is None, "a clear beside a write does not fail")
        expect(driver.store.contents() == frozenset(after), "a write asked for before a clear brings nothing back")
        _expect_true_inventory(driver)


EVERY_STORE: tuple[Check, ...] = (
    pages_come_back_as_they_were_written,
    absent_pages_are_misses,
    a_page_with_some_pools_serves_only_those,
    a_held_page_stays_as_it_is,
    events_rebuild_the_contents,
    a_clear_forgets_every_page,
    a_clear_takes_what_is_being_written,
    close_ends_what_was_accepted,
)

BOUNDED_LRU: tuple[Check, ...] = (
    capacity_holds_and_the_oldest_leave,
    a_tail_leaves_before_its_head,
    a_batch_beyond_the_capacity_is_full,
    new_components_are_merged,
)


def _expect_true_inventory(driver: StoreDriver) -> None:
    inventory = driver.services.inventory
    expect(inventory.residents(Tier.STORE) == driver.store.contents(), "the events give exactly the contents")
    expect(inventory.anomalies == 0, "a page is stored once and removed once")


def _expect_order(driver: StoreDriver) -> None:
    held: set[bytes] = set()
    parents: dict[bytes, bytes | None] = {}
    for event in driver.services.events:
        match event:
            case BlocksStored():
                for key, parent in zip(event.keys, event.parents, strict=True):
                    expect(parent is None or parent in held, "a parent is announced before its child")
                    held.add(key)
                    parents[key] = parent
            case BlocksRemoved():
                for key in event.keys:
                    held.discard(key)
                    expect(not any(parents[other] == key for other in held), "a leaf is removed before its parent")
            case _:
                held.clear()
