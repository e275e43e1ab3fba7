"""A burst of prefetches: answered from the first on, carried on in one task, and no request of it lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from kvcr_actors.actors import prefetch
from kvcr_actors.messages import Completion, PrefetchCancelled, PrefetchReady
from kvcr_actors.ports import BatchOutcome, PageBatch
from kvcr_actors.runtime.outbox import Outbox
from kvcr_actors.testing.invariants import check_claims, check_host
from kvcr_actors.testing.virtual_time import VIRTUAL, BackendName, run_virtual
from kvcr_actors.transfers import Operation
from kvcr_actors.types import MissReason, PageKey, PrefetchRequest, RequestId
from tests.actors.rig import TRAITS, PlantedError, Rig, chain, virtual
from tests.actors.test_interrupted import Way, fail, give_up, kill, stop

pytestmark = pytest.mark.anyio

Requests = Sequence[tuple[RequestId, Sequence[PageKey]]]

BURST = 24
PREFIXES = [(number, chain(f"stored {number}", 1)) for number in range(BURST)]


def give_burst(rig: Rig, requests: Requests) -> None:
    """Hand requests over in one step."""
    for request_id, keys in requests:
        request = PrefetchRequest(request_id, tuple(keys))
        rig.orders.prefetch(request)
        rig.desk.prefetch(request)
    rig.desk.flush_pending_backups()


async def store(rig: Rig, requests: Requests) -> None:
    """Bring what is asked for to the store, and out of the host."""
    await rig.back_up(*(rig.node(keys) for _, keys in requests))
    await rig.quiet()
    rig.forget_host()


async def cancel_all(rig: Rig, requests: Requests) -> None:
    for request_id, _ in requests:
        rig.give_cancel(request_id)
    await rig.quiet()


async def lookups_at_the_first_answer(monkeypatch: pytest.MonkeyPatch) -> int:
    """How many requests of a burst the actor has taken in when it delivers the first that was read."""
    rig = Rig(host_slots=2 * BURST)
    taken_in: list[int] = []
    deliver = Outbox[Completion].deliver

    def noting(outbox: Outbox[Completion], answers: Sequence[Completion]) -> None:
        if rig.store is not None and any(isinstance(one, PrefetchReady) for one in answers):
            taken_in.append(rig.store.faults.seen["lookup"])
        deliver(outbox, answers)

    monkeypatch.setattr(Outbox, "deliver", noting)
    async with rig.running():
        await store(rig, PREFIXES)
        give_burst(rig, PREFIXES)
        for request_id, keys in PREFIXES:
            assert await rig.reply(request_id) == PrefetchReady(request_id, len(keys))
        await cancel_all(rig, PREFIXES)
    rig.check()
    return taken_in[0]


async def test_the_first_answers_of_a_burst_do_not_wait_until_its_last_request_is_taken_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert await lookups_at_the_first_answer(monkeypatch) < BURST
    monkeypatch.setattr(prefetch, "_REQUESTS_A_TURN", 2 * BURST)
    assert await lookups_at_the_first_answer(monkeypatch) == BURST


async def test_a_burst_of_reads_is_carried_on_by_one_task_and_a_burst_of_misses_by_none() -> None:
    rig = Rig(host_slots=2 * BURST)
    started: list[object] = []
    async with rig.running():
        await store(rig, PREFIXES)
        actor: Any = rig.supervisor("prefetch")._actor
        start_soon = actor._tasks.start_soon

        def noting(task: Any, *arguments: Any, name: object = None) -> None:
            started.append(name)
            start_soon(task, *arguments, name=name)

        actor._tasks.start_soon = noting
        misses = [(f"miss {number}", chain(f"absent {number}", 2)) for number in range(BURST)]
        give_burst(rig, misses)
        await rig.quiet()
        assert started == []
        give_burst(rig, PREFIXES)
        await rig.quiet()
        assert started == ["prefetch reads", "prefetch expiry"]
        await cancel_all(rig, PREFIXES)
    rig.check()


def at_turn(k: int, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have the intake act before the k-th turn of the loop that it waits for; the list has an item a turn."""
    checkpoint, turns = anyio.lowlevel.checkpoint, list[int]()

    async def acting() -> None:
        turns.append(k)
        if len(turns) == k:
            act()
        await checkpoint()

    monkeypatch.setattr(prefetch, "checkpoint", acting)
    return turns


def break_off() -> None:
    raise PlantedError("planted")


