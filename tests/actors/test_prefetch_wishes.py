"""What the engine wants of a prefetch, and its deadline, count wherever it stands: asking, reading or agreeing."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from kvcr_actors.messages import PrefetchCancelled, PrefetchReady
from kvcr_actors.ports import BatchOutcome, PageBatch
from kvcr_actors.transfers import Operation
from kvcr_actors.types import MissReason, PrefetchRequest, RequestId
from tests.actors.cluster import cluster, on_all
from tests.actors.rig import Rig, chain, virtual

pytestmark = pytest.mark.anyio

A = chain("a", 4)


def answer_lookups_late(rig: Rig) -> None:
    """Have lookups take a second."""
    assert rig.store is not None
    rig.store._latency = lambda kind, pages: 1.0 if kind == "lookup" else 0.0


@virtual
async def test_a_deadline_cuts_a_search_short_that_waits_for_the_store() -> None:
    rig = Rig(prefetch_deadline_s=0.5)
    keys = chain("a", 2)
    async with rig.running():
        await rig.stored(keys)
        answer_lookups_late(rig)
        began = anyio.current_time()
        answer = await rig.prefetched("r", keys)
        assert answer.account is not None
        assert answer.account.reasons == {MissReason.DEADLINE: 2}
        assert anyio.current_time() - began == pytest.approx(0.5, abs=0.02)
        await rig.ports_quiet()
    rig.check()


@virtual
async def test_a_search_that_waits_for_the_stores_answer_ends_at_once_where_the_engine_wants_it() -> None:
    rig = Rig(prefetch_stop_policy="best-effort")
    keys = chain("a", 4)
    async with rig.running():
        await rig.stored(keys)
        await rig.back_up(rig.node(keys[:1]))
        answer_lookups_late(rig)
        began = anyio.current_time()
        for request_id in ("cancelled", "stopped"):
            rig.give_prefetch(request_id, keys)
        await anyio.sleep(0.1)
        rig.desk.stop_prefetch("stopped")
        rig.give_cancel("cancelled")
        assert isinstance(await rig.reply("cancelled"), PrefetchCancelled)
        assert await rig.reply("stopped") == PrefetchReady("stopped", 1)
        rig.give_cancel("stopped")
        assert isinstance(await rig.reply("stopped"), PrefetchCancelled)
        assert anyio.current_time() - began < 0.2
        await rig.ports_quiet()
    rig.check()


async def test_a_read_that_has_landed_when_the_search_is_to_stop_is_used() -> None:
    rig = Rig(store_latency_s=0.01, prefetch_stop_policy="best-effort")
    async with rig.running():
        await rig.stored(A)
        assert rig.store is not None
        actor: Any = rig.supervisor("prefetch")._actor
        real = rig.store.read

        def landing(batch: PageBatch, request_id: RequestId) -> Operation[BatchOutcome]:
            operation = real(batch, request_id)
            # In one turn of the loop: the bytes are there, and the engine's order to stop.
            operation.when_quiet(lambda: actor._stop("r"))
            return operation

        rig.store.read = landing  # type: ignore[method-assign]
        answer = await rig.prefetched("r", A)
        assert (answer.pages, answer.account) == (2, None)
        rig.give_cancel("r")
        await rig.quiet()
    rig.check()


@virtual
async def test_a_prefix_that_was_read_in_batches_leaves_the_store_from_its_tail() -> None:
    rig = Rig(store_pages=len(A))
    async with rig.running():
        await rig.stored(A)
        await rig.prefetched("r", A)
        rig.give_cancel("r")
        other = chain("other", 1)
        await rig.back_up(rig.node(other))
        await rig.quiet()
        assert rig.store is not None
        assert rig.store.contents() == {*A[:-1], *other}
    rig.check()


@virtual
async def test_a_wish_to_stop_comes_too_late_where_the_ranks_agree_on_what_was_read() -> None:
    async with cluster(by_rank={1: {"read_s": 1.0}}, prefetch_stop_policy="best-effort") as members:
        await on_all(*(one.store_away(1, A) for one in members))

        async def stop() -> None:
            await anyio.sleep(0.5)
            members[0].controller.stop_prefetch("r")

        answers = await on_all(*(one.prefetch("r", A) for one in members), stop())
        assert [answer.pages for answer in answers[:2]] == [4, 4]
        await on_all(*(one.restore("r", A) for one in members))


@virtual
async def test_a_cancel_ends_a_search_at_once_where_the_ranks_agree_on_what_was_read() -> None:
    async with cluster(by_rank={1: {"read_s": 1.0}}) as members:
        await on_all(*(one.store_away(1, A) for one in members))
        desk = members[0].controller._desk
        began = anyio.current_time()

        async def cancelled() -> None:
            desk.prefetch(PrefetchRequest("r", A))
            desk.flush_pending_backups()
            await anyio.sleep(0.5)
            members[0].controller.cancel("r")
            with anyio.fail_after(0.1):
                await members[0].controller.wait_quiet(5)

        _, answer = await on_all(cancelled(), members[1].prefetch("r", A))
        assert answer.pages == 0
        assert anyio.current_time() - began < 2
