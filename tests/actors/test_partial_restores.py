"""Restores of less than stands ready: what is told, copied and accounted for is what every pool's policy allows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvcr_actors.errors import InvalidNodeError
from kvcr_actors.messages import RestoreFinished
from kvcr_actors.testing.store_driver import chain
from kvcr_actors.types import NO_SLOT, MissReason, RestoreOrder
from tests.actors.cluster import ALL, HYBRID, KV, LONG_S, MAMBA, SWA, Member, cluster, on_all, page_bytes, single
from tests.actors.rig import Rig

pytestmark = pytest.mark.anyio

A = chain("a", 8)
ENDS_AT_3_AND_8 = [KV, KV | SWA, ALL, KV, KV, KV, KV | SWA, ALL]
TARGETS = 2000
"""The first of the device pages that restores go to, one a page of the prefix."""
NOTHING = b"\xee"


def blank(member: Member) -> None:
    """Fill the target pages with what no page holds."""
    for pool, spec in enumerate(HYBRID.pools):
        member.device.load(pool, list(range(TARGETS, TARGETS + 8)), NOTHING * spec.page_bytes * 8)


def targets(first: int, masks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The target pages from page `first` on, for each page in the pools given."""
    pages = list(enumerate(masks, TARGETS + first))
    return tuple(tuple(page if mask >> pool & 1 else NO_SLOT for page, mask in pages) for pool in range(3))


async def restored(
    member: Member, request_id: str, first: int, masks: Sequence[int], device_pages: int | None = None
) -> RestoreFinished:
    """Order pages from `first` on, for each of which `masks` has the pools with a target."""
    order = RestoreOrder(request_id, first, targets(first, masks), device_pages)
    finished = await member.controller.restore(order, timeout_s=LONG_S)
    assert isinstance(finished, RestoreFinished)
    account = finished.account
    own = min(first, finished.pages)
    assert account.host.queried == len(A) - own
    assert account.host.used + account.store.used == finished.pages - own
    for tier in (account.host, account.store):
        assert tier.queried == tier.used + sum(tier.reasons.values())
    return finished


def copied(member: Member, pool: int) -> list[int]:
    """The pages of A of which the targets hold a pool's right bytes; those of the others must be untouched."""
    here: list[int] = []
    for index, key in enumerate(A):
        found = member.device.gather(pool, [TARGETS + index])
        if found == page_bytes(member.rank, key, pool):
            here.append(index)
        else:
            assert found == NOTHING * HYBRID.pools[pool].page_bytes, (pool, index)
    return here


@pytest.mark.parametrize(("ordered", "pages"), [(8, 8), (7, 3), (5, 3), (4, 3), (3, 3), (2, 0), (1, 0), (0, 0)])
async def test_a_shorter_restore_ends_where_every_pool_can_go_on(ordered: int, pages: int) -> None:
    async with single(store=None) as member:
        blank(member)
        await member.back_up(member.node(1, A, masks=ENDS_AT_3_AND_8))
        assert (await member.prefetch("r", A)).pages == 8
        finished = await restored(member, "r", 0, [ALL] * ordered)
        assert finished.pages == pages
        counts = {MissReason.INCOMPLETE: ordered - pages, MissReason.NOT_RESTORED: 8 - ordered}
        assert finished.account.reasons == {reason: count for reason, count in counts.items() if count}
        for pool in range(3):
            assert copied(member, pool) == [page for page in range(pages) if ENDS_AT_3_AND_8[page] >> pool & 1]


async def test_what_came_from_the_store_is_restored_in_part_alike() -> None:
    async with single() as member:
        blank(member)
        await member.store_away(1, A, ENDS_AT_3_AND_8)
        assert (await member.prefetch("r", A)).pages == 8
        finished = await restored(member, "r", 0, [ALL] * 7)
        assert (finished.pages, finished.account.host.used, finished.account.store.used) == (3, 0, 3)
        assert finished.account.store.reasons == {MissReason.INCOMPLETE: 4, MissReason.NOT_RESTORED: 1}
        assert copied(member, 2) == [2]


@pytest.mark.parametrize(
    ("masks", "pages"),
    [
        ([ALL] * 8, 8),
        (ENDS_AT_3_AND_8, 8),
        ([KV] * 6 + [KV | SWA, ALL], 8),
        ([ALL] * 7 + [KV | SWA], 3),
        ([ALL] * 6 + [KV | MAMBA, ALL], 3),
        ([KV] * 8, 0),
        ([ALL] * 3 + [SWA | MAMBA] + [ALL] * 4, 3),
        ([SWA | MAMBA] + [ALL] * 7, 0),
    ],
)
async def test_an_order_without_a_page_that_a_policy_needs_is_cut_before_it(masks: list[int], pages: int) -> None:
    async with single(store=None) as member:
        blank(member)
        await member.back_up(member.node(1, A, masks=ENDS_AT_3_AND_8))
        await member.prefetch("r", A)
        finished = await restored(member, "r", 0, masks)
        assert finished.pages == pages
        for pool in range(3):
            both = [mask & own for mask, own in zip(masks, ENDS_AT_3_AND_8, strict=True)]
            assert copied(member, pool) == [index for index in range(pages) if both[index] >> pool & 1]


