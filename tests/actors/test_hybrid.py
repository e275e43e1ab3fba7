"""Prefixes of hybrid models: what each pool lacks shortens a prefix or does not, and what was lacking comes later."""

from __future__ import annotations

import pytest

from kvcr_actors.testing.faults import Fault, FaultPlan
from kvcr_actors.testing.store_driver import chain
from kvcr_actors.types import MissReason
from tests.actors.cluster import ALL, KV, MAMBA, SWA, Member, single

pytestmark = pytest.mark.anyio

A = chain("a", 8)
LONG = chain("long", 9)


async def stored(member: Member, masks: list[int]) -> None:
    await member.store_away(1, A[: len(masks)], masks)


@pytest.mark.parametrize(
    ("masks", "pages"),
    [
        ([KV, KV, KV, KV, KV | SWA, ALL], 6),
        ([KV, KV, KV | SWA, ALL, KV, KV], 4),
        ([KV | SWA, ALL, KV, KV], 2),
        ([KV | SWA, ALL, KV | SWA, KV | MAMBA], 2),
        ([KV, KV, KV, KV], 0),
        ([ALL, SWA | MAMBA, ALL, ALL], 1),
    ],
)
async def test_a_prefix_ends_at_the_longest_boundary_that_every_pool_can_restore(masks: list[int], pages: int) -> None:
    async with single() as member:
        await stored(member, masks)
        answer = await member.prefetch("r", A[: len(masks)])
        assert answer.pages == pages
        if pages:
            await member.restore("r", A[:pages], masks[:pages])


async def test_short_sliding_window_data_keeps_the_kv_of_the_pages_before_it() -> None:
    async with single() as member:
        await stored(member, [KV, KV, KV, KV, KV | SWA, ALL])
        answer = await member.prefetch("r", A[:6])
        assert answer.pages == 6
        assert [page.mask for page in member.host.match(A[:6])] == [KV, KV, KV, KV, KV | SWA, ALL]
        member.controller.cancel("r")


@pytest.mark.parametrize("pool", [0, 1, 2])
async def test_scenario_06_a_stored_page_without_one_component_is_a_miss_and_no_byte_of_it_is_used(pool: int) -> None:
    async with single() as member:
        masks = [ALL] * 3 + [ALL & ~(1 << pool)]
        await stored(member, masks)
        answer = await member.prefetch("r", A[:4])
        assert answer.pages == 3
        await member.restore("r", A[:3])


async def test_scenario_06_a_page_in_host_memory_without_a_component_is_a_miss() -> None:
    async with single(store=None) as member:
        await member.back_up(member.node(1, A[:4], masks=[ALL, ALL, KV, KV]))
        answer = await member.prefetch("r", A[:4])
        assert answer.pages == 2
        member.controller.cancel("r")


@pytest.mark.parametrize("store", [None, 64])
async def test_scenario_07_a_later_insert_brings_the_components_that_a_held_page_lacks(store: int | None) -> None:
    async with single(store=store) as member:
        await member.back_up(member.node(1, A[:4], masks=[ALL, ALL, KV, KV]))
        ack = await member.back_up(member.node(2, A[:4]))
        assert ack.node_ids == (2,)
        answer = await member.prefetch("r", A[:4])
        assert answer.pages == 4
        await member.restore("r", A[:4])


@pytest.mark.parametrize("promised", [False, True])
async def test_scenario_07_beliefs_drop_from_the_first_unserved_page_and_the_next_insert_rewrites_the_span(
    promised: bool,
) -> None:
    """Whether the lookup says that the side pools are absent, or the read finds out."""
    lies = FaultPlan({("lookup", 0): Fault.CORRUPT_SILENTLY}) if promised else FaultPlan()
    async with single(store_faults=lies) as member:
        await member.store_away(1, A[:4], [ALL, ALL, KV, KV])
        assert (await member.prefetch("short", A[:4])).pages == 2
        assert [page.key for page in member.host.snapshot() if page.stored] == list(A[:2])
        await member.restore("short", A[:2])
        await member.back_up(member.node(2, A[:4]))
        await member.controller.wait_quiet(60)
        member.forget_host()
        assert (await member.prefetch("whole", A[:4])).pages == 4
        await member.restore("whole", A[:4])


