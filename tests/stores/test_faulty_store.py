"""The store for tests: every fault does what it says, on virtual time."""

from __future__ import annotations

import random

import anyio
import pytest

from kvcr_actors.errors import DeadlineError
from kvcr_actors.ports import PageBatch
from kvcr_actors.stores.memory import memory_backend
from kvcr_actors.testing.faults import Fault, FaultPlan
from kvcr_actors.testing.faulty_backend import SCRIBBLE
from kvcr_actors.testing.store_driver import (
    ALL_POOLS,
    LAYOUT,
    ContractError,
    StoreDriver,
    chain,
    driven,
    letters,
    page_bytes,
)
from kvcr_actors.testing.stores import FaultyStore
from kvcr_actors.types import Tier

pytestmark = pytest.mark.anyio

KEYS = chain("a", 4)
SLOTS = (range(4),) * 3
WRITE = PageBatch(KEYS, SLOTS, (None, *KEYS[:-1]))


def _store(*faults: tuple[str, int, Fault]) -> FaultyStore:
    plan = FaultPlan({(kind, number): fault for kind, number, fault in faults})
    return FaultyStore(memory_backend(16), plan, late_s=0.4)


def _in_memory(driver: StoreDriver, slot: int) -> bytes:
    return bytes(driver.host.page(0, slot))


async def test_a_failure_does_nothing_and_says_so() -> None:
    async with driven(lambda: _store(("write", 0, Fault.FAIL), ("read", 0, Fault.FAIL))) as driver:
        assert letters(await driver.write(KEYS)) == "ffff"
        assert driver.store.contents() == frozenset()
        await driver.write(KEYS)
        assert await driver.read(KEYS) == "ffff"
        assert await driver.read(KEYS) == "oooo"


async def test_a_truncated_operation_does_its_first_half() -> None:
    faults = [(kind, 0, Fault.TRUNCATE) for kind in ("lookup", "read", "write")]
    async with driven(lambda: _store(*faults)) as driver:
        assert letters(await driver.write(KEYS)) == "ooff"
        assert driver.store.contents() == frozenset(KEYS[:2])
        await driver.write(KEYS)
        assert await driver.lookup(KEYS) == (ALL_POOLS, ALL_POOLS, 0, 0)
        assert await driver.read(KEYS) == "ooff"


async def test_noticed_damage_is_a_miss_and_the_page_goes() -> None:
    async with driven(lambda: _store(("write", 0, Fault.CORRUPT), ("read", 0, Fault.CORRUPT))) as driver:
        assert letters(await driver.write(KEYS)) == "fooo"
        await driver.write(KEYS)
        assert await driver.read(KEYS) == "mooo"
        assert driver.store.contents() == driver.services.inventory.keys(Tier.STORE) == frozenset(KEYS[1:])


@pytest.mark.parametrize("kind", ["read", "write"])
async def test_silent_damage_is_wrong_bytes_under_ok(kind: str) -> None:
    async with driven(lambda: _store((kind, 0, Fault.CORRUPT_SILENTLY))) as driver:
        assert letters(await driver.write(KEYS)) == "oooo"
        for pool in range(3):
            assert page_bytes(KEYS[0], pool) in bytes(driver.host.buffer(pool)), "host memory itself is unharmed"
        with pytest.raises(ContractError, match="bytes"):
            await driver.read(KEYS)


async def test_a_lying_lookup_promises_every_pool() -> None:
    async with driven(lambda: _store(("lookup", 0, Fault.CORRUPT_SILENTLY), ("lookup", 1, Fault.CORRUPT))) as driver:
        assert await driver.lookup(KEYS) == (ALL_POOLS,) * 4
        await driver.write(KEYS)
        assert await driver.lookup(KEYS) == (0, *(ALL_POOLS,) * 3)


async def test_a_stalled_operation_goes_on_when_it_is_released() -> None:
    store = _store(("write", 0, Fault.STALL))
    async with driven(lambda: store) as driver:
        stalled = store.write(WRITE)
        await anyio.sleep(0.1)
        assert not stalled.is_settled
        with pytest.raises(DeadlineError, match="1 operations"):
            await store.close(0.05)
        store.release()
        with anyio.fail_after(driver.deadline_s):
            assert letters((await stalled.outcome()).pages) == "oooo"


