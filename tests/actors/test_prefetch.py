"""Prefetch: found, read once and at most once more, held, and given back on every way out."""

from __future__ import annotations

import anyio
import pytest

from kvcr_actors.messages import PrefetchCancelled, PrefetchReady
from kvcr_actors.ports import BatchOutcome, PageBatch
from kvcr_actors.testing.faults import Fault, FaultPlan
from kvcr_actors.testing.invariants import check_accounts, check_claims, check_host
from kvcr_actors.transfers import Operation
from kvcr_actors.types import MissReason, PrefetchRequest, RequestId
from tests.actors.rig import Rig, chain, virtual

pytestmark = pytest.mark.anyio


@virtual
async def test_scenario_27_a_read_that_fails_is_tried_once_more_then_missed_and_not_read_again_for_a_while() -> None:
    rig = Rig(failed_read_pause_s=10.0)
    keys = chain("a", 2)
    async with rig.running():
        await rig.stored(keys)
        assert rig.store is not None
        plan = rig.store.faults = FaultPlan.always(Fault.FAIL, "read")
        for number in range(4):
            answer = await rig.prefetched(number, keys)
            assert answer.account is not None
            assert answer.account.reasons == {MissReason.READ_FAILED: 2}
            assert plan.seen["read"] == 2
        await anyio.sleep(11)
        rig.store.faults = FaultPlan()
        assert await rig.restored("later", keys) is not None
    rig.check()


@virtual
async def test_one_failed_read_is_made_good_by_its_second_try() -> None:
    rig = Rig()
    keys = chain("a", 2)
    async with rig.running():
        await rig.stored(keys)
        assert rig.store is not None
        rig.store.faults = FaultPlan({("read", 0): Fault.FAIL})
        finished = await rig.restored("r", keys)
        assert finished is not None
        assert finished.pages == 2
        assert rig.store.faults.seen["read"] == 2
    rig.check()


async def test_scenario_31_damage_that_the_store_finds_is_a_miss_and_the_belief_is_dropped() -> None:
    rig = Rig()
    keys = chain("a", 4)
    async with rig.running():
        await rig.stored(keys)
        assert rig.store is not None
        rig.store.faults = FaultPlan({("read", 1): Fault.CORRUPT})
        finished = await rig.restored("r", keys)  # compares the bytes
        assert finished is not None
        assert finished.pages == 2
        assert rig.store.faults.seen["read"] == 2  # a miss is not tried again
        assert keys[2] not in rig.store.contents()
        await rig.back_up(rig.node(keys))
        await rig.quiet()
        assert rig.store.contents() == set(keys)
    rig.check()


@virtual
async def test_scenario_02_late_reads_keep_their_slots_from_reuse_until_they_are_quiet() -> None:
    rig = Rig(host_slots=4, late_s=30.0)
    keys = chain("a", 2)
    async with rig.running():
        await rig.stored(keys)
        assert rig.store is not None
        rig.store.faults = FaultPlan({("read", 0): Fault.LATE})
        answer = await rig.prefetched("r", keys)
        assert answer.account is not None
        assert answer.account.reasons == {MissReason.READ_FAILED: 2}
        assert rig.assembly.ledger.quarantined_bytes == 2 * 29
        rig.check(quiet=False)
        others = chain("b", 2)
        await rig.back_up(rig.node(others))  # all other slots
        ack = await rig.back_up(rig.node(chain("c", 3)))
        assert ack is not None
        assert ack.failed  # rather than the slots that the read still scribbles over
        await anyio.sleep(20)  # it scribbles half way
        finished = await rig.restored("mine", others)
        assert finished is not None
        assert finished.pages == 2
        await rig.ports_quiet()
        rig.check()
    rig.check()


@virtual
async def test_memory_under_reads_that_are_not_quiet_counts_against_the_prefetches_share() -> None:
    rig = Rig(host_slots=8, host_reserve_fraction=0.5, late_s=100.0)
    async with rig.running():
        for name in "abc":
            await rig.stored(chain(name, 2))
        assert rig.store is not None
        rig.store.faults = FaultPlan.always(Fault.LATE, "read")
        reasons = []
        for name in "abc":
            answer = await rig.prefetched(name, chain(name, 2))
            assert answer.account is not None
            reasons += answer.account.reasons
        assert reasons == [MissReason.READ_FAILED, MissReason.READ_FAILED, MissReason.NO_HOST_MEMORY]
        assert rig.assembly.host.filling_pages == 4  # the other half is the backups'
        ack = await rig.back_up(rig.node(chain("d", 4)))
        assert ack is not None
        assert not ack.failed
        await rig.ports_quiet()
        rig.check()
        rig.store.faults = FaultPlan()
        await anyio.sleep(5)
        assert await rig.restored("again", chain("a", 2)) is not None
    rig.check()