async def test_components_for_which_there_is_no_room_leave_the_page_as_it_is_and_come_later() -> None:
    async with single(store=None, host_slots=4) as member:
        await member.back_up(member.node(1, A[:2], masks=KV))
        await member.back_up(member.node(2, A[2:4], A[1], masks=[ALL, ALL]))
        held = await member.prefetch("hold", A[:4])
        member.controller.cancel("hold")
        assert held.pages == 4
        ack = await member.back_up(member.node(3, A[:2], masks=ALL))
        assert ack.node_ids == (3,)


async def test_a_pool_whose_copy_fails_brings_no_component_and_the_page_keeps_what_it_had() -> None:
    faults = FaultPlan({("to_host.mamba", 1): Fault.FAIL})
    async with single(store=None, device_faults=faults) as member:
        await member.back_up(member.node(1, A[:2], masks=[ALL, KV | SWA]))
        ack = await member.back_up(member.node(2, A[:2]))
        assert [node for node, _ in ack.failed] == [2]
        assert (await member.prefetch("r", A[:2])).pages == 1
        member.controller.cancel("r")
        assert (await member.back_up(member.node(3, A[:2]))).node_ids == (3,)
        assert (await member.prefetch("again", A[:2])).pages == 2
        await member.restore("again", A[:2])


@pytest.mark.parametrize("length", [7, 8, 9])
async def test_scenario_08_each_chunk_of_a_long_prompt_reaches_host_and_store(length: int) -> None:
    async with single() as member:
        parent = None
        for start in range(0, length, 4):
            chunk = LONG[start : min(start + 4, length)]
            masks = [KV] * (len(chunk) - 2) + [KV | SWA] * min(1, len(chunk) - 1) + [ALL]
            masks = masks[-len(chunk) :]
            assert not (await member.back_up(member.node(start + 1, chunk, parent, masks))).failed
            parent = chunk[-1]
        await member.controller.wait_quiet(60)
        member.forget_host()
        assert (await member.prefetch("r", LONG[:length])).pages == length
        member.controller.cancel("r")
        await member.controller.wait_quiet(60)
        member.forget_host()
        assert (await member.prefetch("one chunk", LONG[:4])).pages == 4
        member.controller.cancel("one chunk")


async def test_a_node_that_was_split_while_its_backup_ran_is_one_path_all_the_same() -> None:
    async with single(copy_s=0.5) as member:
        from tests.actors.cluster import on_all

        whole = member.node(1, A[:6])
        head, tail = member.node(2, A[:3]), member.node(3, A[3:6], A[2])
        acks = await on_all(member.back_up(whole), member.back_up(head, tail))
        assert [ack.failed for ack in acks] == [(), ()]
        assert (await member.prefetch("r", A[:6])).pages == 6
        await member.restore("r", A[:6])


async def test_a_page_that_lacks_a_component_says_so_in_the_account() -> None:
    async with single(store=None) as member:
        await member.back_up(member.node(1, A[:4], masks=KV))
        answer = await member.prefetch("r", A[:4])
        assert answer.account is not None
        assert answer.account.reasons == {MissReason.INCOMPLETE: 4}


async def test_a_prefix_for_which_there_is_no_room_is_cut_where_every_pool_can_restore_it() -> None:
    async with single(prefetch_in_flight_pages=5) as member:
        masks = [KV, KV, KV | SWA, ALL, KV, KV, KV | SWA, ALL]
        await stored(member, masks)
        answer = await member.prefetch("r", A)
        assert answer.pages == 4
        await member.restore("r", A[:4], masks[:4])
        assert member.controller.stats.reasons == {MissReason.QUEUE_FULL: 4}
