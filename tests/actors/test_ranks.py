"""Every operation ends alike on every rank, whatever one of them lacks, loses or stops."""

from __future__ import annotations

from functools import partial

import anyio
import pytest

from kvcr_actors.errors import ConfigError, InvalidNodeError
from kvcr_actors.messages import PrefetchReady
from kvcr_actors.testing.faults import Fault, FaultPlan
from kvcr_actors.testing.ranks import RankHub
from kvcr_actors.testing.store_driver import chain
from kvcr_actors.testing.virtual_time import VIRTUAL, BackendName, run_virtual
from kvcr_actors.types import MissReason, PrefetchRequest, SkipReason
from tests.actors.cluster import Member, cluster, on_all
from tests.actors.rig import virtual

pytestmark = pytest.mark.anyio

A, B = chain("a", 6), chain("b", 4)


async def store_everywhere(members: list[Member], node_id: int = 1) -> None:
    acks = await on_all(*(one.store_away(node_id, A) for one in members))
    assert [ack.node_ids for ack in acks] == [(node_id,)] * len(members)


async def ready_everywhere(members: list[Member], request_id: str) -> list[int]:
    answers = await on_all(*(one.prefetch(request_id, A) for one in members))
    return [0 if answer.account is not None else answer.pages for answer in answers]


def settle(members: list[Member], *request_ids: str) -> None:
    for one in members:
        for request_id in request_ids:
            one.controller.cancel(request_id)


@pytest.mark.parametrize("size", [2, 4])
async def test_scenario_14_what_every_rank_backed_up_every_rank_prefetches_and_restores_with_its_own_bytes(
    size: int,
) -> None:
    async with cluster(size) as members:
        await store_everywhere(members)
        assert await ready_everywhere(members, "r") == [6] * size
        await on_all(*(one.restore("r", A) for one in members))


async def test_scenario_23_a_step_of_which_one_rank_has_everything_already_is_joined_by_it() -> None:
    async with cluster() as members:
        await on_all(*(one.back_up(one.node(1, A)) for one in members))
        await members[1].controller.wait_quiet(60)
        members[0].forget_host()
        acks = await on_all(*(one.back_up(one.node(2, A)) for one in members))
        assert [ack.node_ids for ack in acks] == [(2,), (2,)]


async def test_scenario_24_memory_that_one_rank_lacks_fails_the_node_on_all_and_leaves_nothing() -> None:
    async with cluster(by_rank={1: {"host_slots": 5}}, store=None) as members:
        acks = await on_all(*(one.back_up(one.node(1, A), one.node(2, B)) for one in members))
        assert [ack.node_ids for ack in acks] == [(2,), (2,)]
        assert acks[0].failed == ((1, SkipReason.RANKS_DISAGREED),)
        assert acks[1].failed == ((1, SkipReason.NO_HOST_MEMORY),)
        assert [one.controller.host_contents() for one in members] == [frozenset(B)] * 2


async def test_scenario_24_a_rank_that_refuses_a_whole_step_still_joins() -> None:
    async with cluster(by_rank={1: {"host_slots": 5}}, store=None) as members:
        acks = await on_all(*(one.back_up(one.node(1, A)) for one in members))
        assert [len(ack.failed) for ack in acks] == [1, 1]


async def test_scenario_25_copies_that_end_in_another_order_make_the_same_nodes_final() -> None:
    faults = FaultPlan({("to_host.swa", 1): Fault.FAIL})
    async with cluster(4, by_rank={1: {"copy_s": 0.5}, 2: {"device_faults": faults}, 3: {"copy_s": 0.05}}) as members:
        steps = [(1, A[:3], None), (2, B, None), (3, A[3:], A[2])]
        acks = [
            await on_all(*(one.back_up(one.node(node_id, keys, parent)) for one in members))
            for node_id, keys, parent in steps
        ]
        for step in acks:
            assert len({ack.node_ids for ack in step}) == 1
        assert [step[0].node_ids for step in acks] == [(1,), (), (3,)]
        assert len({one.controller.host_contents() for one in members}) == 1


@pytest.mark.parametrize("fault", [Fault.FAIL, Fault.TRUNCATE, Fault.CORRUPT])
async def test_scenario_26_a_read_that_goes_wrong_on_one_rank_shortens_the_prefix_on_all(fault: Fault) -> None:
    plan = FaultPlan.always(fault, "read", limit=8)
    async with cluster(by_rank={1: {"store_faults": plan}}) as members:
        await store_everywhere(members)
        first, second = await ready_everywhere(members, "r")
        assert first == second < 6
        if first:
            await on_all(*(one.restore("r", A[:first]) for one in members))


async def test_scenario_26_pages_that_one_rank_lost_since_the_lookup_are_used_by_none() -> None:
    async with cluster(by_rank={1: {"read_s": 1.0}}) as members:
        await store_everywhere(members)

        async def lose() -> None:
            await anyio.sleep(0.5)  # after the lookups were agreed on, before the bytes are read
            members[1].backend.discard([A[3]])

        first, second, _ = await on_all(*(one.prefetch("r", A) for one in members), lose())
        assert (first.pages, second.pages) == (3, 3)
        await on_all(*(one.restore("r", A[:3]) for one in members))


async def test_a_rank_whose_store_lacks_the_prefix_makes_a_miss_of_it_everywhere() -> None:
    async with cluster() as members:
        await store_everywhere(members)
        members[1].backend.discard(A)
        answers = await on_all(*(one.prefetch("r", A) for one in members))
        assert [answer.pages for answer in answers] == [0, 0]
        assert all(answer.account is not None for answer in answers)


