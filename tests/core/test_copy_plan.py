"""One plan carries every node of a step, each pool's pairs in the order of host memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvcr_actors.core.copy_plan import Direction, is_within, plan_copy
from kvcr_actors.types import NO_SLOT, CacheLayout, PoolSpec

LAYOUT = CacheLayout((PoolSpec("kv", 2, 64), PoolSpec("swa", 1, 8)))


def test_nodes_and_pools_become_one_plan_without_what_is_not_there() -> None:
    plan = plan_copy(
        Direction.TO_HOST,
        [(([7, 8], [NO_SLOT, 3]), ([4, 5], [NO_SLOT, 0])), (([1], [9]), ([3], [NO_SLOT]))],
    )
    kv, swa = plan.pools
    assert (kv.pool, list(kv.device_pages), list(kv.host_slots)) == (0, [1, 7, 8], [3, 4, 5])
    assert (swa.pool, list(swa.device_pages), list(swa.host_slots)) == (1, [3], [0])
    assert plan.pages == 4
    assert plan.bytes_for(LAYOUT) == 3 * 128 + 8
    assert list(kv.runs()) == [(0, 3, 3)]


def test_a_pool_without_pages_is_left_out_and_no_nodes_make_an_empty_plan() -> None:
    plan = plan_copy(Direction.TO_DEVICE, [(([0], [NO_SLOT]), ([0], [1]))])
    assert [copy.pool for copy in plan.pools] == [0]
    empty = plan_copy(Direction.TO_DEVICE, [])
    assert (empty.pools, empty.pages, empty.bytes_for(LAYOUT)) == ((), 0, 0)


@given(slots=st.sets(st.integers(0, 60), min_size=1))
def test_runs_are_maximal_and_cover_every_pair_once(slots: set[int]) -> None:
    order = list(slots)
    copy = plan_copy(Direction.TO_HOST, [((order,), (order,))]).pools[0]
    runs = list(copy.runs())
    covered = [copy.host_slots[first + i] for first, _, pages in runs for i in range(pages)]
    assert covered == sorted(slots)
    assert all(copy.host_slots[first] == slot for first, slot, _ in runs)
    ends = [slot + pages for _, slot, pages in runs]
    assert all(end < start for end, (_, start, _) in zip(ends, runs[1:], strict=False))


def test_a_component_list_is_within_its_pools_up_to_the_last_page_of_each() -> None:
    assert is_within(((0, 3), (NO_SLOT, 1)), (4, 2))
    assert is_within(((), ()), (4, 2))
    assert not is_within(((0, 4), (0, 1)), (4, 2))
    assert not is_within(((0, 3), (0, 2)), (4, 2))
