"""Orders of a step become one plan; a malformed one is left out alone, and everything else stays as it was ordered."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvcr_actors.core.copy_plan import Direction
from kvcr_actors.core.order_merge import merge_orders
from kvcr_actors.types import NO_SLOT, CacheLayout, PoolSpec

LAYOUT = CacheLayout((PoolSpec("kv", 2, 64), PoolSpec("swa", 1, 8)))
PAGES, SLOTS = (20, 10), (15, 6)


def test_orders_and_pools_become_one_plan_in_the_order_of_host_memory() -> None:
    orders = [
        (([7, 8], [NO_SLOT, 3]), ([4, 5], [NO_SLOT, 0])),
        ((np.array([1, 2]), np.array([9, 9])), (np.array([3, NO_SLOT]), np.array([NO_SLOT, NO_SLOT]))),
        (((), ()), ((), ())),
    ]
    merged = merge_orders(Direction.TO_HOST, LAYOUT, orders, PAGES, SLOTS)
    kv, swa = merged.plan.pools
    assert (kv.pool, list(kv.device_pages), list(kv.host_slots)) == (0, [1, 7, 8], [3, 4, 5])
    assert (swa.pool, list(swa.device_pages), list(swa.host_slots)) == (1, [3], [0])
    assert merged.pools == (0b11, 0b01, 0)
    assert merged.refused == {}
    nothing = merge_orders(Direction.TO_HOST, LAYOUT, [], PAGES, SLOTS)
    assert (nothing.plan.pools, nothing.pools) == ((), ())


def test_an_order_outside_its_pools_is_left_out_with_its_reason_and_its_neighbours_stay() -> None:
    orders = [(([1], [1]), ([1], [1])), (([2, 20], [2, 2]), ([2, 3], [2, 3])), (([4], [4]), ([4], [6]))]
    merged = merge_orders(Direction.TO_DEVICE, LAYOUT, orders, PAGES, SLOTS)
    assert merged.refused == {
        1: (0, "device page 20 is not one of the 20 of pool kv"),
        2: (1, "host slot 6 is not one of the 6 of pool swa"),
    }
    assert [list(copy.host_slots) for copy in merged.plan.pools] == [[1], [1]]
    assert merged.pools == (0b11, 0, 0)


def test_a_slot_is_written_once_a_step_and_read_as_often_as_one_likes() -> None:
    orders = [(([1], ()), ([5], ())), (([2, 3], ()), ([6, 5], ())), (([4, 4], ()), ([7, 7], ()))]
    merged = merge_orders(Direction.TO_HOST, LAYOUT, orders, PAGES, SLOTS)
    assert merged.refused == {
        1: (0, "host slot 5 of pool kv is written twice in one step"),
        2: (0, "host slot 7 of pool kv is written twice in one step"),
    }
    assert [list(copy.host_slots) for copy in merged.plan.pools] == [[5]]
    merged = merge_orders(Direction.TO_DEVICE, LAYOUT, orders, PAGES, SLOTS)
    assert (merged.refused, [list(copy.host_slots) for copy in merged.plan.pools]) == ({}, [[5, 5, 6, 7, 7]])


LISTS = st.lists(st.tuples(st.integers(-2, 21), st.integers(-2, 16)), max_size=4)


@given(orders=st.lists(st.tuples(LISTS, LISTS), max_size=5), to_host=st.booleans(), arrays=st.booleans())
def test_the_plan_is_that_of_a_reference(
    orders: list[tuple[list[tuple[int, int]], ...]], to_host: bool, arrays: bool
) -> None:
    direction = Direction.TO_HOST if to_host else Direction.TO_DEVICE
    outside = {
        index
        for index, order in enumerate(orders)
        for pool, pairs in enumerate(order)
        for page, slot in pairs
        if NO_SLOT not in (page, slot) and not (0 <= page < PAGES[pool] and 0 <= slot < SLOTS[pool])
    }
    expected: list[list[tuple[int, int]]] = []
    twice: set[int] = set()
    for pool in range(2):
        seen: set[int] = set()
        for index, order in enumerate(orders):
            for page, slot in order[pool] if index not in outside else ():
                if NO_SLOT not in (page, slot):
                    twice |= {index} if slot in seen and to_host else set()
                    seen.add(slot)
    for pool in range(2):
        kept = [order[pool] for index, order in enumerate(orders) if index not in outside | twice]
        expected.append(sorted((slot, page) for pairs in kept for page, slot in pairs if NO_SLOT not in (page, slot)))
    as_given = [
        tuple(
            tuple(
                np.array([pair[side] for pair in pairs], np.int64) if arrays else [pair[side] for pair in pairs]
                for pairs in order
            )
            for side in (0, 1)
        )
        for order in orders
    ]
    merged = merge_orders(direction, LAYOUT, as_given, PAGES, SLOTS)
    assert set(merged.refused) == outside | twice
    found = {copy.pool: sorted(zip(copy.host_slots, copy.device_pages, strict=True)) for copy in merged.plan.pools}
    assert [found.get(pool, []) for pool in range(2)] == expected
    for copy in merged.plan.pools:
        assert list(copy.host_slots) == sorted(copy.host_slots)
