"""A router's hints reach the store for as long as it serves their request, and no longer."""

from __future__ import annotations

import anyio
import pytest

from kvcr_actors.messages import PrefetchReady
from kvcr_actors.testing.faults import Fault, FaultPlan
from kvcr_actors.types import MissReason, PrefetchRequest
from tests.actors.rig import Rig, chain

pytestmark = pytest.mark.anyio


def give_hinted(rig: Rig, request_id: str, keys: tuple[bytes, ...], hints: object) -> None:
    request = PrefetchRequest(request_id, keys, hints=hints)
    rig.orders.prefetch(request)
    rig.desk.prefetch(request)
    rig.desk.flush_pending_backups()


async def test_a_store_has_a_requests_hints_until_its_reads_are_over():
    keys = chain("a", 3)
    async with Rig(store_latency_s=1.0).running() as rig:
        await rig.stored(keys)
        give_hinted(rig, "hinted", keys, {"any": "value"})
        await anyio.sleep(0.5)
        assert rig.store is not None
        assert rig.store.hints == {"hinted": {"any": "value"}}
        await rig.reply("hinted")
        assert rig.store.hints == {}
        give_hinted(rig, "plain", keys, None)
        await rig.reply("plain")
        assert rig.store.hints == {}


async def test_a_cancelled_request_takes_its_hints_with_it():
    keys = chain("a", 3)
    async with Rig(store_latency_s=1.0).running() as rig:
        await rig.stored(keys)
        give_hinted(rig, "hinted", keys, object())
        await anyio.sleep(0.5)
        rig.give_cancel("hinted")
        await rig.reply("hinted")
        assert rig.store is not None
        assert rig.store.hints == {}


async def test_a_store_that_does_not_take_hints_costs_the_request_nothing_else(monkeypatch: pytest.MonkeyPatch):
    keys = chain("a", 3)
    async with Rig().running() as rig:
        await rig.stored(keys)

        def refuse(*_: object) -> None:
            raise RuntimeError("no hints here")

        assert rig.store is not None
        monkeypatch.setattr(rig.store, "begin_request", refuse)
        give_hinted(rig, "hinted", keys, object())
        answer = await rig.reply("hinted")
        assert isinstance(answer, PrefetchReady)
        assert answer.pages == 3
        assert rig.stats.store_faults == 1


async def test_nobody_waits_for_pages_whose_read_is_over_but_whose_memory_is_not_quiet():
    keys = chain("a", 2)
    plan = FaultPlan(schedule={("read", 0): Fault.LATE})
    async with Rig(store_faults=plan, store_latency_s=0.1, late_s=10.0).running() as rig:
        await rig.stored(keys)
        started = anyio.current_time()
        for request in ("first", "second"):
            rig.give_prefetch(request, keys)
        answers = [await rig.reply(request) for request in ("first", "second")]
        assert anyio.current_time() - started < 5.0, "the memory is quiet after 10 s"
        for answer in answers:
            assert isinstance(answer, PrefetchReady)
            assert answer.account is not None
            assert answer.account.reasons == {MissReason.READ_FAILED: 2}
        await rig.ports_quiet()
        assert (await rig.prefetched("third", keys)).pages == 2
        rig.give_cancel("third")
        await rig.quiet()
        rig.check()
