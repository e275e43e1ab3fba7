"""A store alone for synchronous callers: whole batches, deadlines that protect memory, threads, forks, and its end."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvcr_actors.core.inventory import InventoryIndex
from kvcr_actors.devices.foreign_host import ForeignHostPools
from kvcr_actors.errors import ConfigError, ControllerClosedError, DeadlineError, InvalidNodeError, StoreError
from kvcr_actors.host_buffers import HostBuffers
from kvcr_actors.ports import BatchOutcome, ClearOutcome, PageBatch, PageOutcome, Store, StoreTraits
from kvcr_actors.runtime.hosts import Backend
from kvcr_actors.store_client import StoreClient
from kvcr_actors.stores.memory import memory_backend
from kvcr_actors.stores.threaded import ThreadedStore
from kvcr_actors.testing.confirming import ConfirmingStore
from kvcr_actors.testing.faults import Fault, FaultPlan
from kvcr_actors.testing.host_memory import BytesHostMemory
from kvcr_actors.testing.store_driver import ALL_POOLS, LAYOUT, chain, letters
from kvcr_actors.testing.stores import FaultyStore
from kvcr_actors.transfers import Operation
from kvcr_actors.types import NO_SLOT, CacheLayout, PageKey, RequestId, Tier
from tests.store_client.held_store import (
    WAIT_S,
    HeldBackend,
    batch_of,
    fill,
    held_store,
    is_filled,
    snapshot,
)

LATE_S = 0.05


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(WAIT_S)
        assert not thread.is_alive(), thread


@pytest.fixture
def host() -> BytesHostMemory:
    return BytesHostMemory(LAYOUT, 256)


@pytest.fixture
def foreign() -> ForeignHostPools:
    """An engine's own page-first memory, with another number of slots in each pool."""
    counts = (40, 70, 100)
    return ForeignHostPools(
        LAYOUT,
        [
            [torch.zeros((count, spec.planes, spec.plane_bytes), dtype=torch.uint8)]
            for count, spec in zip(counts, LAYOUT.pools, strict=True)
        ],
    )


def free_pages(client: StoreClient) -> int:
    return client.describe()["bounce"]["free"]


def test_an_engines_own_memory_is_written_and_read_in_every_slot_that_a_pool_has(
    foreign: ForeignHostPools, real_backend: Backend
) -> None:
    keys, pools = chain("a", 20), range(len(LAYOUT.pools))
    last = tuple(tuple(range(foreign.slots_of(pool) - 20, foreign.slots_of(pool))) for pool in pools)
    first = (tuple(range(20)),) * len(pools)
    for pool in pools:
        (view,) = foreign.views(pool)
        view.copy_(torch.randint(0, 256, view.shape, dtype=torch.uint8))
    before = [foreign.views(pool)[0].clone() for pool in pools]
    with StoreClient(ThreadedStore("memory", memory_backend(64)), foreign, loop=real_backend) as client:
        assert letters(client.write(PageBatch(keys, last, (None, *keys[:-1])), timeout_s=WAIT_S).pages) == "o" * 20
        assert letters(client.read(PageBatch(keys, first), timeout_s=WAIT_S).pages) == "o" * 20
        beyond = (*first[:2], tuple(range(81, 101)))
        with pytest.raises(InvalidNodeError, match=r"pool mamba: slots 81 to 100; it has 100"):
            client.read(PageBatch(keys, beyond), timeout_s=WAIT_S)
    for pool in pools:
        (view,) = foreign.views(pool)
        assert torch.equal(view[:20], before[pool][-20:])
        assert torch.equal(view[20:], before[pool][20:])


def test_memory_that_is_not_page_first_is_refused_by_name() -> None:
    runs = [
        [torch.zeros((8, spec.plane_bytes), dtype=torch.uint8) for _ in range(spec.planes)] for spec in LAYOUT.pools
    ]
    with pytest.raises(ConfigError, match=r"host pool kv: .*page-first"):
        StoreClient(ThreadedStore("memory", memory_backend(8)), ForeignHostPools(LAYOUT, runs))


