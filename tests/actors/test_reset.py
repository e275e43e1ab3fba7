"""A reset makes every page unusable at once, wherever it stands, and what is written after it is used."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import attrs
import pytest

from kvcr_actors.core.inventory import InventoryIndex
from kvcr_actors.errors import ConfigError
from kvcr_actors.messages import PrefetchCancelled, PrefetchReady, ResetFinished, RestoreFinished
from kvcr_actors.stores.memory import memory_backend
from kvcr_actors.testing.faults import Fault, FaultPlan
from kvcr_actors.testing.stores import FaultyStore
from kvcr_actors.types import (
    BackupNode,
    MissReason,
    PageKey,
    PrefetchRequest,
    RequestId,
    RestoreOrder,
    SkipReason,
    Tier,
)
from tests.actors.cluster import Member, cluster, on_all, single
from tests.actors.rig import LONG_S, POOLS, TRAITS, Rig, chain, page_bytes, virtual

pytestmark = pytest.mark.anyio

A, B = chain("a", 4), chain("b", 3)


class ResetRig(Rig):
    """A rig whose second generation has other bytes under the same keys."""

    def give_reset(self, label: RequestId = "reset", *, clear: bool = True, store: FaultyStore | None = None) -> None:
        self.orders.resets.append(label)
        self.desk.reset(label, clear=clear, store=store, attached=self.assembly.store)

    async def finished(self, label: RequestId = "reset") -> ResetFinished:
        answer = await self.answer(lambda one: isinstance(one, ResetFinished) and one.label == label)
        assert isinstance(answer, ResetFinished)
        return answer

    def new_node(self, keys: Sequence[PageKey]) -> BackupNode:
        """A node of the same keys, as the new weights compute it."""
        node = self.node(keys)
        for pool in POOLS:
            content = b"".join(_new_bytes(key, pool) for key in keys)
            self.device.load(pool, list(node.pages[pool]), content)
        return node

    async def assert_new(self, request_id: RequestId, keys: Sequence[PageKey]) -> None:
        """The path comes back as the new weights computed it."""
        ready = await self.prefetched(request_id, keys)
        assert (ready.pages, ready.account) == (len(keys), None)
        ids = self.give_restore(request_id, len(keys))
        answer = await self.reply(request_id)
        assert isinstance(answer, RestoreFinished)
        assert answer.pages == len(keys)
        for pool in POOLS:
            assert self.device.gather(pool, list(ids)) == b"".join(_new_bytes(key, pool) for key in keys)

    async def assert_gone(self, request_id: RequestId, keys: Sequence[PageKey]) -> None:
        ready = await self.prefetched(request_id, keys)
        assert ready.account is not None
        assert (ready.pages, ready.account.reasons) == (0, {MissReason.ABSENT: len(keys)})


def _new_bytes(key: PageKey, pool: int) -> bytes:
    return bytes(byte ^ 0xFF for byte in page_bytes(key, pool))


def other_store(name: str = "other", **more: object) -> FaultyStore:
    traits = attrs.evolve(TRAITS, namespace=name.encode())
    return FaultyStore(memory_backend(64), traits=traits, name=name, **more)  # type: ignore[arg-type]


async def test_pages_of_host_and_store_are_gone_and_routers_hear_it() -> None:
    async with ResetRig().running() as rig:
        await rig.stored(A)
        await rig.back_up(rig.node(B))
        await rig.quiet()
        rig.give_reset()
        finished = await rig.finished()
        assert finished == ResetFinished("reset", host_pages=3, store_pages=7)
        await rig.quiet()
        assert (rig.index.keys(Tier.HOST), rig.index.keys(Tier.STORE)) == (frozenset(), frozenset())
        await rig.assert_gone("a", A)
        await rig.assert_gone("b", B)
        ack = await rig.back_up(rig.new_node(A))
        assert ack is not None
        assert not ack.failed
        await rig.quiet()
        rig.forget_host()
        await rig.assert_new("new", A)
        await rig.quiet()
        rig.check()


async def test_a_prefix_that_stands_ready_ends_and_a_late_restore_of_it_is_moot() -> None:
    async with ResetRig().running() as rig:
        await rig.back_up(rig.node(A))
        assert (await rig.prefetched("held", A)).pages == 4
        rig.give_reset()
        ids = rig.give_restore("held", 4)
        answer = await rig.reply("held")
        assert isinstance(answer, PrefetchCancelled)
        assert answer.account.reasons == {MissReason.RESET: 4}
        assert (await rig.finished()).ended == 1
        await rig.quiet()
        assert set(rig.device.gather(0, list(ids))) != set(page_bytes(A[0], 0))
        rig.check()


async def test_a_restore_that_was_queued_before_a_reset_does_not_reach_a_later_request_of_the_same_id() -> None:
    async with ResetRig().running() as rig:
        await rig.back_up(rig.node(A))
        assert (await rig.prefetched("r", A)).pages == 4
        ids = tuple(range(2000, 2004))
        rig.desk.restore(RestoreOrder("r", 0, (ids, ids)))
        rig.give_reset()
        assert isinstance(await rig.reply("r"), PrefetchCancelled)
        rig.orders.requests.clear()
        rig.completions.clear()
        assert rig.assembly.restores.settles(0)
        await rig.back_up(rig.new_node(A))
        await rig.assert_new("r", A)


@virtual
async def test_a_restore_in_flight_is_answered_with_no_page_once_its_copy_is_quiet() -> None:
    async with ResetRig(copy_latency_s=0.5).running() as rig:
        await rig.back_up(rig.node(A))
        await rig.prefetched("r", A)
        rig.give_restore("r", 4)
        await anyio.sleep(0.1)
        rig.give_reset()
        await anyio.sleep(0.1)
        assert rig.assembly.host.forgotten_pages == 4, "the copy still reads their slots"
        assert not [one for one in rig.take() if isinstance(one, RestoreFinished | ResetFinished)]
        answer = await rig.reply("r")
        assert isinstance(answer, RestoreFinished)
        assert (answer.pages, answer.account.reasons) == (0, {MissReason.RESET: 4})
        assert await rig.finished() == ResetFinished("reset", 4, 4, ended=1)
        await rig.quiet()
        rig.check()


@virtual
async def test_a_backup_in_flight_fails_once_quiet_and_its_keys_can_be_written_meanwhile() -> None:
    async with ResetRig(copy_latency_s=0.0, store_pages=None).running() as rig:
        fence = anyio.Event()
        old = rig.give_step(rig.node(A), fence=fence)
        await anyio.sleep(0.1)
        rig.give_reset()
        new = rig.give_step(rig.new_node(A))
        await anyio.sleep(0.1)
        assert not rig.take()
        fence.set()
        ack, later = await rig.ack(old), await rig.ack(new)
        assert ack is not None
        assert later is not None
        assert ack.failed == ((1, SkipReason.RESET),)
        assert later.node_ids == (2,)
        assert (await rig.finished()).ended == 1
        await rig.assert_new("r", A)
        await rig.quiet()
        rig.check()


async def test_what_is_queued_in_the_step_of_a_reset_is_parted_by_it() -> None:
    async with ResetRig(store_pages=None).running() as rig:
        before, after = rig.node(A), rig.new_node(A)
        rig.desk.write(before, flush=False)
        rig.give_reset(clear=False)
        rig.desk.write(after, flush=False)
        step = rig.desk.flush_pending_backups()
        assert step is not None
        rig.orders.step(step, (before, after))
        ack = await rig.ack(step)
        assert ack is not None
        assert (ack.node_ids, ack.failed) == ((2,), ((1, SkipReason.RESET),))
        await rig.finished()
        await rig.assert_new("r", A)
        await rig.quiet()
        rig.check()


async def test_a_prefetch_queued_in_the_step_of_a_reset_ends_with_it() -> None:
    async with ResetRig(store_pages=None).running() as rig:
        await rig.back_up(rig.node(A))
        request = PrefetchRequest("r", A)
        rig.orders.prefetch(request)
        rig.desk.prefetch(request)
        rig.give_reset(clear=False)
        rig.desk.flush_pending_backups()
        answer = await rig.reply("r")
        assert isinstance(answer, PrefetchReady)
        assert answer.account is not None
        assert answer.account.reasons == {MissReason.RESET: 4}
        await rig.finished()
        rig.check()


@virtual
async def test_a_read_in_flight_ends_its_search_and_its_pages_are_nobodys() -> None:
    async with ResetRig(store_latency_s=0.5).running() as rig:
        await rig.stored(A)
        rig.give_prefetch("r", A)
        await anyio.sleep(0.1)
        assert rig.assembly.host.filling_pages == 4
        rig.give_reset()
        answer = await rig.reply("r")
        assert isinstance(answer, PrefetchCancelled)
        assert answer.account.reasons == {MissReason.RESET: 4}
        assert rig.assembly.host.filling_pages == 0
        await rig.finished()
        assert rig.assembly.host.ready_pages == 0
        await rig.assert_gone("again", A)
        await rig.back_up(rig.new_node(A))
        await rig.assert_new("new", A)
        await rig.quiet()
        rig.check()


@virtual
async def test_a_lookup_in_flight_ends_its_search() -> None:
    async with ResetRig(store_faults=FaultPlan({("lookup", 0): Fault.STALL})).running() as rig:
        await rig.stored(A)
        rig.give_prefetch("r", A)
        await anyio.sleep(0.1)
        rig.give_reset()
        answer = await rig.reply("r")
        assert isinstance(answer, PrefetchCancelled)
        assert answer.account.reasons == {MissReason.RESET: 4}
        assert rig.store is not None
        rig.store.release()
        await rig.finished()
        await rig.quiet()
        rig.check()


@virtual
async def test_deposits_that_wait_or_run_never_reach_the_store_that_takes_the_place() -> None:
    other = other_store()
    async with ResetRig(store_latency_s=0.5, deposit_batch_pages=1).running() as rig:
        await rig.back_up(rig.node(A), rig.node(B))
        await anyio.sleep(0.7)
        assert rig.store is not None
        assert 0 < len(rig.store.contents()) < 7
        held = rig.store.contents()
        rig.give_reset(clear=False, store=other)
        finished = await rig.finished()
        assert (finished.host_pages, finished.store_pages, finished.error) == (7, 0, None)
        await rig.quiet()
        assert other.contents() == frozenset()
        assert rig.store.contents() >= held, "the old store keeps what it has under its own namespace"
        assert rig.stats.deposit.skipped[SkipReason.RESET] > 0
        await rig.back_up(rig.new_node(B))
        await rig.quiet()
        assert other.contents() == frozenset(B)
        rig.forget_host()
        await rig.assert_new("new", B)
        await rig.quiet()
        rig.check()


@virtual
async def test_a_deposit_that_runs_brings_nothing_back_to_a_cleared_store() -> None:
    async with ResetRig(store_latency_s=0.5).running() as rig:
        await rig.back_up(rig.node(A))
        await anyio.sleep(0.2)
        rig.give_reset()
        await rig.finished()
        await rig.quiet()
        await rig.ports_quiet()
        assert rig.store is not None
        assert rig.store.contents() == frozenset()
        await rig.assert_gone("r", A)
        rig.check()


async def test_pages_backed_up_while_a_store_is_exchanged_come_to_the_new_one() -> None:
    other = other_store()
    async with ResetRig().running() as rig:
        rig.give_reset(clear=False, store=other)
        await rig.back_up(rig.new_node(A))
        await rig.finished()
        with anyio.fail_after(LONG_S):
            while other.contents() != frozenset(A):  # noqa: ASYNC110
                await anyio.sleep(0.001)
        await rig.quiet()
        rig.check()


@virtual
async def test_a_store_that_fails_to_clear_is_detached_and_said_to_be() -> None:
    async with ResetRig(store_faults=FaultPlan.always(Fault.FAIL, "clear")).running() as rig:
        await rig.stored(A)
        rig.give_reset()
        finished = await rig.finished()
        assert finished.error == "the store was not cleared, and is detached: injected: the clear failed"
        assert rig.assembly.store is None
        assert rig.index.keys(Tier.STORE) == frozenset()
        ready = await rig.prefetched("r", A)
        assert ready.pages == 0
        await rig.quiet()
        rig.check()


@virtual
async def test_a_store_that_cannot_open_leaves_none_and_is_named() -> None:
    other = other_store("wrong")

    async def refuse(services: object, host: object) -> None:
        raise ConfigError("injected: it cannot open")

    other.open = refuse  # type: ignore[method-assign]
    async with ResetRig().running() as rig:
        rig.give_reset(clear=True, store=other)
        assert (await rig.finished()).error == "store wrong was not attached: injected: it cannot open"
        assert rig.assembly.store is None


@virtual
async def test_a_copy_that_never_ends_is_told_of_and_its_slots_stay_out_of_use() -> None:
    faults = FaultPlan({("to_host", 0): Fault.DROP})
    async with ResetRig(device_faults=faults, store_pages=None).running() as rig:
        old = rig.give_step(rig.node(A))
        await anyio.sleep(0.1)
        rig.give_reset()
        finished = await rig.finished()
        assert (finished.kept, finished.host_pages) == (4, 0)
        await rig.back_up(rig.new_node(A))
        await rig.assert_new("r", A)
        ack = await rig.ack(old)
        assert ack is not None
        assert ack.failed == ((1, SkipReason.RESET),)
        await rig.quiet()
        assert rig.assembly.host.forgotten_pages == 4
        rig.check(quiet=False)


async def test_resets_that_follow_each_other_are_all_answered_and_so_is_one_after_the_end() -> None:
    rig = ResetRig()
    async with rig.running():
        for number in range(5):
            rig.give_reset(number)
        for number in range(5):
            assert (await rig.finished(number)).error is None
    rig.give_reset("late")
    assert (await rig.finished("late")).error == "the controller stopped before the reset was over"
    rig.check()


async def test_a_store_of_another_namespace_never_gets_pages_of_the_one_before() -> None:
    first, second, third = other_store("1"), other_store("2"), other_store("2")
    async with single(store=first) as member:
        await member.back_up(member.node(1, A))
        await member.controller.wait_quiet(60)
        await member.prefetch("held", A)
        await member.controller.detach_store()
        cleared = member.controller.clear_host()
        assert (cleared.cleared, cleared.claimed) == (0, 4)
        await member.controller.attach_store(second)
        assert second.contents() == frozenset()
        assert member.controller.host_contents() == frozenset()
        await member.back_up(member.node(2, A))
        await member.controller.wait_quiet(60)
        assert second.contents() == frozenset(A)
        await member.controller.detach_store()
        await member.controller.attach_store(third)
        assert third.contents() == frozenset(A), "the same namespace: they are its pages"


async def test_clear_host_says_what_stays_and_why() -> None:
    async with single(copy_s=0.05) as member:
        await member.back_up(member.node(1, A))
        await member.back_up(member.node(2, B))
        await member.controller.wait_quiet(60)
        await member.prefetch("held", A[:2])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(member.back_up, member.node(3, chain("c", 2)))
            await anyio.sleep(0.01)
            cleared = member.controller.clear_host()
        assert (cleared.cleared, cleared.claimed, cleared.filling, cleared.forgotten) == (5, 2, 2, 0)
        member.controller.cancel("held")


async def test_ranks_reset_together_and_a_rank_that_does_not_is_told_of() -> None:
    async with cluster() as members:
        await on_all(*(one.store_away(1, A) for one in members))
        await on_all(*(one.prefetch("held", A) for one in members))
        finished = await on_all(*(one.controller.reset("weights 2", clear=True) for one in members))
        assert [one.error for one in finished] == [None, None]
        answers = await on_all(*(one.prefetch("again", A) for one in members))
        assert [answer.pages for answer in answers] == [0, 0]
        alone = await members[0].controller.reset("alone", clear=True)
        assert alone.error == "another rank did not reset, or did not answer"


async def test_a_prefix_that_straddles_a_reset_is_a_miss_on_every_rank() -> None:
    async with cluster(read_s=0.2) as members:
        await on_all(*(one.store_away(1, A) for one in members))
        answers: list[PrefetchReady] = []

        async def ask(index: int) -> None:
            answers.append(await members[index].prefetch("r", A))

        async with anyio.create_task_group() as tasks:
            for index in range(2):
                tasks.start_soon(ask, index)
            await anyio.sleep(0.05)
            tasks.start_soon(_reset, members[0])
            await anyio.sleep(0.1)
            tasks.start_soon(_reset, members[1])
        assert [answer.pages for answer in answers] == [0, 0]
        assert all(answer.account is not None for answer in answers)


async def _reset(member: Member) -> None:
    await member.controller.reset("2", clear=True)


async def test_a_reset_must_say_what_becomes_of_the_store() -> None:
    async with single(store=other_store("1")) as member:
        with pytest.raises(ConfigError, match="store 1 holds pages of before; say clear=True to empty it, or give"):
            await member.controller.reset("r")
        with pytest.raises(ConfigError, match="has the namespace of the pages to be forgotten; give it a new one"):
            await member.controller.reset("r", store=other_store("1"))
        with pytest.raises(ConfigError, match="give it a label"):
            await member.controller.reset(None, clear=True)
        assert (await member.controller.reset("r", clear=True, store=other_store("1"))).error is None
    async with cluster() as members:
        with pytest.raises(ConfigError, match="ranks can agree on a str, int or bytes only"):
            await members[0].controller.reset(("a", 1), clear=True)


async def test_events_of_a_store_that_was_exchanged_are_heard_no_more() -> None:
    index, old, new = InventoryIndex(), other_store("1"), other_store("2")
    async with single(store=old, sinks=(index,)) as member:
        await member.back_up(member.node(1, A))
        await member.controller.wait_quiet(60)
        assert index.keys(Tier.STORE) == frozenset(A)
        assert (await member.controller.reset("2", store=new)).host_pages == 4
        await member.controller.wait_quiet(60)
        assert (index.keys(Tier.STORE), index.keys(Tier.HOST)) == (frozenset(), frozenset())
        await member.back_up(member.node(2, B))
        await member.controller.wait_quiet(60)
        assert (index.keys(Tier.STORE), index.anomalies) == (frozenset(B), 0)


@virtual
async def test_orders_of_before_that_wait_in_their_inboxes_end_with_a_reset_that_overtakes_them() -> None:
    async with ResetRig(store_pages=None).running() as rig:
        await rig.back_up(rig.node(B))
        await rig.prefetched("ready", B)
        old = rig.give_step(rig.node(A))
        rig.give_prefetch("asked", B)
        ids = rig.give_restore("ready", 3)
        rig.give_reset(clear=False)
        rig.assembly.resets.begin()  # as if the loop took the reset first
        new = rig.give_step(rig.new_node(A))
        first, second = await rig.ack(old), await rig.ack(new)
        assert first is not None
        assert second is not None
        assert first.failed == ((2, SkipReason.RESET),)
        assert second.node_ids == (3,)
        for request_id in ("asked", "ready"):
            answer = await rig.reply(request_id)
            assert isinstance(answer, PrefetchCancelled), request_id
            assert answer.account.reasons == {MissReason.RESET: 3}
        await rig.finished()
        await rig.assert_new("new", A)
        assert rig.device.gather(0, list(ids)) != b"".join(page_bytes(key, 0) for key in B)
        await rig.quiet()
        rig.check()
