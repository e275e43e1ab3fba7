"""A store alone for asynchronous code: the same promises on the loop, with every fault and every cancellation."""

from __future__ import annotations

import anyio
import pytest

from kvcr_actors.aio_store import AsyncStoreClient, open_store_client
from kvcr_actors.errors import ControllerClosedError, DeadlineError
from kvcr_actors.ports import ClearOutcome, StoreTraits
from kvcr_actors.stores.memory import memory_backend
from kvcr_actors.testing.faults import Fault, FaultPlan
from kvcr_actors.testing.host_memory import BytesHostMemory
from kvcr_actors.testing.store_driver import ALL_POOLS, LAYOUT, chain, letters
from kvcr_actors.testing.stores import FaultyStore
from tests.store_client.held_store import HeldBackend, batch_of, fill, held_store, is_filled, snapshot

pytestmark = pytest.mark.anyio

TRAITS = StoreTraits(batch_pages=4)


def faulty(faults: FaultPlan | None = None) -> FaultyStore:
    return FaultyStore(memory_backend(256), faults, traits=TRAITS, late_s=0.2, latency=lambda *_: 0.01)


def free_pages(client: AsyncStoreClient) -> int:
    return client.describe()["bounce"]["free"]


async def test_pages_of_any_number_are_written_looked_up_and_read() -> None:
    host = BytesHostMemory(LAYOUT, 64)
    batch = batch_of(chain("a", 23))
    fill(host, batch)
    async with open_store_client(faulty(), host) as client:
        assert letters((await client.write(batch)).pages) == "o" * 23
        assert await client.lookup(batch.keys) == (ALL_POOLS,) * 23
        elsewhere = batch_of(batch.keys, 30)
        assert letters((await client.read(elsewhere)).pages) == "o" * 23
        assert is_filled(host, elsewhere)
        client.align(batch.keys)
        assert client.contents() == frozenset(batch.keys)
        assert free_pages(client) == 8
        assert await client.clear() == ClearOutcome(23)
        assert client.contents() == frozenset()


@pytest.mark.real_clock
async def test_large_pages_are_copied_on_a_worker_thread() -> None:
    host = BytesHostMemory(LAYOUT, 10_000)
    batch = batch_of(chain("a", 9_000))
    fill(host, batch)
    async with open_store_client(held_store(HeldBackend(9_000), batch_pages=9_000), host) as client:
        assert set((await client.write(batch)).pages) == set((await client.read(batch)).pages)
        assert is_filled(host, batch)


@pytest.mark.parametrize("fault", list(Fault))
async def test_under_every_fault_a_page_is_whole_or_not_ok_and_memory_is_left_alone_afterwards(fault: Fault) -> None:
    host = BytesHostMemory(LAYOUT, 64)
    batch = batch_of(chain("a", 10))
    store = faulty(FaultPlan({("read", 1): fault}))
    fill(host, batch)
    async with open_store_client(store, host, drain_budget_s=0.5) as client:
        await client.write(batch)
        fill(host, batch, version=1)
        before = snapshot(host)
        outcome = await client.read(batch, timeout_s=0.5)
        told = letters(outcome.pages)
        for index, letter in enumerate(told):
            page = batch_of(batch.keys[index : index + 1], index)
            if fault is not Fault.CORRUPT_SILENTLY:
                assert is_filled(host, page, version=0 if letter == "o" else 1)
        assert told[:4] == "oooo"
        assert told[8:] == "oo"
        fill(host, batch, version=1)
        assert snapshot(host) == before
        await anyio.sleep(0.4)
        store.release()
        await anyio.sleep(0.1)
        assert snapshot(host) == before
        # Only of a store that never says it is done nothing comes back.
        assert free_pages(client) == (4 if fault is Fault.DROP else 8)


async def test_a_caller_that_is_cancelled_anywhere_has_its_memory_back() -> None:
    host = BytesHostMemory(LAYOUT, 64)
    batch = batch_of(chain("a", 10))
    fill(host, batch)
    async with open_store_client(faulty(), host) as client:
        await client.write(batch)
        for call in (client.read, client.write):
            cancelled = 0
            for turn in range(12):
                with anyio.move_on_after(0.003 * turn) as scope:
                    await call(batch)
                cancelled += scope.cancelled_caught
                fill(host, batch, version=1)
                before = snapshot(host)
                await anyio.sleep(0.05)
                assert snapshot(host) == before
                assert free_pages(client) == 8
            assert cancelled > 2


async def test_deadlines_are_told_and_a_late_lookup_raises() -> None:
    host = BytesHostMemory(LAYOUT, 64)
    store = faulty(FaultPlan.always(Fault.STALL, "lookup", "read"))
    async with open_store_client(store, host) as client:
        with pytest.raises(DeadlineError, match=r"has not looked 2 keys up within 0\.5 s"):
            await client.lookup(chain("a", 2), timeout_s=0.5)
        outcome = await client.read(batch_of(chain("a", 2)), timeout_s=0.5)
        assert letters(outcome.pages) == "ff"
        assert client.describe()["late"] == 2
        store.release()


async def test_a_close_refuses_new_calls_and_ends_what_is_open() -> None:
    host = BytesHostMemory(LAYOUT, 64)
    store = faulty()
    client = await AsyncStoreClient(store, host).start()
    client.begin_request("r", {"peer": 1})
    assert store.hints == {"r": {"peer": 1}}
    await client.close()
    await client.close()
    assert store.hints == {}
    with pytest.raises(ControllerClosedError, match="not running"):
        await client.read(batch_of(chain("a", 1)))
    with pytest.raises(ControllerClosedError, match="not running"):
        client.align(chain("a", 1))
