"""Pages that the host holds in part are completed from the store for a boundary that needs more of them."""

from __future__ import annotations

import anyio
import pytest

from kvcr_actors.messages import PrefetchReady
from kvcr_actors.testing.faults import Fault, FaultPlan
from kvcr_actors.testing.store_driver import chain
from kvcr_actors.testing.stores import FaultyStore
from kvcr_actors.testing.virtual_time import VIRTUAL, run_virtual
from kvcr_actors.types import MissReason
from tests.actors.cluster import ALL, KV, SWA, Member, cluster, on_all, single
from tests.actors.rig import virtual

pytestmark = pytest.mark.anyio

A = chain("a", 6)


async def held_in_part(member: Member) -> None:
    """The store has every page whole, the host its KV alone."""
    await member.store_away(1, A)
    await member.back_up(member.node(2, A, masks=KV))
    await member.controller.wait_quiet(60)
    assert [page.mask for page in member.host.match(A)] == [KV] * 6


async def reasons(member: Member, request_id: str) -> dict[MissReason, int]:
    answer = await member.prefetch(request_id, A)
    assert isinstance(answer, PrefetchReady)
    assert answer.account is not None
    return dict(answer.account.reasons)


@pytest.mark.parametrize("length", [1, 3, 6])
async def test_only_what_the_boundary_needs_is_read_and_the_bytes_are_right(length: int) -> None:
    async with single() as member:
        await held_in_part(member)
        answer = await member.prefetch("r", A[:length])
        assert answer.pages == length
        masks = [KV] * (length - 2) + [KV | SWA] * min(1, length - 1) + [ALL]
        assert [page.mask for page in member.host.match(A)][:length] == masks
        await member.restore("r", A[:length], masks)
        assert all(page.stored for page in member.host.match(A)), "the store has what it gave"


async def test_a_longer_prefix_goes_on_from_the_pages_held_in_part() -> None:
    async with single() as member:
        await member.store_away(1, A)
        await member.back_up(member.node(2, A[:5], masks=KV))
        answer = await member.prefetch("r", A)
        assert answer.pages == 6
        await member.restore("r", A, [KV] * 4 + [KV | SWA, ALL])


@virtual
async def test_a_read_that_fails_leaves_the_pages_as_they_were_and_is_not_made_again_for_a_while() -> None:
    plan = FaultPlan.always(Fault.FAIL, "read", limit=1)
    async with single(store_faults=plan, failed_read_pause_s=10.0) as member:
        await held_in_part(member)
        assert await reasons(member, "first") == {MissReason.INCOMPLETE: 6}
        assert await reasons(member, "second") == {MissReason.INCOMPLETE: 6}
        assert plan.seen["read"] == 1
        assert [page.mask for page in member.host.match(A)] == [KV] * 6
        await anyio.sleep(11)
        assert (await member.prefetch("third", A)).pages == 6
        await member.restore("third", A, [KV] * 4 + [KV | SWA, ALL])


@pytest.mark.parametrize("fault", [Fault.LATE, Fault.STALL])
def test_memory_under_a_read_that_is_not_quiet_is_quarantined(fault: Fault) -> None:
    async def life() -> None:
        async with single(store_faults=FaultPlan({("read", 0): fault})) as member:
            await held_in_part(member)
            assert await reasons(member, "first") == {MissReason.INCOMPLETE: 6}
            assert member.controller.claims.quarantined == 1
            assert member.host.evict(6) < 6, "what is being read into stays"
            assert isinstance(member.store, FaultyStore)
            member.store.release()
            await anyio.sleep(5)
            assert member.controller.claims.open == 0

    for backend in VIRTUAL:
        run_virtual(life, backend=backend)


async def test_a_store_that_lost_the_components_costs_no_page_that_was_whole() -> None:
    async with single() as member:
        await member.store_away(1, A, [ALL, ALL, KV, KV, KV, KV])
        await member.back_up(member.node(2, A, masks=[ALL, ALL, KV, KV, KV, KV]))
        answer = await member.prefetch("r", A)
        assert answer.pages == 2
        await member.restore("r", A[:2])


@virtual
async def test_a_cancel_in_the_middle_leaves_nothing() -> None:
    for step in range(8):
        async with single(read_s=0.02) as member:
            await held_in_part(member)

            async def cancel(after_s: float = 0.005 * step) -> None:
                await anyio.sleep(after_s)
                member.controller.cancel("r")

            await on_all(member.prefetch("r", A), cancel())
            await anyio.sleep(1)
            member.check_baseline()
            assert (await member.prefetch("again", A)).pages == 6
            member.controller.cancel("again")


async def test_without_room_for_the_components_the_pages_stay_as_they_are() -> None:
    async with single(host_slots=8) as member:
        await held_in_part(member)
        mamba = member.host._slots.arenas[2]
        taken = mamba.allocate(mamba.free_slots)
        assert await reasons(member, "r") == {MissReason.INCOMPLETE: 6}
        for run in taken:
            mamba.free(run.start, len(run))
        assert (await member.prefetch("later", A)).pages == 6
        member.controller.cancel("later")


async def test_a_rank_that_holds_pages_in_part_completes_them_for_all() -> None:
    async with cluster() as members:
        await on_all(*(one.store_away(1, A) for one in members))
        await on_all(members[0].back_up(members[0].node(2, A, masks=KV)), members[1].back_up(members[1].node(2, A)))
        answers = await on_all(*(one.prefetch("r", A) for one in members))
        assert [answer.pages for answer in answers] == [6, 6]
        await on_all(*(one.restore("r", A, [KV] * 4 + [KV | SWA, ALL]) for one in members))