@virtual
async def test_a_lookup_or_read_that_stalls_ends_at_its_deadline_and_the_request_recomputes() -> None:
    for kind in ("lookup", "read"):
        rig = Rig()
        keys = chain("a", 2)
        async with rig.running():
            await rig.stored(keys)
            assert rig.store is not None
            rig.store.faults = FaultPlan.always(Fault.STALL, kind)
            before = anyio.current_time()
            answer = await rig.prefetched("r", keys)
            assert answer.account is not None
            assert answer.account.reasons == {MissReason.DEADLINE: 2}
            assert anyio.current_time() - before < 5
            assert rig.stats.prefetch.failed == rig.stats.prefetch.started == 1
            rig.store.release()
            await rig.ports_quiet()
            rig.check()
        rig.check()


async def test_scenario_03_a_cancel_before_during_and_after_the_search_frees_everything_once() -> None:
    rig = Rig(store_latency_s=0.01)
    keys = chain("a", 4)
    async with rig.running():
        await rig.stored(keys)
        for number, wait_s in enumerate((None, 0.0, 0.005, 0.015, 0.5)):
            rig.give_prefetch(number, keys)
            if wait_s is not None:
                await anyio.sleep(wait_s)
            rig.give_cancel(number)
            while not isinstance(answer := await rig.reply(number), PrefetchCancelled):
                pass
            assert answer.account.reasons == {MissReason.CANCELLED: 4}
            await rig.quiet()
            await rig.ports_quiet()
            rig.check()
            rig.forget_host()
    rig.check()
    assert rig.stats.prefetch.cancelled == rig.stats.prefetch.started == 5


async def test_a_cancel_in_the_step_of_its_prefetch_ends_it_there() -> None:
    rig = Rig()
    async with rig.running():
        request = PrefetchRequest("r", chain("a", 2))
        rig.orders.prefetch(request)
        rig.desk.prefetch(request)
        rig.give_cancel("r")
        answer = await rig.reply("r")
        assert isinstance(answer, PrefetchCancelled)
        assert answer.account.reasons == {MissReason.CANCELLED: 2}
        await rig.quiet()
        assert rig.assembly.ledger.taken == 0
    rig.check()


async def test_scenario_20_orders_for_requests_that_are_unknown_or_over_are_ignored() -> None:
    rig = Rig()
    keys = chain("a", 2)
    async with rig.running():
        rig.give_cancel("never seen")
        ids = rig.give_restore("never seen", 1)
        del rig.orders.restores["never seen"]
        await rig.stored(keys)
        assert await rig.restored("r", keys) is not None
        rig.give_cancel("r")
        rig.give_restore("r", 2)
        await rig.quiet()
        assert len(ids) == 1
    rig.check()


async def test_an_order_whose_request_id_is_in_use_ends_at_once_as_cancelled_and_the_first_goes_on() -> None:
    rig = Rig(store_latency_s=0.01)
    keys = chain("a", 2)
    async with rig.running():
        await rig.stored(keys)
        for _ in range(3):
            rig.give_prefetch("r", keys)
        for _ in range(2):
            assert_is_cancelled_duplicate(await rig.reply("r"))
        assert await rig.reply("r") == PrefetchReady("r", 2)
        rig.give_prefetch("r", keys)
        assert_is_cancelled_duplicate(await rig.reply("r"))
        rig.give_cancel("r")
        assert isinstance(await rig.reply("r"), PrefetchCancelled)
        await rig.quiet()
        assert not rig.completions[7:]
    check_claims(rig.assembly)
    check_host(rig.assembly)
    check_accounts(rig.completions, rig.stats)


def assert_is_cancelled_duplicate(answer: object) -> None:
    assert isinstance(answer, PrefetchReady)
    assert answer.account is not None
    assert answer.account.reasons == {MissReason.CANCELLED: 2}


async def test_a_request_id_that_is_used_again_after_its_cancel_is_answered_for_each_order_in_turn() -> None:
    rig = Rig(store_latency_s=0.01)
    keys = chain("a", 2)
    async with rig.running():
        await rig.stored(keys)
        rig.give_prefetch("r", keys)
        await anyio.sleep(0.005)
        rig.give_cancel("r")
        rig.give_prefetch("r", keys)
        rig.give_cancel("r")
        rig.give_prefetch("r", keys)
        for _ in range(2):
            assert isinstance(await rig.reply("r"), PrefetchCancelled)
        assert await rig.reply("r") == PrefetchReady("r", 2)
        rig.give_cancel("r")
        assert isinstance(await rig.reply("r"), PrefetchCancelled)
        await rig.quiet()
        await rig.ports_quiet()
    check_claims(rig.assembly)
    check_host(rig.assembly)
    check_accounts(rig.completions, rig.stats)


@pytest.mark.parametrize("end", ["stop", "crash"])
async def test_a_request_behind_a_stopping_search_is_answered_when_the_actor_ends(end: str) -> None:
    rig = Rig(store_latency_s=0.01)
    keys = chain("a", 2)
    async with rig.running():
        await rig.stored(keys)
        rig.give_prefetch("r", keys)
        await anyio.sleep(0.005)
        rig.give_cancel("r")
        rig.give_prefetch("r", keys)
        if end == "crash":
            await rig.crash("prefetch")
            rig.give_cancel("r")
    endings = [one for one in rig.completions if isinstance(one, PrefetchCancelled)]
    assert len(endings) == 2
    check_claims(rig.assembly)
    check_accounts(rig.completions, rig.stats)