def test_a_batch_of_any_length_goes_in_parts_and_comes_back(
    host: BytesHostMemory, real_backend: Backend, make_store: Callable[[int], Store]
) -> None:
    keys = chain("a", 150)
    with StoreClient(make_store(4096), host, loop=real_backend) as client:
        batch = batch_of(keys, 20)
        fill(host, batch)
        assert client.write(batch, timeout_s=WAIT_S).pages == (PageOutcome.OK,) * 150
        assert client.contents() == frozenset(keys)
        assert client.lookup((*keys, *chain("b", 1)), timeout_s=WAIT_S) == (ALL_POOLS,) * 150 + (0,)
        order = random.Random(1).sample(range(256), 150)
        scattered = PageBatch(keys, (order, order[::-1], order))
        for pool in range(3):
            host.poison(pool, range(256))
        assert client.read(scattered, timeout_s=WAIT_S).pages == (PageOutcome.OK,) * 150
        assert is_filled(host, scattered)
        assert free_pages(client) == 2 * 64


def test_no_operation_has_more_pages_than_the_store_or_the_bounce_slots_take(host: BytesHostMemory) -> None:
    for bounce_pages, largest in ((None, 8), (5, 5), (1, 1)):
        backend = HeldBackend()
        batch = batch_of(chain("a", 21))
        fill(host, batch)
        with StoreClient(held_store(backend), host, bounce_pages=bounce_pages) as client:
            assert letters(client.write(batch).pages) == letters(client.read(batch).pages) == "o" * 21
            assert free_pages(client) == (bounce_pages or 16)
        assert max(backend.sizes) == largest
        assert sum(backend.sizes) == 2 * 21


def test_a_page_that_is_not_there_leaves_its_slot_alone(host: BytesHostMemory) -> None:
    keys, absent = chain("a", 3), chain("b", 1)
    with StoreClient(held_store(HeldBackend()), host) as client:
        batch = batch_of(keys)
        fill(host, batch)
        client.write(batch)
        mixed = batch_of((*keys[:1], *absent, *keys[1:]), 100)
        before = host.page(1, 101)[:].tobytes()
        assert letters(client.read(mixed).pages) == "omoo"
        assert host.page(1, 101)[:].tobytes() == before
        parts = PageBatch(keys, ((NO_SLOT,) * 3, (50, 51, 52), (NO_SLOT,) * 3))
        whole = snapshot(host)
        assert letters(client.read(parts).pages) == "ooo"
        after = snapshot(host)
        assert (after[0], after[2]) == (whole[0], whole[2])
        assert bytes(host.page(1, 50)) == bytes(host.page(1, 100))


def read_late(host: BytesHostMemory, loop: Backend = "asyncio") -> list[bytes]:
    """Read past the deadline, give the slots a new owner, let the store answer; the owner's bytes before it did."""
    backend = HeldBackend()
    batch = batch_of(chain("a", 12))
    fill(host, batch)
    with StoreClient(held_store(backend), host, loop=loop) as client:
        assert letters(client.write(batch).pages) == "o" * 12
        backend.may_go.clear()
        outcome = client.read(batch, timeout_s=LATE_S)
        assert letters(outcome.pages) == "f" * 12
        assert outcome.error is not None
        assert "deadline" in outcome.error
        fill(host, batch, version=1)
        owners = snapshot(host)
        backend.may_go.set()
        assert letters(client.read(batch_of(chain("b", 1), 200), timeout_s=WAIT_S).pages) == "m"  # after the late one
        assert free_pages(client) == 16
    return owners


def test_a_read_that_is_late_never_lands_in_the_callers_memory(host: BytesHostMemory, real_backend: Backend) -> None:
    owners = read_late(host, real_backend)
    assert snapshot(host) == owners


