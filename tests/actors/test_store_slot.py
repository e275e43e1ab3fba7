"""Stores that come and go under load, and checkpoints that are whole or fail."""

from __future__ import annotations

import anyio
import attrs
import pytest

from kvcr_actors.core.inventory import InventoryIndex
from kvcr_actors.errors import CheckpointError, ConfigError, StoreError
from kvcr_actors.stores.memory import memory_backend
from kvcr_actors.testing.faults import Fault, FaultPlan
from kvcr_actors.testing.store_driver import chain
from kvcr_actors.testing.stores import FaultyStore
from kvcr_actors.types import MissReason, PrefetchRequest, Tier
from tests.actors.cluster import TRAITS, Member, cluster, on_all, single
from tests.actors.rig import virtual

pytestmark = pytest.mark.anyio

A, B = chain("a", 6), chain("b", 5)


def new_store(pages: int = 64, *, faults: FaultPlan | None = None, latency_s: float = 0.0) -> FaultyStore:
    return FaultyStore(
        memory_backend(pages), faults, latency=lambda kind, _: 0.0 if kind == "lookup" else latency_s, traits=TRAITS
    )


async def traffic(member: Member) -> None:
    await member.back_up(member.node(1, A[:3]), member.node(2, A[3:], A[2]))
    await member.back_up(member.node(3, B))
    await member.controller.wait_quiet(60)


async def test_scenario_52_a_store_attached_after_traffic_has_what_one_attached_at_the_start_has() -> None:
    at_the_start, later = new_store(), new_store()
    async with single(store=at_the_start) as member:
        await traffic(member)
    async with single(store=None) as member:
        await traffic(member)
        await member.controller.attach_store(later)
        assert later.contents() == at_the_start.contents() == frozenset((*A, *B))
        member.forget_host()
        assert (await member.prefetch("r", A)).pages == 6
        await member.restore("r", A)


async def test_scenario_52_pages_that_come_while_the_store_is_filled_are_stored_too() -> None:
    store = new_store(latency_s=0.01)
    async with single(store=None, deposit_batch_pages=1) as member:
        await traffic(member)
        more = chain("more", 4)
        await on_all(member.controller.attach_store(store), member.back_up(member.node(9, more)))
        await member.controller.wait_quiet(60)
        assert store.contents() >= frozenset((*A, *B, *more))


@virtual
async def test_scenario_53_a_store_is_detached_with_a_hundred_operations_in_flight_and_serving_goes_on() -> None:
    store = new_store(4096, latency_s=0.05)
    async with single(store=store, host_slots=2048) as member:
        paths = [chain(f"path {index}", 4) for index in range(100)]
        await member.back_up(*(member.node(index, keys) for index, keys in enumerate(paths)))
        await member.controller.wait_quiet(600)
        member.forget_host()
        answers: list[int] = []

        async def ask(index: int) -> None:
            answer = await member.prefetch(f"r{index}", paths[index])
            answers.append(answer.pages)
            member.controller.cancel(f"r{index}")

        async with anyio.create_task_group() as tasks:
            for index in range(100):
                tasks.start_soon(ask, index)
            await anyio.sleep(0.02)
            assert store.running >= 100
            await member.controller.detach_store()
        assert len(answers) == 100
        assert store.running == 0
        assert member.controller.describe()["store"] is None
        await member.controller.wait_quiet(60)
        ack = await member.back_up(member.node(1000, chain("after", 3)))
        assert not ack.failed
        assert (await member.prefetch("after", chain("after", 3))).pages == 3
        member.controller.cancel("after")


async def test_a_detached_store_is_no_more_believed_to_hold_anything_and_another_takes_its_place() -> None:
    first, second = new_store(), new_store()
    async with single(store=first) as member:
        await traffic(member)
        await member.controller.detach_store()
        assert not any(page.stored for page in member.host.snapshot())
        await member.controller.attach_store(second)
        assert second.contents() == frozenset((*A, *B))
        with pytest.raises(ConfigError, match="detach it before"):
            await member.controller.attach_store(first)
        await member.controller.detach_store()
        await member.controller.detach_store()


async def test_a_store_that_cannot_open_leaves_everything_as_it_was() -> None:
    class Refusing(FaultyStore):
        async def open(self, services: object, host: object) -> None:
            raise StoreError("injected: no")

    async with single(store=None) as member:
        await traffic(member)
        with pytest.raises(StoreError, match="injected"):
            await member.controller.attach_store(Refusing(memory_backend(8)))
        good = new_store()
        await member.controller.attach_store(good)
        assert good.contents() == frozenset((*A, *B))


@virtual
async def test_a_store_that_stalls_is_detached_within_the_budget_and_its_memory_stays_quarantined() -> None:
    store = new_store(faults=FaultPlan.always(Fault.STALL, "read"))
    async with single(store=store, drain_budget_s=2.0) as member:
        await traffic(member)
        member.forget_host()
        member.controller._desk.prefetch(PrefetchRequest("r", A))
        member.controller._desk.flush_pending_backups()
        await anyio.sleep(0.1)
        with pytest.raises(Exception, match="did not end"):
            await member.controller.detach_store()
        await anyio.sleep(20)
        assert member.controller.claims.quarantined == 1
        store.release()
        await anyio.sleep(1)
        assert member.controller.claims.open == 0