async def test_a_dropped_completion_is_done_but_never_told() -> None:
    async with driven(lambda: _store(("write", 0, Fault.DROP))) as driver:
        dropped = driver.store.write(WRITE)
        await anyio.sleep(0.1)
        assert not dropped.is_settled
        assert not dropped.is_quiet
        assert driver.store.contents() == driver.services.inventory.keys(Tier.STORE) == frozenset(KEYS)


async def test_a_duplicate_completion_changes_nothing() -> None:
    async with driven(lambda: _store(("read", 0, Fault.DUPLICATE))) as driver:
        await driver.write(KEYS)
        assert await driver.read(KEYS) == "oooo"
        await anyio.sleep(0.01)


async def test_a_late_read_goes_on_writing_its_slots_until_it_is_quiet() -> None:
    async with driven(lambda: _store(("read", 0, Fault.LATE))) as driver:
        await driver.write(KEYS)
        for pool in range(3):
            driver.host.poison(pool, range(8))
        late = driver.store.read(PageBatch(KEYS, SLOTS), "request")
        assert letters((await late.outcome()).pages) == "ffff"
        assert not late.is_quiet
        driver.host.poison(0, range(4))
        await anyio.sleep(0.3)
        assert _in_memory(driver, 0) == bytes([SCRIBBLE]) * LAYOUT.pools[0].page_bytes
        assert not late.is_quiet
        with anyio.fail_after(10):
            await late.quiet()
        assert _in_memory(driver, 0) == page_bytes(KEYS[0], 0)


async def test_a_late_write_reads_its_slots_until_it_is_quiet() -> None:
    async with driven(lambda: _store(("write", 0, Fault.LATE))) as driver:
        late = driver.store.write(WRITE)
        assert letters((await late.outcome()).pages) == "ffff"
        assert driver.store.contents() == frozenset()
        with anyio.fail_after(10):
            await late.quiet()
        assert driver.store.contents() == frozenset(KEYS)


async def test_operations_take_their_latency_and_run_side_by_side() -> None:
    def latency(kind: str, pages: int) -> float:
        return pages * 0.1 if kind == "read" else 0.0

    async with driven(lambda: FaultyStore(memory_backend(16), latency=latency)) as driver:
        await driver.write(KEYS)
        began = anyio.current_time()
        long = driver.store.read(PageBatch(KEYS, SLOTS), "request")
        short = driver.store.read(PageBatch(KEYS[:1], ((4,),) * 3), "request")
        with anyio.fail_after(20):
            await short.outcome()
            assert not long.is_settled
            await long.outcome()
        assert anyio.current_time() - began >= 0.39


async def test_close_waits_for_what_runs() -> None:
    store = FaultyStore(memory_backend(16), latency=lambda kind, pages: 0.1)
    async with driven(lambda: store):
        running = store.write(WRITE)
        await store.close(20)
        assert running.is_quiet
        assert store.contents() == frozenset(KEYS)


def test_a_plan_is_a_function_of_its_seed() -> None:
    def fired(seed: int) -> list[Fault | None]:
        plan = FaultPlan(rates={Fault.FAIL: 0.2, Fault.LATE: 0.1}, rng=random.Random(seed))
        return [plan.decide("read") for _ in range(200)]

    assert fired(1) == fired(1) != fired(2)
    assert {None, Fault.FAIL, Fault.LATE} == set(fired(1))


def test_a_plan_counts_what_it_saw_and_what_fired() -> None:
    plan = FaultPlan({("read", 1): Fault.DROP}, rates={Fault.FAIL: 1.0}, rng=random.Random(1), kinds={"write"}, limit=2)
    reads = [plan.decide("read") for _ in range(3)]
    writes = [plan.decide("write") for _ in range(4)]
    assert reads == [None, Fault.DROP, None]
    assert writes == [Fault.FAIL, Fault.FAIL, None, None]
    assert plan.seen == {"read": 3, "write": 4}
    assert plan.fired == {("read", Fault.DROP): 1, ("write", Fault.FAIL): 2}


def test_a_plan_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="rng"):
        FaultPlan(rates={Fault.FAIL: 0.5})
    with pytest.raises(ValueError, match="more than 1"):
        FaultPlan(rates={Fault.FAIL: 0.6, Fault.DROP: 0.6}, rng=random.Random(1))
