"""A page that is held gains the components that it lacks, and no slot is lost whatever happens meanwhile."""

from __future__ import annotations

import pytest

from kvcr_actors.core.host_tier import HostPage, HostTier
from kvcr_actors.errors import NoHostMemoryError
from kvcr_actors.types import NO_SLOT, CacheLayout, PoolSpec

LAYOUT = CacheLayout((PoolSpec("kv", 1, 64), PoolSpec("swa", 1, 8), PoolSpec("mamba", 1, 8)))


def held(tier: HostTier, text: str, mask: int) -> list[HostPage]:
    pages = tier.reserve(None, [letter.encode() for letter in text], [mask] * len(text))
    return tier.commit(pages)


def test_a_page_gains_components_and_is_one_page_all_the_time() -> None:
    tier = HostTier(LAYOUT, 4)
    a, b = held(tier, "ab", 0b001)
    growths = tier.reserve_more([(a, 0b010), (b, 0b110)])
    assert [growth.slots for growth in growths] == [(NO_SLOT, 0, NO_SLOT), (NO_SLOT, 1, 0)]
    assert (a.mask, b.mask) == (0b001, 0b001), "not before the bytes are there"
    tier.check()
    assert tier.grow(growths) == [a, b]
    assert (a.mask, a.slots) == (0b011, (0, 0, NO_SLOT))
    assert (b.mask, b.slots) == (0b111, (1, 1, 0))
    tier.check()
    assert tier.evict(2) == 2
    assert tier.free_pages == 4
    tier.check()


def test_a_growing_page_is_not_evicted_and_dropped_components_come_back() -> None:
    tier = HostTier(LAYOUT, 2)
    (a,) = held(tier, "a", 0b001)
    growths = tier.reserve_more([(a, 0b110)])
    assert tier.evict(1) == 0
    tier.drop(growths)
    assert a.mask == 0b001
    tier.check()
    assert tier.evict(1) == 1
    tier.check()


def test_of_two_growths_of_one_page_the_second_gives_back_what_it_need_not_bring() -> None:
    tier = HostTier(LAYOUT, 4)
    (a,) = held(tier, "a", 0b001)
    first, second = tier.reserve_more([(a, 0b010)]), tier.reserve_more([(a, 0b110)])
    assert tier.grow(first) == [a]
    slots = a.slots
    assert tier.grow(second) == [a], "mamba is new"
    assert a.slots[:2] == slots[:2]
    third = tier.reserve_more([(held(tier, "b", 0b011)[0], 0b100)])
    tier.grow(third)
    tier.check()


def test_a_growth_that_brings_nothing_new_changes_nothing() -> None:
    tier = HostTier(LAYOUT, 4)
    (a,) = held(tier, "a", 0b001)
    first, second = tier.reserve_more([(a, 0b010)]), tier.reserve_more([(a, 0b010)])
    tier.grow(first)
    assert tier.grow(second) == []
    tier.check()


def test_room_is_made_by_evicting_others() -> None:
    tier = HostTier(LAYOUT, 2)
    (a,) = held(tier, "a", 0b001)
    held(tier, "b", 0b111)
    tier.grow(tier.reserve_more([(a, 0b010)]))
    (c,) = held(tier, "c", 0b011)
    assert tier.get(b"b") is None or tier.get(b"c") is c
    tier.check()


def test_without_room_nothing_changes() -> None:
    tier = HostTier(LAYOUT, 1)
    (a,) = held(tier, "a", 0b001)
    tier.reserve_more([(a, 0b010)])
    with pytest.raises(NoHostMemoryError):
        tier.reserve_more([(a, 0b010)])
    assert a.pins == 1
    tier.check()


def test_misuse_is_refused_before_any_change() -> None:
    tier = HostTier(LAYOUT, 4)
    (a,) = held(tier, "a", 0b001)
    (filling,) = tier.reserve(a, [b"b"])
    for page, mask in ((a, 0b001), (a, 0b1000), (filling, 0b010)):
        with pytest.raises(ValueError, match="lacks"):
            tier.reserve_more([(page, mask)])
    growths = tier.reserve_more([(a, 0b010)])
    tier.drop(growths)
    for use in (tier.drop, tier.grow):
        with pytest.raises(ValueError, match="is over"):
            use(growths)
    tier.check()


def test_a_snapshot_names_parents_before_children_and_a_growth_says_whether_it_goes_on() -> None:
    tier = HostTier(LAYOUT, 4)
    a, b = held(tier, "ab", 0b001)
    assert tier.snapshot() == [a, b]
    (growth,) = tier.reserve_more([(a, 0b010)])
    assert tier.is_growing(growth)
    tier.drop([growth])
    assert not tier.is_growing(growth)
