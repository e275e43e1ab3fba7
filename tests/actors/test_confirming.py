"""Boundaries are confirmed from the longest down, on all ranks in step; what was delivered is released on every way."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import pytest

from kvcr_actors.core.hit_policy import needed_masks
from kvcr_actors.stores.memory import memory_backend
from kvcr_actors.testing.confirming import ConfirmingStore
from kvcr_actors.testing.faults import Fault, FaultPlan
from kvcr_actors.testing.ranks import RankHub
from kvcr_actors.testing.store_driver import chain
from kvcr_actors.types import PrefetchRequest
from tests.actors.cluster import ALL, HYBRID, KV, Member, cluster, on_all, single
from tests.actors.rig import virtual

pytestmark = pytest.mark.anyio

A = chain("a", 8)
PROMISED = chain("promised", 40)
EVERY_BOUNDARY = dict.fromkeys(A, ALL)


def confirming(*, confirm_s: float = 0.1, faults: FaultPlan | None = None, read_s: float = 0.01) -> ConfirmingStore:
    """A peer that promises eight legal boundaries."""
    latency = {"confirm": confirm_s, "read": read_s, "write": 0.0}
    return ConfirmingStore(memory_backend(64), EVERY_BOUNDARY, faults, latency=lambda kind, _: latency[kind])


async def fill(members: list[Member], held: int) -> None:
    """The peers really hold the first `held` pages whole, and only the KV of the others."""
    masks = [ALL] * held + [KV] * (len(A) - held)
    await on_all(*(one.store_away(1, A, masks) for one in members))


def by_rank(stores: list[ConfirmingStore]) -> dict[int, dict[str, Any]]:
    return {rank: {"store": store} for rank, store in enumerate(stores)}


@pytest.mark.parametrize("held", [0, 1, 5, 8])
async def test_the_longest_boundary_that_the_peer_delivers_is_used(held: int) -> None:
    store = confirming(confirm_s=0.001)
    async with single(store=store) as member:
        await fill([member], held)
        answer = await member.prefetch("r", A)
        assert answer.pages == held
        assert [pages for _, pages in store.asked] == list(range(8, max(0, held - 1), -1))
        if held:
            await member.restore("r", A[:held], needed_masks(HYBRID, held))
    assert store.open_claims == 0


@pytest.mark.parametrize("held", [1, 4, 7])
async def test_what_the_host_holds_ready_needs_no_confirmation_of_the_pages_below_it(held: int) -> None:
    store = confirming(confirm_s=0.001)
    async with single(store=store) as member:
        await fill([member], 8)
        await member.back_up(member.node(2, A[:held]))
        await member.controller.wait_quiet(60)
        store._backend.discard(A[:held])
        answer = await member.prefetch("r", A)
        assert answer.pages == 8, "the store lacks only what the host has"
        assert [pages for _, pages in store.asked] == [8]
        await member.restore("r", A, [ALL] * held + needed_masks(HYBRID, 8)[held:])
    assert store.open_claims == 0


@pytest.mark.parametrize("held", [1, 4, 8])
async def test_what_the_host_holds_ready_stays_a_hit_with_all_its_components_when_nothing_is_confirmed(
    held: int,
) -> None:
    store = ConfirmingStore(memory_backend(64), dict.fromkeys(PROMISED, ALL))
    async with single(store=store) as member:
        await member.back_up(member.node(1, A[:held]))
        await member.controller.wait_quiet(60)
        store._backend.discard(A)
        answer = await member.prefetch("r", (*A[:held], *PROMISED))
        assert answer.pages == held
        # More boundaries were promised than are tried.
        assert len(store.asked) == 32
        await member.restore("r", A[:held])
        assert [page.mask for page in member.host.match(A)] == [ALL] * held
    assert store.open_claims == 0


@pytest.mark.parametrize("length", [1, 5, 6, 7])
async def test_what_was_brought_for_one_boundary_is_completed_for_another(length: int) -> None:
    store = confirming(confirm_s=0.001)
    async with single(store=store) as member:
        await fill([member], 8)
        assert (await member.prefetch("long", A)).pages == 8
        member.controller.cancel("long")
        assert [page.mask for page in member.host.match(A)] == needed_masks(HYBRID, 8)
        reads = store.faults.seen["read"]
        assert (await member.prefetch("short", A[:length])).pages == length
        await member.restore("short", A[:length], needed_masks(HYBRID, length))
        assert store.faults.seen["read"] == reads + 1
        assert (await member.prefetch("both", A)).pages == 8
        await member.restore("both", A, needed_masks(HYBRID, 8))
        assert store.faults.seen["read"] == reads + 1
    assert store.open_claims == 0


async def test_a_rank_whose_host_holds_all_ready_votes_without_a_word_from_its_store() -> None:
    stores = [confirming(confirm_s=0.001), confirming(confirm_s=0.001)]
    async with cluster(by_rank=by_rank(stores)) as members:
        await on_all(*(one.back_up(one.node(1, A)) for one in members))
        await on_all(*(one.controller.wait_quiet(60) for one in members))
        members[0].forget_host()
        stores[1]._backend.discard(A)
        answers = await on_all(*(one.prefetch("r", A) for one in members))
        assert [answer.pages for answer in answers] == [8, 8]
        assert [len(store.asked) for store in stores] == [1, 0]
        await on_all(*(one.restore("r", A, needed_masks(HYBRID, 8)) for one in members))
    assert [store.open_claims for store in stores] == [0, 0]


async def test_ranks_confirm_in_step_and_use_what_all_of_them_were_delivered() -> None:
    stores = [confirming(confirm_s=0.001), confirming(confirm_s=0.02)]
    async with cluster(by_rank=by_rank(stores)) as members:
        await on_all(
            members[0].store_away(1, A, [ALL] * 6 + [KV] * 2), members[1].store_away(1, A, [ALL] * 4 + [KV] * 4)
        )
        answers = await on_all(*(one.prefetch("r", A) for one in members))
        assert [answer.pages for answer in answers] == [4, 4]
        assert [[pages for _, pages in store.asked] for store in stores] == [[8, 7, 6, 5, 4]] * 2
        await on_all(*(one.restore("r", A[:4], needed_masks(HYBRID, 4)) for one in members))
    assert [store.open_claims for store in stores] == [0, 0]


async def test_a_rank_whose_store_holds_everything_itself_votes_with_the_others() -> None:
    stores = [confirming(confirm_s=0.001)]
    async with cluster(by_rank=by_rank(stores)) as members:
        await on_all(members[0].store_away(1, A, [ALL] * 3 + [KV] * 5), members[1].store_away(1, A))
        answers = await on_all(*(one.prefetch("r", A) for one in members))
        assert [answer.pages for answer in answers] == [3, 3]
        await on_all(*(one.restore("r", A[:3], needed_masks(HYBRID, 3)) for one in members))


async def revoked_after(revoked_s: float) -> None:
    hub = RankHub(2, deadline_s=5.0)
    stores = [confirming(), confirming()]
    async with cluster(2, hub=hub, by_rank=by_rank(stores)) as members:
        await fill(members, 0)
        asked_at_revocation: list[int] = []

        async def revoke() -> None:
            await anyio.sleep(revoked_s)
            members[0].controller.cancel("r")
            asked_at_revocation.extend(len(store.asked) for store in stores)

        started = anyio.current_time()
        await on_all(*(one.prefetch("r", A) for one in members), revoke())
        assert anyio.current_time() - started < revoked_s + 0.5, "the search ends at once"
        await members[0].controller.wait_quiet(60)
        since = [len(store.asked) - before for store, before in zip(stores, asked_at_revocation, strict=True)]
        assert since[0] == 0, "the revoked rank confirms nothing more"
        assert since[1] <= 1, "the others at most one more"
        await anyio.sleep(0.5)
        last = {rank: max(one.round for one in hub.verdicts if one.rank == rank) for rank in (0, 1)}
        assert last[0] == last[1], "every rank leaves in the same round"
        assert [len(one.table) for one in hub.ranks] == [0, 0]
        for one in members:
            one.controller.cancel("r")
    assert [store.open_claims for store in stores] == [0, 0]


@pytest.mark.parametrize("revoked_s", [0.0, 0.05, 0.1, 0.101, 0.15, 0.35, 0.399, 0.4, 0.401, 0.75, 0.79, 0.81])
def test_a_search_revoked_on_one_rank_confirms_nothing_more_there_and_ends_on_all_in_one_round(
    revoked_s: float,
) -> None:
    from kvcr_actors.testing.virtual_time import VIRTUAL, run_virtual

    for backend in VIRTUAL:
        run_virtual(partial(revoked_after, revoked_s), backend=backend)


@pytest.mark.parametrize("fault", [Fault.FAIL, Fault.STALL, Fault.DROP])
def test_a_confirmation_that_goes_wrong_costs_that_boundary_and_its_late_claim_is_released(fault: Fault) -> None:
    from kvcr_actors.testing.virtual_time import run_virtual

    async def life() -> None:
        store = confirming(faults=FaultPlan({("confirm", 0): fault}))
        async with single(store=store) as member:
            await fill([member], 8)
            answer = await member.prefetch("r", A)
            assert answer.pages == 7
            member.controller.cancel("r")
            store.release()
            await anyio.sleep(1)
            if fault is Fault.STALL:
                assert store.late == 1
        assert store.open_claims == 0

    run_virtual(life)


@virtual
async def test_claims_on_what_was_delivered_are_kept_until_the_bytes_are_in_host_memory() -> None:
    store = confirming(confirm_s=0.1, read_s=1.0)
    async with single(store=store) as member:
        await fill([member], 8)
        member.controller._desk.prefetch(PrefetchRequest("r", A))
        member.controller._desk.flush_pending_backups()
        await anyio.sleep(0.6)
        assert store.open_claims == 1
        await anyio.sleep(2)
        assert store.open_claims == 0
        member.controller.cancel("r")


@virtual
async def test_scenario_19_a_search_cancelled_during_a_confirmation_releases_the_claim_that_comes_late() -> None:
    store = confirming(confirm_s=0.5)
    async with single(store=store) as member:
        await fill([member], 8)

        async def cancel() -> None:
            await anyio.sleep(0.2)
            member.controller.cancel("r")

        answer, _ = await on_all(member.prefetch("r", A), cancel())
        assert answer.account is not None
        await anyio.sleep(1)
        assert (store.late, store.open_claims) == (1, 0)
