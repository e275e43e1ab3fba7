"""A read that its request has left: who shares its pages, what hangs from them, and what is quarantined."""

from __future__ import annotations

import anyio
import pytest

from kvcr_actors.messages import PrefetchCancelled, PrefetchReady
from kvcr_actors.testing.faults import Fault, FaultPlan
from kvcr_actors.types import MissReason, SkipReason
from tests.actors.rig import LAYOUT, TRAITS, Rig, chain, virtual

pytestmark = pytest.mark.anyio

A = chain("a", 4)


@virtual
async def test_a_cancelled_request_does_not_fail_another_that_shares_its_pages() -> None:
    rig = Rig(store_latency_s=0.5)
    async with rig.running():
        await rig.stored(A)
        rig.give_prefetch("gone", A)
        rig.give_prefetch("stays", A)
        await anyio.sleep(0.1)
        rig.give_cancel("gone")
        assert isinstance(await rig.reply("gone"), PrefetchCancelled)
        rig.give_prefetch("comes later", A)
        for request_id in ("stays", "comes later"):
            answer = await rig.reply(request_id)
            assert isinstance(answer, PrefetchReady)
            assert (answer.pages, answer.account) == (4, None)
            rig.give_cancel(request_id)
        await rig.quiet()
        assert rig.store is not None
        assert rig.store.faults.seen["read"] == 2  # each page once: the cancelled read came in for the others
    rig.check()


@virtual
async def test_a_cancelled_read_that_stalls_holds_others_up_no_longer_than_its_own_time() -> None:
    rig = Rig(store_faults=FaultPlan({("read", 0): Fault.STALL}))
    async with rig.running():
        await rig.stored(A)
        rig.give_prefetch("gone", A)
        rig.give_prefetch("stays", A)
        await anyio.sleep(0.1)
        rig.give_cancel("gone")
        before = anyio.current_time()
        answer = await rig.reply("stays")
        assert isinstance(answer, PrefetchReady)
        assert answer.account is not None
        assert answer.account.reasons == {MissReason.READ_FAILED: 4}
        assert anyio.current_time() - before <= TRAITS.read_budget_s + 0.1
        assert rig.store is not None
        rig.store.release()
        await rig.ports_quiet()
    rig.check()


@virtual
async def test_a_node_that_hangs_from_a_page_under_a_stuck_read_fails_alone_and_at_once() -> None:
    rig = Rig(store_faults=FaultPlan({("read", 0): Fault.STALL}), copy_deadline_s=50.0)
    async with rig.running():
        await rig.stored(A[:2])
        answer = await rig.prefetched("r", A[:2])
        assert answer.account is not None
        before = anyio.current_time()
        below, other = rig.node(A[2:3], A[1]), rig.node(chain("other", 1))
        ack = await rig.back_up(below, other)
        assert ack is not None
        assert ack.node_ids == (other.node_id,)
        assert ack.failed == ((below.node_id, SkipReason.PARENT_ABSENT),)
        assert anyio.current_time() - before < 1
        assert rig.store is not None
        rig.store.release()
        await rig.ports_quiet()
    rig.check()


@virtual
async def test_what_a_stalled_read_quarantines_is_its_batch() -> None:
    rig = Rig(store_faults=FaultPlan({("read", 1): Fault.STALL}))
    async with rig.running():
        await rig.stored(A)
        assert (await rig.prefetched("r", A)).pages == 2
        assert rig.assembly.ledger.quarantined_bytes == TRAITS.batch_pages * LAYOUT.page_bytes
        rig.give_cancel("r")
        assert rig.store is not None
        rig.store.release()
        await rig.ports_quiet()
    rig.check()


@virtual
async def test_what_a_stalled_write_quarantines_includes_the_missing_parents_written_with_it() -> None:
    plan = FaultPlan({("write", 0): Fault.FAIL, ("write", 1): Fault.STALL})
    rig = Rig(store_faults=plan, deposit_retries=0)
    async with rig.running():
        await rig.back_up(rig.node(A[:1]))
        await rig.quiet()
        await rig.back_up(rig.node(A[1:2], A[0]))
        await rig.quiet()
        assert rig.assembly.ledger.quarantined_bytes == 2 * LAYOUT.page_bytes
        assert rig.store is not None
        rig.store.release()
        await rig.ports_quiet()
    rig.check()


async def test_a_prefix_for_which_there_is_less_room_is_cut_to_it_and_says_why() -> None:
    rig = Rig(host_slots=8, host_reserve_fraction=0.5)
    keys = chain("long", 6)
    async with rig.running():
        await rig.stored(keys)
        finished = await rig.restored("r", keys)
        assert finished is not None
        assert finished.pages == 4
        assert finished.account.reasons == {MissReason.NO_HOST_MEMORY: 2}
    rig.check()


async def test_prefixes_that_stand_ready_count_against_the_share_that_is_left_to_backups() -> None:
    rig = Rig(host_slots=8, host_reserve_fraction=0.5)
    async with rig.running():
        for name in "abc":
            await rig.stored(chain(name, 2))
        pages = [(await rig.prefetched(name, chain(name, 2))).pages for name in "abc"]
        assert pages == [2, 2, 0]
        ack = await rig.back_up(rig.node(chain("d", 4)))
        assert ack is not None
        assert not ack.failed
        for name in "ab":
            rig.give_cancel(name)
        await rig.quiet()
        assert (await rig.prefetched("again", chain("c", 2))).pages == 2
        rig.give_cancel("again")
        await rig.quiet()
    rig.check()