async def interrupted_burst(k: int, way: Way, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the intake of a burst came as far as its k-th turn, at which it was interrupted."""
    rig = Rig(store_latency_s=0.01, host_slots=32)
    held, absent = chain("held", 2), chain("absent", 2)
    requests = [*PREFIXES[:5], ("held", held), ("absent", absent), *PREFIXES[5:9]]
    async with rig.running():
        await store(rig, PREFIXES)
        await rig.back_up(rig.node(held))
        living: Any = rig.supervisor("prefetch")._actor
        turns = at_turn(k, lambda: way(rig, "prefetch", living._tasks), monkeypatch)
        give_burst(rig, requests)
        for request_id, _ in requests:
            await rig.reply(request_id)
    rig.check(quiet=way is not kill)
    return len(turns) >= k


@pytest.mark.parametrize("backend", VIRTUAL)
@pytest.mark.parametrize("way", [fail, stop, give_up, kill], ids=lambda way: way.__name__)
def test_an_interruption_at_any_turn_of_the_intake_leaves_no_request_unanswered(
    way: Way, backend: BackendName, monkeypatch: pytest.MonkeyPatch
) -> None:
    k = 1
    while run_virtual(partial(interrupted_burst, k, way, monkeypatch), backend=backend):
        k += 1
    assert k > 3


@pytest.mark.parametrize("backend", VIRTUAL)
def test_an_intake_that_raises_at_any_turn_leaves_no_request_unanswered(
    backend: BackendName, monkeypatch: pytest.MonkeyPatch
) -> None:
    k = 1
    while run_virtual(partial(interrupted_burst, k, lambda *_: break_off(), monkeypatch), backend=backend):
        k += 1
    assert k > 3


async def test_an_abandoned_request_whose_id_belongs_to_a_ready_prefix_is_answered_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(store_pages=None, restart_backoff_s=0.001)
    keys = chain("a", 2)
    async with rig.running():
        await rig.back_up(rig.node(keys))
        at_turn(2, break_off, monkeypatch)
        give_burst(rig, [("r", keys), *((number, keys) for number in range(4)), ("r", keys)])
        assert await rig.reply("r") == PrefetchReady("r", 2)
        assert isinstance(await rig.reply("r"), PrefetchCancelled)
        for request_id in ("r", *range(4)):
            rig.give_cancel(request_id)
            while not isinstance(await rig.reply(request_id), PrefetchCancelled):
                pass
        await rig.quiet()
    check_claims(rig.assembly)
    check_host(rig.assembly)


def answer_lookups_after(rig: Rig, latency_s: Callable[[int], float]) -> None:
    """Have lookups take a time that depends on the pages asked for."""
    assert rig.store is not None
    rig.store._latency = lambda kind, pages: latency_s(pages) if kind == "lookup" else 0.0


@virtual
async def test_requests_that_wait_for_the_store_together_end_each_at_its_own_time() -> None:
    ends_s = {1: 0.25, 2: 0.5, 3: 1.5, 4: TRAITS.read_budget_s + 4 * TRAITS.read_budget_page_s}
    rig = Rig(host_slots=32)
    requests = [(pages, chain(f"{pages} pages", pages)) for pages in ends_s]
    async with rig.running():
        await store(rig, requests)
        answer_lookups_after(rig, lambda pages: ends_s[pages] if pages < 4 else 50.0)
        began = anyio.current_time()
        for request_id, keys in reversed(requests):
            rig.give_prefetch(request_id, keys)
        for pages, end_s in ends_s.items():
            answer = await rig.reply(pages)
            assert isinstance(answer, PrefetchReady)
            assert anyio.current_time() - began == pytest.approx(end_s, abs=0.02)
            assert answer.account is None or answer.account.reasons == {MissReason.DEADLINE: 4}
            assert answer.pages == pages % 4
        await cancel_all(rig, requests)
        await rig.ports_quiet()
    rig.check()


@virtual
async def test_a_request_whose_pages_another_reads_by_the_time_of_its_answer_waits_for_them() -> None:
    rig = Rig(host_slots=32)
    keys, longer = chain("a", 3), (*chain("a", 3), *chain("b", 1))
    async with rig.running():
        await store(rig, [("longer", longer)])
        assert rig.store is not None
        rig.store._latency = lambda kind, pages: 0.1 if kind == "read" or pages == 3 else 0.2
        requests = [("first", keys), ("second", longer)]
        give_burst(rig, requests)
        for request_id, wanted in requests:
            assert await rig.reply(request_id) == PrefetchReady(request_id, len(wanted))
        assert rig.store.faults.seen["read"] == 3  # two batches, and what the second request has beyond the first
        await cancel_all(rig, requests)
    rig.check()


async def test_the_loop_turns_between_the_ends_of_reads_that_land_together() -> None:
    rig = Rig(host_slots=2 * BURST)
    landed: list[Callable[[], None]] = []
    ended_in_turn = [0]

    async def count_turns() -> None:
        while True:
            await anyio.lowlevel.checkpoint()
            ended_in_turn.append(0)

    async with rig.running():
        await store(rig, PREFIXES)
        assert rig.store is not None
        read = rig.store.read
        actor: Any = rig.supervisor("prefetch")._actor
        forget = actor._forget

        def held_back(batch: PageBatch, request_id: RequestId) -> Operation[BatchOutcome]:
            outer: Operation[BatchOutcome] = Operation()
            read(batch, request_id).when_settled(lambda outcome: landed.append(partial(outer.settle, outcome)))
            return outer

        def noting(search: object) -> None:
            ended_in_turn[-1] += 1
            forget(search)

        rig.store.read = held_back  # type: ignore[method-assign]
        actor._forget = noting
        give_burst(rig, PREFIXES)
        while len(landed) < BURST:
            await anyio.lowlevel.checkpoint()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(count_turns)
            for land in landed:
                land()
            for request_id, keys in PREFIXES:
                assert await rig.reply(request_id) == PrefetchReady(request_id, len(keys))
            tasks.cancel_scope.cancel()
        assert sum(ended_in_turn) == BURST
        assert max(ended_in_turn) < BURST
        await cancel_all(rig, PREFIXES)
    rig.check()
