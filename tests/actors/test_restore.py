"""Restore: one submit a step, and claims that last as long as the copy may read."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from kvcr_actors.errors import InvalidNodeError
from kvcr_actors.messages import PrefetchCancelled, RestoreFinished
from kvcr_actors.testing.faults import Fault, FaultPlan
from kvcr_actors.types import MissReason, RestoreOrder
from tests.actors.rig import Rig, chain, virtual

pytestmark = pytest.mark.anyio


async def test_scenario_02_38_host_eviction_cannot_touch_the_source_of_an_open_copy() -> None:
    rig = Rig(host_slots=4, store_pages=None)
    keys = chain("a", 3)
    async with rig.running():
        await rig.back_up(rig.node(keys))
        await rig.prefetched("r", keys)
        fence = anyio.Event()
        ids = rig.give_restore("r", 3, fence=fence)
        await anyio.sleep(0.01)
        rig.forget_host()
        ack = await rig.back_up(rig.node(chain("b", 2)))
        assert ack is not None
        assert ack.failed  # no room rather than the slots of the copy
        fence.set()
        finished = await rig.reply("r")
        assert isinstance(finished, RestoreFinished)
        rig.assert_bytes(ids, keys)
        await rig.quiet()
        rig.check()
        ack = await rig.back_up(rig.node(chain("b", 2)))
        assert ack is not None
        assert not ack.failed
    rig.check()


@virtual
async def test_scenario_03_a_late_copy_keeps_claims_and_answer_until_it_is_quiet() -> None:
    rig = Rig(device_faults=FaultPlan({("to_device", 0): Fault.LATE}), late_s=2.0)
    keys = chain("a", 2)
    async with rig.running():
        await rig.back_up(rig.node(keys))
        await rig.quiet()
        await rig.prefetched("r", keys)
        rig.give_restore("r", 2)
        await anyio.sleep(1)
        rig.take()
        assert not [one for one in rig.completions if isinstance(one, RestoreFinished)]
        finished = await rig.reply("r")
        assert isinstance(finished, RestoreFinished)
        assert finished.pages == 0
        assert finished.account.reasons == {MissReason.RESTORE_FAILED: 2}
        await rig.quiet()
    rig.check()


@virtual
async def test_past_its_deadline_a_copy_is_quarantined_and_answered_when_it_is_quiet() -> None:
    rig = Rig(device_faults=FaultPlan({("to_device", 0): Fault.STALL}))
    keys = chain("a", 2)
    async with rig.running():
        await rig.back_up(rig.node(keys))
        await rig.quiet()
        await rig.prefetched("r", keys)
        rig.give_restore("r", 2)
        await rig.quiet()
        assert anyio.current_time() < 10
        assert rig.assembly.ledger.quarantined_bytes == 2 * 29
        rig.check(quiet=False)
        rig.forget_host()
        assert rig.assembly.host.contents() == set(keys)
        rig.device.release()
        finished = await rig.reply("r")
        assert isinstance(finished, RestoreFinished)
        assert finished.pages == 0
        rig.check()
    rig.check()


@virtual
async def test_a_restore_that_is_given_up_between_outcome_and_quiet_keeps_its_claims() -> None:
    rig = Rig(device_faults=FaultPlan({("to_device", 0): Fault.LATE}), late_s=3.0)
    keys = chain("a", 2)
    async with rig.running():
        await rig.back_up(rig.node(keys))
        await rig.quiet()
        await rig.prefetched("r", keys)
        rig.give_restore("r", 2)
        await anyio.sleep(1)  # settled, not quiet
        await rig.crash("restore")
        assert rig.assembly.ledger.quarantined_bytes == 2 * 29
        rig.forget_host()
        assert rig.assembly.host.contents() == set(keys)
        rig.check(quiet=False)
        assert isinstance(await rig.reply("r"), RestoreFinished)
        rig.check()
    rig.check()


async def test_one_pools_failure_fails_every_order_since_each_needs_every_pool() -> None:
    rig = Rig(device_faults=FaultPlan({("to_device.side", 0): Fault.FAIL}), store_pages=None)
    a, b = chain("a", 2), chain("b", 2)
    async with rig.running():
        await rig.back_up(rig.node(a), rig.node(b))
        for request_id, keys in (("a", a), ("b", b)):
            await rig.prefetched(request_id, keys)
        for request_id, free in (("a", (900, 901)), ("b", (902, 903))):
            order = RestoreOrder(request_id, 0, (free, free))
            rig.orders.restore(order)
            rig.desk.restore(order)
        rig.desk.flush_pending_backups()
        for request_id in ("a", "b"):
            finished = await rig.reply(request_id)
            assert isinstance(finished, RestoreFinished)
            assert finished.pages == 0
            assert finished.account.reasons == {MissReason.RESTORE_FAILED: 2}
        await rig.quiet()
        assert rig.stats.restore_submits == 1
    rig.check()


async def test_orders_that_do_not_fit_their_prefix_are_refused_and_their_claims_released() -> None:
    rig = Rig()
    keys = chain("a", 3)
    async with rig.running():
        await rig.back_up(rig.node(keys))
        for number, (first, count, device_pages) in enumerate(((0, 4, None), (3, 1, 3), (1, 3, 2), (1, 1, None))):
            await rig.prefetched(number, keys)
            rig.give_restore(number, count, first, device_pages=device_pages)
            finished = await rig.reply(number)
            assert isinstance(finished, RestoreFinished)
            assert finished.pages == (first if device_pages else 0)
            assert finished.account.reasons == {MissReason.RESTORE_FAILED: 3 - finished.pages} or finished.pages == 3
        await rig.prefetched("empty", keys)
        rig.give_restore("empty", 0)
        assert isinstance(await rig.reply("empty"), RestoreFinished)
        await rig.quiet()
        assert rig.stats.restore_submits == 0
    rig.check()


async def test_an_order_of_nothing_that_begins_beyond_its_prefix_says_what_the_device_really_has() -> None:
    rig = Rig()
    keys = chain("a", 3)
    async with rig.running():
        await rig.back_up(rig.node(keys))
        await rig.prefetched("r", keys)
        rig.give_restore("r", 0, first=9)
        finished = await rig.reply("r")
        assert isinstance(finished, RestoreFinished)
        assert finished.pages == 0
        assert finished.account.reasons == {MissReason.RESTORE_FAILED: 3}
        await rig.quiet()
    rig.check()


async def test_a_second_restore_and_a_cancel_after_it_are_moot() -> None:
    rig = Rig()
    keys = chain("a", 3)
    async with rig.running():
        await rig.back_up(rig.node(keys))
        await rig.prefetched("r", keys)
        for _ in range(2):
            rig.give_restore("r", 3)
        await anyio.lowlevel.checkpoint()
        await rig.quiet()
        rig.give_cancel("r")
        assert isinstance(await rig.reply("r"), RestoreFinished)
        await rig.quiet()
    rig.check()


async def test_a_cancel_and_a_restore_in_one_step_end_the_request_once() -> None:
    rig = Rig()
    keys = chain("a", 3)
    async with rig.running():
        await rig.back_up(rig.node(keys))
        for number in range(10):
            await rig.prefetched(number, keys)
            rig.desk.cancel(number)
            rig.give_restore(number, 3)
            assert isinstance(await rig.reply(number), RestoreFinished | PrefetchCancelled)
        await rig.quiet()
    rig.check()


def test_malformed_restores_are_refused_where_they_are_made() -> None:
    with pytest.raises(InvalidNodeError, match="first -1 is not a whole number"):
        RestoreOrder("r", -1, ((1,), (1,)))
    with pytest.raises(InvalidNodeError, match="lists 1 pages for 2 pages of the first pool"):
        RestoreOrder("r", 0, ((1, 2), (1,)))
    assert RestoreOrder("r", 0, ()).count == 0