async def test_events_tell_that_a_detached_tier_is_gone_and_what_the_next_store_holds() -> None:
    index = InventoryIndex()
    async with single(sinks=(index,)) as member:
        await traffic(member)
        assert index.keys(Tier.STORE) == frozenset((*A, *B))
        await member.controller.detach_store()
        await member.controller.wait_quiet(60)
        assert index.keys(Tier.STORE) == frozenset()
        store = new_store(pages=8)
        await member.controller.attach_store(store)
        await member.controller.wait_quiet(60)
        assert index.keys(Tier.STORE) == store.contents()
        assert index.anomalies == 0


async def test_a_checkpoint_brings_all_of_the_host_to_the_store() -> None:
    store = new_store(faults=FaultPlan({("write", 0): Fault.FAIL, ("write", 1): Fault.FAIL}))
    async with single(store=store, deposit_retries=0) as member:
        await traffic(member)
        await member.controller.checkpoint("one")
        assert store.contents() == frozenset((*A, *B))


async def test_a_checkpoint_fails_as_a_whole_if_one_page_does_not_come() -> None:
    async with single(store=new_store(pages=4)) as member:
        await traffic(member)
        with pytest.raises(CheckpointError, match="pages did not come to the store"):
            await member.controller.checkpoint("one")
    async with single(store=None) as member:
        with pytest.raises(CheckpointError, match="no store is attached"):
            await member.controller.checkpoint("one")


async def test_a_checkpoint_that_fails_on_one_rank_fails_on_all() -> None:
    async with cluster(by_rank={1: {"store": 4}}) as members:
        await on_all(*(one.back_up(one.node(1, A)) for one in members))
        failures: list[str] = []

        async def attempt(member: Member) -> None:
            try:
                await member.controller.checkpoint("one")
            except CheckpointError as error:
                failures.append(str(error))

        await on_all(*(attempt(one) for one in members))
        assert len(failures) == 2
        assert any("another rank" in text for text in failures)


@pytest.mark.parametrize("by_its_own_word", [False, True], ids=["without a store", "with one that cannot store"])
async def test_a_rank_that_cannot_store_goes_on_without_and_the_others_know_why_they_recompute(
    by_its_own_word: bool,
) -> None:
    aside = FaultyStore(memory_backend(64), traits=attrs.evolve(TRAITS, cannot_store="its layout"))
    async with cluster(by_rank={1: {"store": aside if by_its_own_word else None}}) as members:
        acks = await on_all(*(one.back_up(one.node(1, A)) for one in members))
        assert [ack.node_ids for ack in acks] == [(1,), (1,)], "host memory is as before"
        await on_all(*(one.controller.wait_quiet(60) for one in members))
        assert (members[0].backend.contents(), aside.contents()) == (frozenset(A), frozenset())
        answers = await on_all(*(one.prefetch("host", A) for one in members))
        assert [answer.pages for answer in answers] == [6, 6]
        await on_all(*(one.restore("host", A) for one in members))
        for one in members:
            one.forget_host()
        whole, without = await on_all(*(one.prefetch("store", A) for one in members))
        assert whole.account is not None
        assert without.account is not None
        assert whole.account.store.reasons == {MissReason.RANK_WITHOUT_STORE: 6}
        assert (without.account.reasons, without.account.store.queried) == ({MissReason.ABSENT: 6}, 0)


async def test_a_group_whose_stores_hold_different_pages_is_not_taken_for_one_that_lacks_a_store() -> None:
    async with cluster() as members:
        await on_all(*(one.store_away(1, A) for one in members))
        members[1].backend.discard(A[2:])
        first, second = await on_all(*(one.prefetch("r", A) for one in members))
        assert (first.pages, second.pages) == (2, 2)
        await on_all(*(one.restore("r", A[:2]) for one in members))
        assert members[0].controller.stats.store.reasons[MissReason.RANKS_DISAGREED] == 4
        assert members[1].controller.stats.store.reasons[MissReason.ABSENT] == 4


async def test_a_store_that_cannot_store_is_described_and_closed_like_any_other() -> None:
    aside = FaultyStore(memory_backend(64), traits=attrs.evolve(TRAITS, cannot_store="its role"))
    async with single(store=None) as member:
        await traffic(member)
        await member.controller.attach_store(aside)
        assert member.controller.describe()["store"] is not None
        with pytest.raises(ConfigError, match="is attached"):
            await member.controller.attach_store(new_store())
        with pytest.raises(CheckpointError):
            await member.controller.checkpoint("it has no store to go to")
        assert aside.contents() == frozenset()
        await member.controller.detach_store()
        assert member.controller.describe()["store"] is None