def test_without_bounce_slots_the_same_late_read_would_land(
    host: BytesHostMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def callers_own(layout: CacheLayout, slots: int) -> HostBuffers:
        del layout, slots
        return host

    monkeypatch.setattr(HostBuffers, "mapped", callers_own)
    owners = read_late(host)
    assert snapshot(host) != owners


def test_a_write_that_is_late_stores_the_bytes_of_its_time(host: BytesHostMemory) -> None:
    backend = HeldBackend()
    batch = batch_of(chain("a", 3))
    with StoreClient(held_store(backend), host) as client:
        backend.may_go.clear()
        fill(host, batch)
        outcome = client.write(batch, timeout_s=LATE_S)
        assert letters(outcome.pages) == "fff"
        fill(host, batch, version=1)  # the slots have a new owner
        backend.may_go.set()
        assert letters(client.read(batch, timeout_s=WAIT_S).pages) == "ooo"
        assert is_filled(host, batch)
        assert free_pages(client) == 16


def test_parts_that_came_in_time_count_and_the_others_are_told(host: BytesHostMemory) -> None:
    backend = HeldBackend()
    keys = chain("a", 24)
    batch = batch_of(keys)
    fill(host, batch)
    with StoreClient(held_store(backend), host) as client:
        client.write(batch)

        class _StopsAfterOne(threading.Event):
            def wait(self, timeout: float | None = None) -> bool:
                return super().wait(timeout) if len(backend.sizes) > before + 1 else True

        before = len(backend.sizes)
        backend.may_go = _StopsAfterOne()
        fill(host, batch, version=1)
        outcome = client.read(batch, timeout_s=0.5)
        assert letters(outcome.pages) == "o" * 8 + "f" * 16
        assert is_filled(host, batch_of(keys[:8]))
        backend.may_go.set()


def test_bounce_slots_that_late_operations_hold_bound_what_is_under_way_and_come_back(host: BytesHostMemory) -> None:
    backend = HeldBackend()
    with StoreClient(held_store(backend), host, bounce_pages=8) as client:
        backend.may_go.clear()
        for name in "abcd":
            assert letters(client.read(batch_of(chain(name, 8)), timeout_s=LATE_S).pages) == "f" * 8
        assert letters(client.write(batch_of(chain("e", 8)), timeout_s=LATE_S).pages) == "f" * 8
        assert free_pages(client) == 0
        backend.may_go.set()
        assert letters(client.read(batch_of(chain("f", 8)), timeout_s=WAIT_S).pages) == "m" * 8
        assert backend.sizes == [8, 8]  # the one that was late, and the last: those between never had slots
        assert free_pages(client) == 8


def test_many_threads_use_one_client(host: BytesHostMemory, real_backend: Backend) -> None:
    with StoreClient(held_store(HeldBackend()), host, loop=real_backend, bounce_pages=12) as client:

        def work(worker: int) -> bool:
            good = True
            for turn in range(10):
                batch = batch_of(chain(f"{worker}/{turn}", 20), worker * 20)
                fill(host, batch)
                good &= letters(client.write(batch, timeout_s=WAIT_S).pages) == "o" * 20
                for pool in range(3):
                    host.poison(pool, batch.slots[pool])
                good &= letters(client.read(batch, timeout_s=WAIT_S).pages) == "o" * 20
                good &= is_filled(host, batch)
            return good

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(8)))
        assert free_pages(client) == 12


def test_requests_lend_their_hints_and_are_ended_by_the_close(host: BytesHostMemory) -> None:
    store = FaultyStore(memory_backend(8))
    with StoreClient(store, host) as client:
        client.begin_request("a", {"peer": 1})
        client.begin_request("b", {"peer": 2})
        client.begin_request("c")
        with pytest.raises(InvalidNodeError, match="'a' is open"):
            client.begin_request("a", {})
        assert store.hints == {"a": {"peer": 1}, "b": {"peer": 2}}
        client.end_request("a")
        with pytest.raises(InvalidNodeError, match="'a' is not open"):
            client.end_request("a")
        assert store.hints == {"b": {"peer": 2}}
    assert store.hints == {}