@pytest.mark.parametrize(
    ("first", "count", "pages"), [(4, 4, 8), (2, 6, 8), (0, 8, 8), (0, 4, 3), (2, 1, 3), (2, 3, 3)]
)
async def test_a_restore_may_begin_before_what_the_device_had_at_the_look_up(
    first: int, count: int, pages: int
) -> None:
    async with single(store=None) as member:
        blank(member)
        await member.back_up(member.node(1, A, masks=ENDS_AT_3_AND_8))
        await member.prefetch("r", A, device_pages=4)
        finished = await restored(member, "r", first, [ALL] * count)
        assert finished.pages == pages
        assert copied(member, 0) == list(range(first, pages))


async def test_the_part_of_a_window_that_the_device_has_need_not_come_from_the_host() -> None:
    async with single(store=None) as member:
        blank(member)
        await member.back_up(member.node(1, A, masks=[KV, KV, KV, KV, ALL, KV, KV | SWA, ALL]))
        assert (await member.prefetch("r", A, device_pages=4)).pages == 8
        assert (await restored(member, "r", 4, [ALL] * 3)).pages == 5
        assert copied(member, 1) == [4]


async def test_a_restore_beyond_the_device_copies_nothing_unless_the_device_has_gained_those_pages() -> None:
    async with single(store=None) as member:
        blank(member)
        await member.back_up(member.node(1, A))
        await member.prefetch("beyond", A, device_pages=2)
        order = RestoreOrder("beyond", 5, targets(5, [ALL] * 3))
        refused = await member.controller.restore(order, timeout_s=LONG_S)
        assert isinstance(refused, RestoreFinished)
        assert refused.pages == 2
        assert (refused.account.host.queried, refused.account.reasons) == (6, {MissReason.RESTORE_FAILED: 6})
        assert copied(member, 0) == []
        await member.prefetch("gained", A, device_pages=2)
        assert (await restored(member, "gained", 5, [ALL] * 3, device_pages=5)).pages == 8
        assert copied(member, 0) == [5, 6, 7]
        with pytest.raises(InvalidNodeError, match="first 5 is beyond the 4 pages"):
            RestoreOrder("r", 5, targets(5, [ALL] * 3), device_pages=4)


async def test_ranks_end_a_restore_alike_though_one_of_them_could_go_further() -> None:
    async with cluster(store=None) as members:
        for member in members:
            blank(member)
        # Rank 0 has also what a prefix of five pages needs.
        masks = [[KV, KV | SWA, ALL, KV | SWA, ALL, KV, KV | SWA, ALL], ENDS_AT_3_AND_8]
        await on_all(*(one.back_up(one.node(1, A, masks=own)) for one, own in zip(members, masks, strict=True)))
        for request_id, ordered, pages in (("short", 6, 3), ("whole", 8, 8), ("tiny", 2, 0)):
            answers = await on_all(*(one.prefetch(request_id, A) for one in members))
            assert [answer.pages for answer in answers] == [8, 8]
            ended = await on_all(*(restored(one, request_id, 0, [ALL] * ordered) for one in members))
            assert [one.pages for one in ended] == [pages, pages]


async def test_without_a_store_a_prefix_that_is_being_filled_is_waited_for() -> None:
    async with single(store=None, copy_s=0.5) as member:
        ack, answer = await on_all(member.back_up(member.node(1, A)), member.prefetch("r", A))
        assert not ack.failed
        assert (answer.pages, answer.account) == (8, None)
        member.controller.cancel("r")


async def test_on_ranks_without_a_store_too() -> None:
    async with cluster(store=None, by_rank={0: {"copy_s": 0.5}}) as members:
        acks = [one.back_up(one.node(1, A)) for one in members]
        answers = await on_all(*acks, *(one.prefetch("r", A) for one in members))
        assert [answer.pages for answer in answers[2:]] == [8, 8]
        for member in members:
            member.controller.cancel("r")


async def test_what_fills_past_the_deadline_is_not_waited_for() -> None:
    async with single(store=None, copy_s=0.5, prefetch_deadline_s=0.1) as member:
        _, answer = await on_all(member.back_up(member.node(1, A)), member.prefetch("r", A))
        assert answer.account is not None
        assert answer.account.reasons == {MissReason.DEADLINE: 8}


async def test_the_scheduler_door_tells_the_same() -> None:
    rig = Rig(store_pages=None)
    keys = chain("a", 5)
    async with rig.running():
        await rig.back_up(rig.node(keys))
        rig.give_prefetch("below", keys, device_pages=3)
        await rig.reply("below")
        ids = rig.give_restore("below", 4, first=1)
        finished = await rig.reply("below")
        assert isinstance(finished, RestoreFinished)
        assert finished.pages == 5
        rig.assert_bytes(ids, keys[1:])
        await rig.quiet()
        assert rig.stats.restored_pages == 4
    rig.check()
