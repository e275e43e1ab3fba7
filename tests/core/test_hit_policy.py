"""A prefix is a hit only where every pool has what its policy asks for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcr_actors.core.hit_policy import boundaries, component_masks, legal_boundaries, longest, needed_masks
from kvcr_actors.types import NO_SLOT, AllPages, BlockGroups, CacheLayout, HitPolicy, PoolSpec, TrailingPages

policies = st.one_of(st.just(AllPages()), st.integers(1, 9).map(TrailingPages), st.integers(1, 5).map(BlockGroups))


def allowed(policy: HitPolicy, present: list[bool], boundary: int) -> bool:
    """The definition, in words of its own."""
    match policy:
        case AllPages():
            return all(present[:boundary])
        case TrailingPages(count):
            return all(present[max(0, boundary - count) : boundary])
        case BlockGroups(size):
            return boundary % size == 0 and all(present[:boundary])


def layout_of(*pools: HitPolicy) -> CacheLayout:
    return CacheLayout(tuple(PoolSpec(f"pool{i}", 1, 1, policy) for i, policy in enumerate(pools)))


@given(policy=policies, present=st.lists(st.booleans(), max_size=20))
def test_legal_boundaries_follow_the_definition(policy: HitPolicy, present: list[bool]) -> None:
    bits = legal_boundaries(policy, sum(1 << i for i, here in enumerate(present) if here), len(present))
    assert [bits >> b & 1 == 1 for b in range(len(present) + 1)] == [
        allowed(policy, present, b) for b in range(len(present) + 1)
    ]
    assert bits >> (len(present) + 1) == 0


@given(pools=st.lists(policies, min_size=1, max_size=3), data=st.data())
def test_boundaries_are_those_that_every_pool_allows(pools: list[HitPolicy], data: st.DataObject) -> None:
    full = (1 << len(pools)) - 1
    masks = data.draw(st.lists(st.integers(0, full) | st.just(full), max_size=12))
    bits = boundaries(masks, layout_of(*pools))
    for boundary in range(len(masks) + 2):
        expected = boundary <= len(masks) and all(
            allowed(policy, [bool(mask >> pool & 1) for mask in masks], boundary) for pool, policy in enumerate(pools)
        )
        assert (bits >> boundary & 1 == 1) == expected
    assert longest(bits) == max(b for b in range(len(masks) + 1) if bits >> b & 1)


def test_a_missing_component_of_any_pool_is_a_miss_from_there_on() -> None:
    layout = layout_of(AllPages(), AllPages())
    for page in range(4):
        for pool in range(2):
            masks = [3, 3, 3, 3]
            masks[page] &= ~(1 << pool)
            assert longest(boundaries(masks, layout)) == page


def test_kv_without_its_side_state_restores_nothing() -> None:
    layout = layout_of(AllPages(), TrailingPages(1))
    assert boundaries([1, 1, 1], layout) == 1
    assert longest(boundaries([1, 3, 1], layout)) == 2


def test_a_sliding_window_needs_only_its_last_pages() -> None:
    layout = layout_of(AllPages(), TrailingPages(2))
    assert longest(boundaries([1, 1, 3, 3], layout)) == 4
    assert longest(boundaries([1, 3, 3, 1], layout)) == 3
    assert longest(boundaries([3, 1, 1, 1], layout)) == 1


def test_complete_pages_still_end_on_whole_groups() -> None:
    assert boundaries([1] * 7, layout_of(BlockGroups(3))) == 0b1001001


def test_a_path_longer_than_a_machine_word_keeps_its_last_boundary() -> None:
    layout = layout_of(AllPages(), TrailingPages(100), BlockGroups(8))
    assert longest(boundaries([7] * 4000, layout)) == 4000
    assert longest(boundaries([7] * 3000 + [6] + [7] * 999, layout)) == 3000


def test_ranks_without_a_common_boundary_restore_nothing() -> None:
    assert longest(0) == 0
    assert longest(0b1) == 0


@pytest.mark.parametrize(
    ("components", "masks"),
    [(([1, 2], [NO_SLOT, 5]), [1, 3]), (([NO_SLOT], [NO_SLOT]), [0]), (([], []), [])],
)
def test_component_masks_name_the_pools_of_each_page(components: tuple, masks: list[int]) -> None:
    assert component_masks(components) == masks


def test_a_restore_needs_of_each_pool_what_its_policy_names() -> None:
    layout = CacheLayout(
        (PoolSpec("kv", 1, 8), PoolSpec("swa", 1, 8, TrailingPages(2)), PoolSpec("groups", 1, 8, BlockGroups(2)))
    )
    assert needed_masks(layout, 4) == [0b101, 0b101, 0b111, 0b111]
    assert needed_masks(layout, 1) == [0b111]
    assert needed_masks(layout, 0) == []
