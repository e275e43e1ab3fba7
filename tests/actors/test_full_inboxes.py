"""A full inbox sheds with a reason and loses nothing; what must not be shed is bounded in another way."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from kvcr_actors.core.inventory import BlocksStored, Ownership
from kvcr_actors.errors import InboxFullError
from kvcr_actors.messages import BackupAck, PrefetchCancelled, PrefetchReady
from kvcr_actors.runtime.inbox import Inbox
from kvcr_actors.types import MissReason, PrefetchRequest, SkipReason, Tier
from tests.actors.rig import Rig, chain, live

pytestmark = pytest.mark.anyio


async def test_a_life_with_inboxes_of_one_message_loses_no_order_and_no_event() -> None:
    rig = Rig(inbox_limit=1, store_latency_s=0.002)
    async with rig.running():
        await live(rig)
        await rig.quiet()
        await rig.ports_quiet()
        rig.check()
    rig.check()
    assert rig.stats.events_dropped == 0


async def test_steps_beyond_the_inbox_are_acknowledged_at_the_desk() -> None:
    rig = Rig(inbox_limit=2)
    async with rig.running():
        steps = [rig.give_step(rig.node(chain(f"{n}", 1))) for n in range(5)]  # the loop has no turn in between
        acks = [await rig.ack(step) for step in steps]
        assert [isinstance(ack, BackupAck) and [why for _, why in ack.failed] for ack in acks] == [
            [],
            [],
            *[[SkipReason.QUEUE_FULL]] * 3,
        ]
        await rig.quiet()
    rig.check()
    assert rig.stats.backup.skipped == {SkipReason.QUEUE_FULL: 3}


async def test_prefetches_beyond_the_inbox_are_refused_before_any_claim() -> None:
    rig = Rig(inbox_limit=1, store_pages=None)
    keys = chain("a", 2)
    async with rig.running():
        await rig.back_up(rig.node(keys))
        for number in range(3):
            rig.give_prefetch(number, keys)
        for number in (1, 2):
            answer = await rig.reply(number)
            assert isinstance(answer, PrefetchReady)
            assert answer.account is not None
            assert answer.account.reasons == {MissReason.QUEUE_FULL: 2}
        await rig.quiet()
        rig.give_cancel(0)
        while not isinstance(await rig.reply(0), PrefetchCancelled):
            pass
        await rig.quiet()
    rig.check()


async def test_restores_beyond_the_inbox_end_as_cancelled_and_cancels_wait_for_room() -> None:
    rig = Rig(inbox_limit=1, store_pages=None)
    keys = chain("a", 2)
    async with rig.running():
        await rig.back_up(rig.node(keys))
        for number in range(4):
            await rig.prefetched(number, keys)
        for number in range(4):
            rig.give_restore(number, 2)
        rig.desk.flush_pending_backups()
        await anyio.lowlevel.checkpoint()
        with anyio.fail_after(5):
            for number in range(4):
                answer = None
                while answer is None:
                    rig.desk.flush_pending_backups()
                    with anyio.move_on_after(0.05):
                        answer = await rig.reply(number)
        await rig.quiet()
    rig.check()
    assert rig.stats.prefetch.used == 1
    assert rig.stats.prefetch.cancelled == 3


async def test_a_full_deposit_inbox_sheds_counts_and_unpins() -> None:
    rig = Rig(inbox_limit=1, host_slots=64)
    async with rig.running():
        state = rig.assembly._state
        assert state is not None
        for number in range(8):
            rig.assembly.inboxes.backup.limit = 8
            rig.give_step(rig.node(chain(f"{number}", 1)))
        await rig.quiet()
        deposit = rig.stats.deposit
        assert deposit.deposited + deposit.skipped.total() == 8
        assert not state.depositing
    rig.check()


async def test_events_that_find_the_publisher_full_come_all_the_same_and_in_order() -> None:
    rig = Rig(inbox_limit=1)
    async with rig.running():
        rig.assembly.inboxes.backup.limit = 64
        for number in range(6):
            rig.give_step(rig.node(chain(f"{number}", 3)))
        await rig.quiet()
        rig.check()  # with the index that the events alone make
    assert rig.stats.events_dropped == 0


async def test_requests_refused_after_the_stop_are_accounted_for() -> None:
    rig = Rig()
    async with rig.running():
        pass
    request = PrefetchRequest("late", chain("a", 3), 1)
    rig.orders.prefetch(request)
    rig.desk.prefetch(request)
    rig.give_step(rig.node(chain("a", 1)))
    rig.give_restore("never", 1)
    del rig.orders.restores["never"]
    rig.desk.flush_pending_backups()
    rig.check()
    assert rig.stats.reasons == {MissReason.STOPPED: 2}
    assert rig.stats.backup.skipped == {SkipReason.STOPPED: 1}


async def test_a_copy_that_the_confirmation_takes_no_more_is_given_up_and_acknowledged() -> None:
    rig = Rig()
    async with rig.running():
        rig.assembly.inboxes.confirmation.close()
        node = rig.node(chain("a", 2))
        ack = await rig.back_up(node)
        assert ack is not None
        assert ack.failed == ((node.node_id, SkipReason.STOPPED),)
        assert rig.supervisor("backup").describe()["last_error"] is None
        await rig.ports_quiet()
        rig.check()
    rig.check()


async def test_a_request_does_not_overtake_the_cancel_of_an_earlier_one_of_its_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(store_pages=None)
    keys = chain("a", 2)
    async with rig.running():
        await rig.back_up(rig.node(keys))
        await rig.prefetched("r", keys)
        real = Inbox.post

        def full_once(inbox: Inbox[object], message: object) -> None:
            monkeypatch.setattr(Inbox, "post", real)  # the loop makes room between two posts of one hand-over
            raise InboxFullError("full")

        monkeypatch.setattr(Inbox, "post", full_once)
        rig.desk.cancel("r")
        rig.give_prefetch("r", keys)
        refused = await rig.reply("r")
        assert isinstance(refused, PrefetchReady)
        assert refused.account is not None
        assert refused.account.reasons == {MissReason.QUEUE_FULL: 2}
        rig.give_prefetch("r", keys)  # its step takes the cancel along, before it
        assert isinstance(await rig.reply("r"), PrefetchCancelled)
        assert await rig.reply("r") == PrefetchReady("r", 2)
        rig.give_cancel("r")
        await rig.quiet()
    assert rig.assembly.ledger.open == 0


async def test_the_engines_events_that_find_the_publisher_full_come_all_the_same_and_in_order() -> None:
    rig = Rig(inbox_limit=1)
    events = [BlocksStored(Tier.DEVICE, (key,), (None,)) for key in chain("device", 4)]
    async with rig.running():
        for event in events:
            rig.desk.publish([event])
            rig.desk.flush_pending_backups()
        await rig.quiet()
        assert list(rig.index.holding(Tier.DEVICE, Ownership.ENGINE)) == list(chain("device", 4))
    assert rig.stats.events_dropped == 0