@virtual
async def test_scenario_18_a_prefix_that_nobody_takes_expires() -> None:
    rig = Rig(claim_lifetime_s=30.0)
    keys = chain("a", 2)
    async with rig.running():
        await rig.back_up(rig.node(keys))
        await rig.prefetched("r", keys)
        assert rig.assembly.ledger.open
        answer = await rig.reply("r")
        assert isinstance(answer, PrefetchCancelled)
        assert answer.account.reasons == {MissReason.NOT_RESTORED: 2}
        rig.check()
    rig.check()


@virtual
async def test_scenario_18_a_prefix_expires_also_when_the_actor_was_rebuilt_meanwhile() -> None:
    rig = Rig(claim_lifetime_s=30.0)
    keys = chain("a", 2)
    async with rig.running():
        await rig.back_up(rig.node(keys))
        await rig.prefetched("r", keys)
        await rig.crash("prefetch")
        answer = await rig.reply("r")
        assert isinstance(answer, PrefetchCancelled)
        rig.check()
    rig.check()


async def test_scenario_21_one_requests_end_leaves_the_others_claim_on_the_same_pages() -> None:
    rig = Rig(store_pages=None, host_slots=4)
    keys = chain("a", 3)
    async with rig.running():
        await rig.back_up(rig.node(keys))
        await rig.prefetched("one", keys)
        await rig.prefetched("two", keys)
        for _ in range(2):
            rig.give_cancel("one")
        await rig.quiet()
        rig.forget_host()
        assert rig.assembly.host.contents() == set(keys)
        ids = rig.give_restore("two", 3)
        assert await rig.reply("two") is not None
        rig.assert_bytes(ids, keys)
    rig.check()


async def test_two_requests_for_one_prefix_read_it_once() -> None:
    rig = Rig(store_latency_s=0.01)
    keys = chain("a", 4)
    async with rig.running():
        await rig.stored(keys)
        for request_id in ("one", "two"):
            rig.give_prefetch(request_id, keys)
        for request_id in ("one", "two"):
            answer = await rig.reply(request_id)
            assert isinstance(answer, PrefetchReady)
            assert answer.pages == 4
            rig.give_cancel(request_id)
        await rig.quiet()
        assert rig.store is not None
        assert rig.store.faults.seen["read"] == 2  # two batches
    rig.check()


@virtual
async def test_scenario_51_a_prefix_whose_backup_is_not_over_is_waited_for_a_bounded_time() -> None:
    rig = Rig(copy_latency_s=1.0, store_latency_s=0.01)
    keys = chain("a", 2)
    async with rig.running():
        step = rig.give_step(rig.node(keys))
        answer = await rig.prefetched("r", keys)
        assert answer.account is None
        assert await rig.ack(step) is not None
        rig.give_cancel("r")
        await rig.quiet()
    rig.check()


async def test_scenario_46_a_miss_touches_no_host_slot() -> None:
    rig = Rig()
    async with rig.running():
        for _ in range(3):
            answer = await rig.prefetched("r", chain("a", 5))
            assert answer.account is not None
            assert answer.account.reasons == {MissReason.ABSENT: 5}
        assert rig.assembly.ledger.taken == 0
        assert rig.assembly.host.free_pages == rig.assembly.host.capacity


@virtual
async def test_pages_that_a_read_has_filled_but_not_let_go_of_are_not_handed_on_before_it_is_quiet() -> None:
    rig = Rig()
    keys = chain("a", 4)
    async with rig.running():
        await rig.stored(keys)
        assert rig.store is not None
        real, opened = rig.store.read, list[Operation[BatchOutcome]]()

        def slow_to_let_go(batch: PageBatch, request_id: RequestId) -> Operation[BatchOutcome]:
            inner, outer = real(batch, request_id), Operation[BatchOutcome]()
            opened.append(outer)
            inner.when_quiet(lambda: outer.settle(inner._outcome, quiet=False))  # type: ignore[arg-type]
            return outer

        rig.store.read = slow_to_let_go  # type: ignore[method-assign]
        rig.give_prefetch("r", keys)
        await anyio.sleep(1)
        assert len(opened) == 1
        assert not rig.assembly.host.contents()
        opened[0].become_quiet()
        await anyio.sleep(0.1)
        assert len(opened) == 2
        answer = await rig.reply("r")  # the second batch is never let go of
        assert isinstance(answer, PrefetchReady)
        assert answer.pages == 2
        assert rig.assembly.host.filling_pages == 2
        rig.give_cancel("r")
        assert isinstance(await rig.reply("r"), PrefetchCancelled)
        rig.check(quiet=False)
        opened[1].become_quiet()  # too late for its request, but not for others
        await rig.quiet()
        assert rig.assembly.host.contents() == frozenset(keys)
        rig.check()
    rig.check()
