"""An embedded store behind its owner thread: nothing blocks the loop, order is kept, the close has a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from kvcr_actors.errors import DeadlineError, StoreError, StoreLockedError
from kvcr_actors.ports import BatchOutcome, HostMemory, PageBatch, PageOutcome, Store
from kvcr_actors.stores.bounded import BoundedBackend
from kvcr_actors.stores.disk import disk_backend
from kvcr_actors.stores.memory import MemoryMedium, memory_backend
from kvcr_actors.stores.threaded import ThreadedStore
from kvcr_actors.testing.host_memory import BytesHostMemory
from kvcr_actors.testing.services import open_services
from kvcr_actors.testing.store_driver import ALL_POOLS, LAYOUT, chain, driven, letters, page_bytes
from kvcr_actors.types import Tier
from tests.stores.pages import NAMESPACE, open_disk

pytestmark = [pytest.mark.anyio, pytest.mark.real_clock]

KEYS = chain("a", 4)
BATCH = PageBatch(KEYS, (range(4),) * 3, (None, *KEYS[:-1]))


class _SlowBackend(BoundedBackend):
    """A memory backend whose writes wait for `may_write`."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, MemoryMedium())
        self.began = threading.Event()
        self.may_write = threading.Event()

    def write(self, batch: PageBatch, host: HostMemory) -> BatchOutcome:
        self.began.set()
        assert self.may_write.wait(20)
        return super().write(batch, host)


class _BrokenBackend(BoundedBackend):
    """A backend with a bug: its writes raise what no backend may raise."""

    def write(self, batch: PageBatch, host: HostMemory) -> BatchOutcome:
        raise ZeroDivisionError("a bug")


async def test_lookups_answer_while_a_write_blocks_the_thread() -> None:
    backend = _SlowBackend(8)
    async with driven(lambda: ThreadedStore("slow", backend)) as driver:
        writing = driver.store.write(BATCH)
        assert await anyio.to_thread.run_sync(backend.began.wait, 20)
        looked_up = driver.store.lookup(KEYS, "request")
        assert looked_up.is_settled
        assert await looked_up.outcome() == (0, 0, 0, 0)
        assert not writing.is_settled
        backend.may_write.set()
        with anyio.fail_after(20):
            assert letters((await writing.outcome()).pages) == "oooo"
        assert await driver.lookup(KEYS) == (ALL_POOLS,) * 4


@pytest.mark.parametrize("reads_first", [False, True])
async def test_scenario_31_a_reader_during_a_write_sees_a_miss_or_the_whole_page(
    make_store: Callable[[int], Store], reads_first: bool
) -> None:
    into, out_of = range(8, 11), range(3)
    pools = range(len(LAYOUT.pools))
    async with driven(lambda: make_store(1000)) as driver:
        for turn in range(100):
            keys = chain(str(turn), 3)
            for pool in pools:
                driver.host.poison(pool, into)
                for slot, key in zip(out_of, keys, strict=True):
                    driver.host.page(pool, slot)[:] = page_bytes(key, pool)
            reading = PageBatch(keys, (into,) * 3)
            early = driver.store.read(reading, "early") if reads_first else None
            writing = driver.store.write(PageBatch(keys, (out_of,) * 3, (None, *keys[:-1])))
            with anyio.fail_after(20):
                found = await (early or driver.store.read(reading, "late")).outcome()
                await writing.quiet()
            for slot, key, outcome in zip(into, keys, found.pages, strict=True):
                assert outcome in (PageOutcome.OK, PageOutcome.MISS)
                if outcome is PageOutcome.OK:
                    assert all(bytes(driver.host.page(pool, slot)) == page_bytes(key, pool) for pool in pools)


async def test_events_of_a_write_are_published_when_its_outcome_is_seen() -> None:
    async with driven(lambda: ThreadedStore("memory", memory_backend(64))) as driver:
        for turn in range(50):
            keys = chain(str(turn), 2)
            await driver.write(keys)
            assert frozenset(keys) <= driver.services.inventory.keys(Tier.STORE)


async def test_what_a_folder_holds_is_announced_at_open(tmp_path: Path) -> None:
    pages = open_disk(tmp_path / "store")
    pages.write(KEYS)
    pages.close()
    async with driven(lambda: ThreadedStore("disk", disk_backend(tmp_path / "store", 8, NAMESPACE))) as driver:
        await driver.settle()
        assert driver.services.inventory.keys(Tier.STORE) == frozenset(KEYS)
        assert driver.services.inventory.parent(Tier.STORE, KEYS[1]) == KEYS[0]


async def test_a_store_that_cannot_open_raises_and_can_be_opened_later(tmp_path: Path) -> None:
    holder = open_disk(tmp_path / "store")
    async with open_services() as services:
        store = ThreadedStore("disk", disk_backend(tmp_path / "store", 8, NAMESPACE))
        with pytest.raises(StoreLockedError):
            await store.open(services, BytesHostMemory(LAYOUT, 4))
        assert letters((await store.write(BATCH).outcome()).pages) == "ffff"
        await store.close(1)
        holder.close()
        await store.open(services, BytesHostMemory(LAYOUT, 4))
        assert letters((await store.write(BATCH).outcome()).pages) == "oooo"
        await store.close(20)


async def test_a_store_that_is_not_open_fails_and_is_not_opened_twice() -> None:
    async with open_services() as services:
        store = ThreadedStore("memory", memory_backend(4))
        assert letters((await store.write(BATCH).outcome()).pages) == "ffff"
        assert await store.lookup(KEYS, "request").outcome() == (0, 0, 0, 0)
        await store.close(1)
        await store.open(services, BytesHostMemory(LAYOUT, 4))
        with pytest.raises(StoreError, match="opened before"):
            await store.open(services, BytesHostMemory(LAYOUT, 4))
        await store.close(20)


async def test_an_unexpected_exception_fails_its_batch_alone() -> None:
    async with driven(lambda: ThreadedStore("broken", _BrokenBackend(4, MemoryMedium()))) as driver:
        outcome = await driver.store.write(BATCH).outcome()
        assert letters(outcome.pages) == "ffff"
        assert outcome.error == "a bug"
        assert await driver.read(KEYS) == "mmmm"


async def test_a_close_past_its_deadline_says_so_and_the_running_write_stays_unquiet() -> None:
    backend = _SlowBackend(8)
    async with open_services() as services:
        store = ThreadedStore("slow", backend)
        await store.open(services, BytesHostMemory(LAYOUT, 8))
        running, waiting = store.write(BATCH), store.write(BATCH)
        assert await anyio.to_thread.run_sync(backend.began.wait, 20)
        with pytest.raises(DeadlineError, match="store-slow"):
            await store.close(0.05)
        assert not running.is_quiet
        assert waiting.is_quiet
        assert letters((await waiting.outcome()).pages) == "ffff"
        backend.may_write.set()
        with anyio.fail_after(20):
            await running.quiet()
            assert letters((await running.outcome()).pages) == "oooo"


async def test_contents_can_be_asked_for_while_the_thread_writes() -> None:
    async with driven(lambda: ThreadedStore("memory", memory_backend(200))) as driver:
        operations = []
        for turn in range(150):
            keys = chain(str(turn), 8)
            operations.append(driver.store.write(PageBatch(keys, (range(8),) * 3, (None, *keys[:-1]))))
        while not operations[-1].is_settled:
            assert len(driver.store.contents()) <= 200
            driver.store.lookup(keys, "request")
            await anyio.lowlevel.checkpoint()
        assert len(driver.store.contents()) == 200