async def test_a_rank_without_a_store_agrees_on_what_its_host_has() -> None:
    async with cluster(by_rank={1: {"store": None}}) as members:
        await on_all(*(one.back_up(one.node(1, A)) for one in members))
        members[0].forget_host()
        assert await ready_everywhere(members, "r") == [6, 6]
        settle(members, "r")


async def test_a_hit_in_host_memory_is_agreed_on_too() -> None:
    async with cluster(store=None) as members:
        await on_all(*(one.back_up(one.node(1, A)) for one in members))
        members[1].host.evict(2)
        assert await ready_everywhere(members, "r") == [4, 4]
        await on_all(*(one.restore("r", A[:4]) for one in members))


async def test_a_request_cancelled_on_one_rank_is_no_hit_on_the_other_unless_both_had_it() -> None:
    for step in range(12):
        async with cluster() as members:
            await store_everywhere(members)

            async def revoke(after_s: float = 0.002 * step) -> None:
                await anyio.sleep(after_s)
                members[0].controller.cancel("r")

            started = anyio.current_time()
            first, second, _ = await on_all(*(one.prefetch("r", A) for one in members), revoke())
            assert anyio.current_time() - started < 2.0, "nobody waits for a deadline"
            if first.account is not None:
                assert second.account is not None or second.pages == 6
            settle(members, "r")


@virtual
async def test_a_request_that_arrives_twice_is_joined_twice() -> None:
    async with cluster() as members:
        await store_everywhere(members)
        members[1].controller._desk.prefetch(PrefetchRequest("r", A))
        answers = await on_all(*(one.prefetch("r", A) for one in members))
        started = anyio.current_time()
        assert answers[0].pages == 6
        assert answers[1].account is not None  # of the second order, which ends at once
        assert answers[1].account.reasons == {MissReason.CANCELLED: 6}
        settle(members, "r")
        await anyio.sleep(6)
        assert anyio.current_time() - started < 8


@pytest.mark.parametrize("what", ["prefetch", "backup"])
async def test_what_a_full_inbox_refuses_on_one_rank_is_joined_with_nothing(what: str) -> None:
    async with cluster() as members:
        await store_everywhere(members)
        inboxes = members[1].controller._desk._inboxes
        started = anyio.current_time()
        if what == "prefetch":
            inboxes.prefetch.limit = 0
            first, second = await on_all(*(one.prefetch("r", A) for one in members))
            assert first.account is not None
            assert second.account is not None
            assert second.account.reasons == {MissReason.QUEUE_FULL: 6}
        else:
            inboxes.backup.limit = 0
            acks = await on_all(*(one.back_up(one.node(2, B)) for one in members))
            assert [ack.node_ids for ack in acks] == [(), ()]
            assert acks[1].failed == ((2, SkipReason.QUEUE_FULL),)
        assert anyio.current_time() - started < 2.0, "nobody waits for a deadline"


@virtual
async def test_a_rank_that_dies_makes_misses_of_what_is_open_and_leaves_nothing_on_the_others() -> None:
    async with cluster(3, by_rank={2: {"read_s": 100.0}}) as members:
        await store_everywhere(members)

        async def die() -> None:
            await anyio.sleep(0.5)
            await members[2].controller.close(60)

        first, second, _ = await on_all(*(one.prefetch("r", A) for one in members[:2]), die())
        assert isinstance(first, PrefetchReady)
        assert first.account is not None
        assert second.account is not None
        ack = await members[0].back_up(members[0].node(9, B))
        assert ack.failed == ((9, SkipReason.RANKS_DISAGREED),)


@virtual
async def test_a_frozen_rank_costs_deadlines_and_nothing_else() -> None:
    hub = RankHub(2, deadline_s=5.0)
    async with cluster(2, hub=hub) as members:
        await store_everywhere(members)
        hub.ranks[1].frozen = True
        started = anyio.current_time()
        first = await members[0].prefetch("r", A)
        assert first.account is not None
        assert MissReason.RANKS_DISAGREED in first.account.reasons or MissReason.ABSENT in first.account.reasons
        assert anyio.current_time() - started < 11
        hub.ranks[1].frozen = False
        assert await ready_everywhere(members, "again") == [6, 6]
        settle(members, "again")


async def test_ranks_with_other_settings_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="ranks disagree on prefetch_threshold_pages: 2 on rank 1, 1 on rank 0"):
        async with cluster(by_rank={1: {"prefetch_threshold_pages": 2}}):
            pass


async def test_a_request_id_that_ranks_cannot_share_is_refused_at_the_desk() -> None:
    async with cluster() as members:
        with pytest.raises(InvalidNodeError, match="str, int or bytes"):
            members[0].controller._desk.prefetch(PrefetchRequest(("tuple", 1), A))


async def life_with_faulty_rounds(k: int) -> bool:
    faults = FaultPlan({("round", k): Fault.FAIL})
    hub = RankHub(2, deadline_s=5.0, faults=faults)
    async with cluster(2, hub=hub) as members:
        acks = await on_all(*(one.back_up(one.node(1, A), one.node(2, B)) for one in members))
        assert acks[0].node_ids == acks[1].node_ids
        for one in members:
            await one.controller.wait_quiet(60)
            one.forget_host()
        first, second = await ready_everywhere(members, "r")
        assert first == second
        settle(members, "r")
    return faults.seen["round"] > k


@pytest.mark.parametrize("backend", VIRTUAL)
def test_a_round_that_fails_at_any_moment_ends_alike_on_all_ranks(backend: BackendName) -> None:
    k = 0
    while run_virtual(partial(life_with_faulty_rounds, k), backend=backend):
        k += 1
    assert k >= 3
