"""A prefix is a hit only where every pool has what its policy asks for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcr_actors.core.hit_policy import (
    EVERY_BOUNDARY,
    boundaries,
    component_masks,
    legal_boundaries,
    longest,
    needed_masks,
    restore_end,
)
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


def runs_from(policy: HitPolicy, on_device: list[bool], boundary: int) -> bool:
    """Whether a model can go on behind `boundary` pages with what lies on the device, in words of its own."""
    match policy:
        case AllPages():
            return False not in on_device[:boundary]
        case TrailingPages(count):
            return False not in on_device[:boundary][-count:]
        case BlockGroups(size):
            return not boundary % size and False not in on_device[:boundary]


@st.composite
def restores(draw: st.DrawFn) -> tuple[list[HitPolicy], list[int], list[int], int, int]:
    """Pools, what the host holds, what an order gives, where it begins, and the boundaries among which to choose."""
    pools = draw(st.lists(policies, min_size=1, max_size=3))
    full = (1 << len(pools)) - 1
    mask = st.just(full) | st.integers(0, full)
    held = draw(st.lists(mask, max_size=10))
    first = draw(st.integers(0, len(held)))
    given = draw(st.lists(mask, max_size=len(held) - first))
    allowed = draw(st.just(EVERY_BOUNDARY) | st.integers(0, (2 << len(held)) - 1))
    return pools, held, given, first, allowed


@given(restore=restores())
def test_a_restore_ends_at_the_longest_prefix_from_which_every_pool_can_go_on(
    restore: tuple[list[HitPolicy], list[int], list[int], int, int],
) -> None:
    pools, held, given, first, allowed = restore
    # A device that could go on behind `first` has of each pool all that a policy can ask for before.
    after = [[True] * first for _ in pools]
    for index, slots in enumerate(given):
        for pool, pages in enumerate(after):
            pages.append(held[first + index] & slots & 1 << pool != 0)
    right = [
        end
        for end in range(first + 1, first + len(given) + 1)
        if allowed >> end & 1 and all(runs_from(policy, after[pool], end) for pool, policy in enumerate(pools))
    ]
    assert restore_end(held, given, first, layout_of(*pools), allowed) == max(right, default=first)


def test_a_shorter_restore_needs_its_own_window() -> None:
    layout = layout_of(AllPages(), TrailingPages(2))
    held = [1, 1, 1, 1, 1, 1, 3, 3]
    assert restore_end(held, [3] * 8, 0, layout) == 8
    assert restore_end(held, [3] * 5, 0, layout) == 0
    assert restore_end([3, 3, *held[2:]], [3] * 5, 0, layout) == 2


def test_a_window_that_lies_on_the_device_needs_no_page_of_the_host() -> None:
    layout = layout_of(AllPages(), TrailingPages(3))
    held = [1, 1, 1, 3, 3]
    assert restore_end(held, [3, 3], 3, layout) == 5
    assert restore_end(held, [3, 3, 3], 2, layout) == 2
    assert restore_end([1, 1, 3, 3, 3], [3, 3, 3], 2, layout) == 5


def test_an_order_without_a_page_for_the_window_is_cut_to_one_that_has_it() -> None:
    layout = layout_of(AllPages(), TrailingPages(1))
    assert restore_end([3] * 4, [3, 3, 3, 1], 0, layout) == 3
    assert restore_end([3] * 4, [1, 1, 1, 3], 0, layout) == 4
    assert restore_end([3] * 4, [1, 1, 1, 1], 0, layout) == 0


def test_groups_are_counted_from_the_root_wherever_a_restore_begins() -> None:
    layout = layout_of(BlockGroups(3))
    assert restore_end([1] * 8, [1] * 5, 3, layout) == 6
    assert restore_end([1] * 8, [1] * 2, 4, layout) == 6
    assert restore_end([1] * 8, [1], 4, layout) == 4


def test_ranks_end_a_restore_where_all_of_them_can() -> None:
    layout = layout_of(AllPages(), TrailingPages(1))
    assert restore_end([3] * 5, [3] * 4, 0, layout, 0b101001) == 3
    assert restore_end([3] * 5, [3] * 2, 1, layout, 0b110001) == 1


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
