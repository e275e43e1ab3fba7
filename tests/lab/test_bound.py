"""The bound is what an exhaustive search over all evictions finds, and no policy is above it."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvcr_actors.lab import Bound, Workload, simulate, workload
from kvcr_actors.replay.trace import TraceRequest
from kvcr_actors.types import Eviction

PARENTS = (None, 0, 1, 1, 0, 4, None, 6)
"""A small forest: the parent of each block."""


def path(block: int | None) -> tuple[int, ...]:
    return () if block is None else (*path(PARENTS[block]), block)


def made(tails: list[int]) -> Workload:
    return workload([TraceRequest(0, 0, 0, path(tail)) for tail in tails])


def prefixes(pages: frozenset[int], capacity: int) -> list[frozenset[int]]:
    """Every set of at most `capacity` of the pages (blocks) that has each page's parent too."""
    return [
        frozenset(kept)
        for size in range(min(capacity, len(pages)) + 1)
        for kept in combinations(sorted(pages), size)
        if all(PARENTS[page] is None or PARENTS[page] in kept for page in kept)
    ]


def best_of_all(tails: list[int], capacity: int) -> int:
    """The most hits over every choice of what to keep after every request."""
    reached: dict[frozenset[int], int] = {frozenset(): 0}
    for tail in tails:
        asked = frozenset(path(tail))
        after: dict[frozenset[int], int] = {}
        for held, hits in reached.items():
            found = hits + len(asked & held)
            for kept in prefixes(held | asked, capacity):
                after[kept] = max(found, after.get(kept, 0))
        reached = after
    return max(reached.values())


requests = st.lists(st.integers(0, len(PARENTS) - 1), min_size=1, max_size=9)


@settings(max_examples=60)
@given(tails=requests, capacity=st.integers(1, 6))
def test_the_bound_is_the_best_of_all_evictions(tails: list[int], capacity: int) -> None:
    assert Bound(made(tails)).at(capacity) == best_of_all(tails, capacity)


@given(tails=st.lists(st.integers(0, len(PARENTS) - 1), min_size=1, max_size=80), capacity=st.integers(1, 8))
def test_no_policy_is_above_the_bound(tails: list[int], capacity: int) -> None:
    work = made(tails)
    bound = Bound(work)
    assert bound.at(capacity) <= bound.infinite == work.pages - work.unique
    for eviction in Eviction:
        assert sum(simulate(work.keys, eviction, capacity)) <= bound.at(capacity)
