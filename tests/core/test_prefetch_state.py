"""A held prefix keeps its pages by one claim on the deepest, and gives it back once."""

from __future__ import annotations

import pytest

from kvcr_actors.core.host_tier import HostPage, HostTier
from kvcr_actors.core.ledger import ClaimLedger
from kvcr_actors.core.prefetch_state import HeldPrefix, Phase, first_incomplete
from kvcr_actors.types import (
    AllPages,
    CacheLayout,
    MissReason,
    PoolSpec,
    PrefetchRequest,
    RestoreOrder,
    TrailingPages,
)

LAYOUT = CacheLayout((PoolSpec("kv", 2, 64, AllPages()), PoolSpec("mamba", 1, 8, TrailingPages(1))))
KEYS = tuple(letter.encode() * 32 for letter in "abcd")


@pytest.fixture
def held() -> HeldPrefix:
    return HeldPrefix(PrefetchRequest("r", KEYS, device_pages=1), HostTier(LAYOUT, 8), ClaimLedger(), store_on=True)


def pages_of(held: HeldPrefix, masks: list[int]) -> list[HostPage]:
    return held.host.commit(held.host.reserve(None, KEYS[: len(masks)], masks))


def test_the_claim_moves_to_the_deepest_page_and_is_released_once(held: HeldPrefix) -> None:
    pages = pages_of(held, [3, 3, 3])
    held.extend([])
    assert held.claim is None
    held.extend(pages[:1])
    first = held.claim
    held.extend(pages[1:])
    assert held.claim is first
    assert [page.pins for page in pages] == [0, 0, 1]
    assert held.host.clear() == 0
    assert held.beyond_device == 2
    held.advance(Phase.READY)
    held.end()
    assert held.ledger.open == 0
    assert held.host.clear() == 3


def test_a_prefix_that_found_nothing_has_no_claim_to_release(held: HeldPrefix) -> None:
    assert held.beyond_device == 0
    held.end()
    assert (held.ledger.taken, held.phase) == (0, Phase.ENDED)


def test_phases_only_move_forward(held: HeldPrefix) -> None:
    with pytest.raises(RuntimeError, match="request r: searching cannot become restoring"):
        held.advance(Phase.RESTORING)
    held.advance(Phase.READY)
    held.advance(Phase.RESTORING)
    held.end()
    with pytest.raises(RuntimeError, match="ended cannot become ended"):
        held.end()


def test_an_end_that_broke_off_is_taken_up_where_it_stopped(held: HeldPrefix) -> None:
    held.extend(pages_of(held, [3, 3]))
    broken = [OSError("planted")]
    ended: list[str] = []

    def break_once() -> None:
        ended.append("asked")
        if broken:
            raise broken.pop()

    held.when_ended(break_once)
    held.when_ended(lambda: ended.append("last"))
    with pytest.raises(OSError, match="planted"):
        held.end()
    assert (held.ledger.open, held.is_over) == (0, False)
    held.end()
    assert (ended, held.is_over) == (["asked", "last"], True)
    assert held.host.clear() == 2


def test_a_prefix_knows_whether_the_engine_was_told_how_it_ended(held: HeldPrefix) -> None:
    assert not held.answered
    assert held.answer("told") == "told"
    assert held.answered


def test_a_part_that_some_pool_cannot_restore_is_cut_off(held: HeldPrefix) -> None:
    held.extend(pages_of(held, [1, 3, 1]))
    held.truncate(LAYOUT)
    assert (len(held.pages), held.miss) == (2, MissReason.INCOMPLETE)
    held.miss = MissReason.ABSENT
    held.truncate(LAYOUT)
    assert (len(held.pages), held.miss) == (2, MissReason.ABSENT)
    held.end()
    assert held.host.clear() == 3


@pytest.mark.parametrize(
    ("masks", "first", "whole"),
    [([], 0, True), ([1, 1, 3], 3, True), ([1, 3, 1], 2, False), ([3, 2, 3], 1, False), ([3, 1], 1, False)],
)
def test_the_first_page_that_lacks_what_a_restore_of_all_needs_is_known(
    held: HeldPrefix, masks: list[int], first: int, whole: bool
) -> None:
    held.extend(pages_of(held, masks) if masks else [])
    assert (first_incomplete(masks, LAYOUT), held.is_whole(LAYOUT)) == (first, whole)