def test_a_promise_is_confirmed_and_its_claim_ends_with_the_request(host: BytesHostMemory) -> None:
    keys = chain("a", 2)
    store = ConfirmingStore(memory_backend(8), dict.fromkeys(keys, ALL_POOLS))
    batch = batch_of(keys)
    fill(host, batch)
    with StoreClient(store, host) as client:
        client.begin_request("r", {"peer": 1})
        assert client.lookup(keys, "r", WAIT_S) == (ALL_POOLS,) * 2
        assert client.confirm(keys, "r", WAIT_S) is False
        client.write(batch)
        assert client.confirm(keys, "r", WAIT_S) is True
        assert store.open_claims == 1
        client.end_request("r")
        assert store.open_claims == 0


class _Stalls(ConfirmingStore):
    """Stalls every lookup and confirmation until it is closed."""

    def __init__(self) -> None:
        super().__init__(memory_backend(8), {}, FaultPlan.always(Fault.STALL, "lookup", "confirm"))

    def lookup(self, keys: Sequence[PageKey], request_id: RequestId) -> Operation[tuple[int, ...]]:
        return FaultyStore.lookup(self, keys, request_id)

    async def close(self, deadline_s: float) -> None:
        self.release()
        await super().close(deadline_s)


def test_a_question_that_is_not_answered_is_a_deadline_error(host: BytesHostMemory) -> None:
    keys = chain("a", 1)
    with StoreClient(_Stalls(), host, drain_budget_s=0.5) as client:
        with pytest.raises(DeadlineError, match=r"0\.05 s"):
            client.lookup(keys, timeout_s=LATE_S)
        with pytest.raises(DeadlineError, match=r"0\.05 s"):
            client.confirm(keys, "r", LATE_S)


class _Liar(FaultyStore):
    """Answers with too few pages, or raises."""

    def read(self, batch: PageBatch, request_id: RequestId) -> Operation[BatchOutcome]:
        raise ZeroDivisionError("a bug")

    def write(self, batch: PageBatch) -> Operation[BatchOutcome]:
        return super().write(PageBatch(batch.keys[:1], tuple(slots[:1] for slots in batch.slots)))


def test_a_store_that_breaks_its_port_fails_pages_and_nothing_else(host: BytesHostMemory) -> None:
    batch = batch_of(chain("a", 3))
    with StoreClient(_Liar(memory_backend(8)), host) as client:
        read, written = client.read(batch), client.write(batch)
        assert (letters(read.pages), letters(written.pages)) == ("fff", "fff")
        assert "a bug" in (read.error or "")
        assert "1 of 3 pages" in (written.error or "")
        assert client.describe()["store_faults"] == 1


def test_a_store_that_cannot_store_is_refused_and_closed(host: BytesHostMemory) -> None:
    store = ThreadedStore("no", memory_backend(8), StoreTraits(cannot_store="no room for pages so large"))
    with pytest.raises(StoreError, match="no room for pages so large"):
        StoreClient(store, host).start()


def test_sinks_hear_what_the_store_holds(host: BytesHostMemory) -> None:
    index = InventoryIndex()
    client = StoreClient(ThreadedStore("small", memory_backend(5)), host, sinks=[index]).start()
    for name in "abc":
        batch = batch_of(chain(name, 3))
        fill(host, batch)
        client.write(batch)
    held = client.contents()
    client.close()
    assert index.residents(Tier.STORE) == held
    assert len(held) == 5
    assert index.anomalies == 0


def test_a_clear_forgets_every_page(host: BytesHostMemory, make_store: Callable[[int], Store]) -> None:
    index = InventoryIndex()
    batch = batch_of(chain("a", 5))
    fill(host, batch)
    with StoreClient(make_store(8), host, sinks=[index]) as client:
        client.write(batch)
        assert client.clear(timeout_s=WAIT_S) == ClearOutcome(5)
        assert client.lookup(batch.keys, timeout_s=WAIT_S) == (0,) * 5
        assert client.contents() == frozenset()
    assert index.residents(Tier.STORE) == frozenset()


