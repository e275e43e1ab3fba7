"""A step's nodes share one reservation, and each still gets what it would have got alone."""

from __future__ import annotations

import anyio
import pytest

from kvcr_actors.runtime.breath import PAGES_A_CALL
from kvcr_actors.testing.store_driver import chain
from kvcr_actors.types import SkipReason
from tests.actors.cluster import ALL, KV, cluster, on_all, single

pytestmark = pytest.mark.anyio

A = chain("a", 4)
B = chain("b", 4)
X = chain("x", 4)


async def test_room_for_one_node_is_never_made_at_the_cost_of_anothers_parent() -> None:
    async with single(store=None, host_slots=4) as member:
        await member.back_up(member.node(1, A[:1]))
        await member.back_up(member.node(2, B[:3]))
        # The parent is the oldest page of all.
        ack = await member.back_up(member.node(3, X[:2]), member.node(4, A[1:2], A[0]))
        assert (ack.node_ids, ack.failed) == ((3, 4), ())
        assert member.host.contents() == {*A[:2], *X[:2]}


async def test_where_not_all_fit_each_node_is_tried_alone_and_one_whose_parent_had_to_leave_says_so() -> None:
    async with single(store=None, host_slots=4) as member:
        await member.back_up(member.node(1, A[:1]))
        await member.back_up(member.node(2, B[:3]))
        ack = await member.back_up(member.node(3, X[:3]), member.node(4, A[1:3], A[0]), member.node(5, B[:1]))
        assert ack.failed == ((4, SkipReason.PARENT_ABSENT),)
        assert sorted(ack.node_ids) == [3, 5]
        assert member.host.contents() == {*B[:1], *X[:3]}


async def test_a_node_whose_pages_left_for_the_nodes_before_it_is_copied_whole() -> None:
    async with single(store=None, host_slots=4) as member:
        await member.back_up(member.node(1, A[:2], masks=KV))
        await member.back_up(member.node(2, B[:2]))
        ack = await member.back_up(member.node(3, X[:2]), member.node(4, A[:2]))
        assert (ack.node_ids, ack.failed) == ((3, 4), ())
        for name, keys in (("x", X[:2]), ("a", A[:2])):
            assert (await member.prefetch(name, keys)).pages == 2
            await member.restore(name, keys)


async def test_components_never_take_the_room_of_the_pages_that_they_belong_to() -> None:
    async with single(store=None, host_slots=4, copy_s=0.2) as member:
        await member.back_up(member.node(1, A[:3], masks=[KV, KV, ALL]))
        await member.back_up(member.node(2, B[:1]))
        acks = []

        async def grow(node_id: int, pages: int) -> None:
            acks.append(await member.back_up(member.node(node_id, A[:pages])))

        async def grow_again() -> None:
            await anyio.sleep(0.05)
            await grow(4, 4)

        # The second comes while the first one's components, still being copied, hold every slot of their pools.
        await on_all(grow(3, 2), grow_again())
        failed = {one: reason for ack in acks for one, reason in ack.failed}
        assert failed == {4: SkipReason.NO_HOST_MEMORY}
        assert set(A[:3]) <= member.host.contents()


@pytest.mark.parametrize("count", [1, PAGES_A_CALL // 6, PAGES_A_CALL])
async def test_a_step_of_many_small_paths_and_chains_is_one_submit_of_right_bytes(count: int) -> None:
    paths = [chain(f"path {number}", 6) for number in range(count)]
    async with single(store=None, host_slots=6 * len(paths)) as member:
        nodes = [member.node(10 + number, keys[:3]) for number, keys in enumerate(paths)]
        nodes += [member.node(100 + number, keys[3:5], keys[2]) for number, keys in enumerate(paths)]
        nodes += [member.node(200 + number, keys) for number, keys in enumerate(paths)]
        ack = await member.back_up(*nodes)
        assert (sorted(ack.node_ids), ack.failed) == ([node.node_id for node in nodes], ())
        assert member.device.submits == 1
        for number, keys in enumerate(paths):
            assert (await member.prefetch(number, keys)).pages == 6
            await member.restore(number, keys)


async def test_ranks_decide_on_a_steps_nodes_in_one_order_whatever_each_has_to_copy() -> None:
    async with cluster(2) as members:
        await on_all(*(one.back_up(one.node(1, A[:2])) for one in members))
        await on_all(*(one.controller.wait_quiet(60) for one in members))
        members[0].forget_host()
        # One rank copies all, and the other has something to copy for the first node only.
        acks = await on_all(*(one.back_up(one.node(2, A[:3]), one.node(3, A[:2])) for one in members))
        assert [(ack.node_ids, ack.failed) for ack in acks] == [((2, 3), ())] * 2