def test_a_release_without_a_pin_left_is_harmless(held: HeldPrefix) -> None:
    held.extend(pages_of(held, [3]))
    assert held.claim is not None
    held.claim.release()
    held._unpin()
    assert held.host.clear() == 1


def test_the_account_covers_every_page_beyond_the_device(held: HeldPrefix) -> None:
    held.extend(pages_of(held, [3, 3, 3]))
    held.host_pages = 2
    held.fail(MissReason.READ_FAILED)
    assert held.failed
    ended = held.account(MissReason.CANCELLED)
    assert (ended.host.queried, ended.host.used, ended.store.used) == (3, 0, 0)
    assert ended.reasons == {MissReason.CANCELLED: 2, MissReason.READ_FAILED: 1}
    account = held.account_for(order(1, 2), 3, MissReason.INCOMPLETE)
    assert (account.host.queried, account.host.used, account.store.used) == (3, 1, 1)
    assert account.reasons == {MissReason.READ_FAILED: 1}


def order(first: int, count: int, device_pages: int | None = None) -> RestoreOrder:
    return RestoreOrder("r", first, (range(count),) * 2, device_pages)


@pytest.mark.parametrize(
    ("given", "own", "end", "reasons"),
    [
        (order(1, 2), 1, 3, {MissReason.ABSENT: 1}),
        (order(1, 1), 1, 1, {MissReason.INCOMPLETE: 1, MissReason.NOT_RESTORED: 1, MissReason.ABSENT: 1}),
        (order(0, 3), 0, 3, {MissReason.ABSENT: 1}),
        (order(0, 1), 0, 0, {MissReason.INCOMPLETE: 1, MissReason.NOT_RESTORED: 2, MissReason.ABSENT: 1}),
        (order(2, 1, 2), 2, 3, {MissReason.ABSENT: 1}),
        (order(1, 0), 1, 1, {MissReason.NOT_RESTORED: 2, MissReason.ABSENT: 1}),
        (order(4, 0, 9), 4, 4, {}),
    ],
)
def test_a_restore_goes_as_far_as_it_can_and_accounts_for_every_page_beyond_its_begin(
    held: HeldPrefix, given: RestoreOrder, own: int, end: int, reasons: dict[MissReason, int]
) -> None:
    held.extend(pages_of(held, [1, 1, 3]))
    held.host_pages = 2
    assert held.fits(given)
    assert (held.own_pages(given), held.restore_end(given, LAYOUT)) == (own, end)
    account = held.account_for(given, end, MissReason.INCOMPLETE)
    assert account.host.used + account.store.used == end - own
    assert (account.host.queried, account.reasons) == (4 - own, reasons)


@pytest.mark.parametrize(
    ("given", "own"), [(order(2, 1), 1), (order(1, 3), 1), (order(3, 1, 3), 3), (order(5, 0, 9), 4), (order(2, 0), 1)]
)
def test_an_order_beyond_the_device_or_beyond_what_is_ready_does_not_fit(
    held: HeldPrefix, given: RestoreOrder, own: int
) -> None:
    held.extend(pages_of(held, [3, 3, 3]))
    assert not held.fits(given)
    assert held.own_pages(given) == own
    account = held.account_for(given, own, MissReason.RESTORE_FAILED)
    expected = {MissReason.RESTORE_FAILED: max(0, 3 - own), MissReason.ABSENT: min(1, 4 - own)}
    assert account.reasons == {reason: count for reason, count in expected.items() if count}


def test_ranks_end_a_restore_at_a_boundary_on_which_they_agreed(held: HeldPrefix) -> None:
    held.extend(pages_of(held, [3, 3, 3]))
    assert held.restore_end(order(0, 2), LAYOUT) == 2
    held.agreed = 0b1010
    assert held.restore_end(order(0, 2), LAYOUT) == 1


def test_a_limit_shortens_what_is_held_for_a_reason_and_the_end_is_told_once(held: HeldPrefix) -> None:
    held.extend(pages_of(held, [3, 3, 3]))
    assert held.boundaries(LAYOUT) == 0b1111
    ended: list[str] = []
    held.when_ended(lambda: ended.append("before"))
    held.limit(5, MissReason.RANKS_DISAGREED)
    assert (len(held.pages), held.miss) == (3, MissReason.ABSENT)
    held.limit(2, MissReason.RANKS_DISAGREED)
    assert (len(held.pages), held.miss) == (2, MissReason.RANKS_DISAGREED)
    assert ended == []
    held.end()
    held.when_ended(lambda: ended.append("after"))
    assert ended == ["before", "after"]