BAD: list[tuple[PageBatch, str]] = [
    (PageBatch(chain("a", 1), ((0,), (0,))), "2 pools; the layout has 3"),
    (PageBatch(chain("a", 2), ((0, 1), (0, 1), (0,))), "pool mamba: 1 slots for 2 keys"),
    (PageBatch(chain("a", 1), ((0,), (256,), (0,))), "pool swa: slots 256 to 256; it has 256"),
    (PageBatch(chain("a", 1), ((-2,), (0,), (0,))), "pool kv: slots -2"),
    (PageBatch(chain("a", 2), ((0, 1),) * 3, (None,)), "1 parents for 2 keys"),
    (PageBatch((b"short",), ((0,),) * 3), "has 5 bytes, not 32"),
]


@pytest.mark.parametrize(("batch", "words"), BAD, ids=[words for _, words in BAD])
def test_a_batch_that_does_not_fit_is_refused_before_anything_moves(
    host: BytesHostMemory, batch: PageBatch, words: str
) -> None:
    backend = HeldBackend()
    with StoreClient(held_store(backend), host) as client:
        for call in (client.read, client.write):
            with pytest.raises(InvalidNodeError, match=words):
                call(batch)
        assert client.read(PageBatch((), ((), (), ()))).pages == ()
    assert backend.sizes == []


def test_options_that_cannot_be_are_refused(host: BytesHostMemory) -> None:
    with pytest.raises(ConfigError, match="bounce_pages: 0"):
        StoreClient(held_store(HeldBackend()), host, bounce_pages=0)
    with pytest.raises(ConfigError, match="drain_budget_s: 0"):
        StoreClient(held_store(HeldBackend()), host, drain_budget_s=0)


def test_before_the_start_and_after_the_close_every_call_is_refused(host: BytesHostMemory) -> None:
    client = StoreClient(held_store(HeldBackend()), host)
    batch = batch_of(chain("a", 1))

    def refused() -> None:
        for call in (
            lambda: client.read(batch),
            lambda: client.write(batch),
            lambda: client.lookup(batch.keys),
            lambda: client.align(batch.keys),
            lambda: client.begin_request("r"),
            client.contents,
        ):
            with pytest.raises(ControllerClosedError, match="the store client is not running"):
                call()
        assert client.describe()["open"] is False

    refused()
    client.start()
    client.align(batch.keys)
    client.close()
    client.close()
    refused()


def test_a_call_under_way_ends_before_the_close(host: BytesHostMemory) -> None:
    backend = HeldBackend()
    client = StoreClient(held_store(backend), host).start()
    backend.may_go.clear()
    batch = batch_of(chain("a", 3))
    with ThreadPoolExecutor(2) as pool:
        writing = pool.submit(client.write, batch)
        assert backend.began.wait(WAIT_S)
        closing = pool.submit(client.close)
        backend.may_go.set()
        assert letters(writing.result(WAIT_S).pages) == "ooo"
        closing.result(WAIT_S)


def test_a_store_that_does_not_end_is_a_deadline_error_and_its_memory_stays(host: BytesHostMemory) -> None:
    backend = HeldBackend()
    client = StoreClient(held_store(backend), host, drain_budget_s=0.1).start()
    batch = batch_of(chain("a", 3))
    client.write(batch)
    backend.may_go.clear()
    client.read(batch, timeout_s=LATE_S)
    owners = snapshot(host)
    with pytest.raises(DeadlineError):
        client.close()
    backend.may_go.set()
    assert snapshot(host) == owners


def test_a_forked_child_is_told_to_make_its_own(host: BytesHostMemory) -> None:
    batch = batch_of(chain("a", 1))
    with StoreClient(held_store(HeldBackend()), host) as client:
        child = os.fork()
        if child == 0:
            refusals = 0
            for call in (lambda: client.read(batch), lambda: client.lookup(batch.keys), client.contents, client.close):
                try:
                    call()
                except RuntimeError as error:
                    refusals += "after a fork" in str(error)
            os._exit(refusals)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 4
        assert letters(client.read(batch).pages) == "m"
