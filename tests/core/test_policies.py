"""The policies against their textbook forms on single pages, and what the tree adds: leaves only, pins, undone work."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import repeat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcr_actors.core.eviction import EvictionPolicy, LruEviction
from kvcr_actors.core.leaf_queue import LeafQueue, by_stamp
from kvcr_actors.core.policy_names import eviction_policy
from kvcr_actors.core.prefix_tree import PrefixTree, TreePage
from kvcr_actors.core.retention import SessionEviction, TailLruEviction
from kvcr_actors.types import Eviction, PageKey
from tests.core import textbook

WATCHING = [eviction for eviction in Eviction if eviction is not Eviction.LRU]


def key(number: int) -> PageKey:
    return number.to_bytes(4, "big")


def ask(tree: PrefixTree[TreePage], path: list[int], capacity: int) -> int:
    """One request by the sequential rule."""
    keys = [key(page) for page in path]
    found = tree.match(keys)
    tree.touch(found)
    tail = found[-1] if found else None
    new = keys[len(found) :]
    if new:
        if tail is not None:
            tree.pin(tail)
        tree.evict(len(tree) + len(new) - capacity)
        if tail is not None:
            tree.unpin(tail)
        tree.insert_path(new, tail, repeat(None), ready=True)
    return len(found)


@pytest.mark.parametrize(
    ("eviction", "reference"),
    [
        (Eviction.SIEVE, textbook.sieve),
        (Eviction.S3_FIFO, textbook.s3fifo),
        (Eviction.TWO_QUEUES, textbook.two_queues),
        (Eviction.LFU, textbook.lfu),
    ],
)
@settings(max_examples=30)
@given(capacity=st.integers(1, 24), seed=st.integers(0, 1 << 20))
def test_single_pages_leave_as_the_paper_says(
    eviction: Eviction, reference: Callable[[list[int], int], list[bool]], capacity: int, seed: int
) -> None:
    chooser = random.Random(seed)
    uses = [int(chooser.paretovariate(0.6)) % 60 for _ in range(300)]
    tree = PrefixTree(eviction_policy(eviction, capacity, TreePage))
    assert [ask(tree, [page], capacity) == 1 for page in uses] == reference(uses, capacity)


def paths(chooser: random.Random) -> list[list[int]]:
    """Conversations that share a head and grow, and some that branch."""
    known: list[list[int]] = [[0]]
    fresh = 1
    for _ in range(80):
        path = chooser.choice(known)
        if chooser.random() < 0.7:
            path = path[: chooser.randint(1, len(path))] if chooser.random() < 0.3 else path
            grown = chooser.randint(1, 4)
            path = [*path, *range(fresh, fresh + grown)]
            fresh += grown
            known.append(path)
    return [chooser.choice(known) for _ in range(200)]


@pytest.mark.parametrize("eviction", Eviction)
@settings(max_examples=15)
@given(seed=st.integers(0, 1 << 20))
def test_pins_in_between_change_no_victim_and_the_tree_stays_whole(eviction: Eviction, seed: int) -> None:
    requests = paths(random.Random(seed))
    capacity = max(map(len, requests)) + 10
    chooser = random.Random(seed)
    plain, pinned = (PrefixTree(eviction_policy(eviction, capacity, TreePage)) for _ in range(2))
    for request in requests:
        assert ask(plain, request, capacity) == ask(pinned, request, capacity)
        for page in chooser.sample(list(pinned), min(5, len(pinned))):
            pinned.pin(page)
            pinned.unpin(page)
        pinned.check()
        assert {page.key for page in plain} == {page.key for page in pinned}


@pytest.mark.parametrize("eviction", Eviction)
def test_everything_leaves_after_an_eviction_was_undone(eviction: Eviction) -> None:
    tree = PrefixTree(eviction_policy(eviction, 40, TreePage))
    for request in paths(random.Random(3)):
        ask(tree, request[:30], 40)
    held = {page.key for page in tree}
    victims = tree.evict(len(tree))
    for page in reversed(victims):
        tree.restore(page)
    assert {page.key for page in tree} == held
    again = tree.evict(len(tree) + 1)
    assert {page.key for page in again} == held
    assert len(tree) == 0
    ask(tree, [1, 2, 3], 40)
    assert len(tree) == 3


@pytest.mark.parametrize("eviction", [Eviction.S3_FIFO, Eviction.TWO_QUEUES])
def test_pages_that_are_forgotten_count_in_no_queue(eviction: Eviction) -> None:
    chooser = random.Random(7)
    uses = [100 + int(chooser.paretovariate(0.6)) % 60 for _ in range(600)]
    fresh, used = (PrefixTree(eviction_policy(eviction, 24, TreePage)) for _ in range(2))
    for number in range(24):
        ask(used, [number], 24)
    used.take_all()
    assert [ask(used, [page], 24) for page in uses] == [ask(fresh, [page], 24) for page in uses]


@pytest.mark.parametrize("eviction", WATCHING)
def test_a_page_that_is_taken_out_is_no_victim(eviction: Eviction) -> None:
    tree = PrefixTree(eviction_policy(eviction, 10, TreePage))
    first, second = (tree.insert(key(number), None, None, ready=True) for number in (1, 2))
    tree.remove(first)
    assert tree.evict(2) == [second]


def test_the_tails_of_conversations_leave_before_any_page_that_an_answer_needs() -> None:
    tree = PrefixTree(TailLruEviction[TreePage](tail_pages=2))
    ask(tree, [1, 2, 3, 4], 100)
    ask(tree, [5, 6, 7], 100)
    assert [page.key for page in tree.evict(4)] == [key(4), key(3), key(7), key(6)]
    ask(tree, [1, 2], 100)
    assert [page.key for page in tree.evict(3)] == [key(5), key(2), key(1)]


def test_a_conversation_that_grows_lifts_all_that_is_above() -> None:
    tree = PrefixTree(TailLruEviction[TreePage](tail_pages=2))
    ask(tree, [1, 2], 100)
    ask(tree, [1, 2, 3, 4], 100)
    ask(tree, [1, 9], 100)
    ask(tree, [8], 100)
    assert [page.key for page in tree.evict(4)] == [key(4), key(3), key(9), key(8)]


def test_what_was_asked_for_again_outlives_what_was_not_until_its_time_is_over() -> None:
    tree = PrefixTree(SessionEviction[TreePage](lifetime=6))
    ask(tree, [1], 100)
    ask(tree, [1], 100)
    ask(tree, [2], 100)
    ask(tree, [3], 100)
    assert [page.key for page in tree.evict(1)] == [key(2)]
    for page in range(4, 9):
        ask(tree, [page], 100)
    assert [page.key for page in tree.evict(7)] == [key(page) for page in (1, 3, 4, 5, 6, 7, 8)]
    ask(tree, [1], 100)
    ask(tree, [1], 100)
    assert [page.key for page in tree.evict(2)] == [key(1)]


def test_a_policy_that_does_not_watch_hears_of_no_page() -> None:
    class Deaf(LruEviction[TreePage]):
        def came(self, pages: object) -> None:
            raise AssertionError("it was told")

        used = gone = back = came

    policy: EvictionPolicy[TreePage] = Deaf()
    tree = PrefixTree(policy)
    ask(tree, [1, 2], 2)
    ask(tree, [1, 3], 2)
    tree.restore(tree.evict(1)[0])
    tree.remove(tree.match([key(1), key(3)])[-1])
    assert [page.key for page in tree] == [key(1)]


def test_a_queue_names_the_lowest_whatever_comes_goes_and_grows() -> None:
    chooser = random.Random(11)
    queue = LeafQueue[TreePage](by_stamp)
    held: list[TreePage] = []
    for clock in range(1, 5_000):
        step = chooser.random()
        if step < 0.4 or not held:
            page = TreePage(key(clock), None, None, ready=True)
            page.stamp = clock if chooser.random() < 0.5 else chooser.randint(0, clock)
            held.append(page)
            queue.push(page)
        elif step < 0.6:
            chooser.choice(held).stamp += chooser.randint(1, clock)
        elif step < 0.8:
            page = chooser.choice(held)
            held.remove(page)
            queue.discard(page)
        else:
            page = chooser.choice(held)
            queue.discard(page)
            queue.push(page)
            queue.push(page)
        top = queue.top()
        assert (top is None) == (not held)
        assert top is None or top.stamp == min(page.stamp for page in held)
        assert len(queue) == len(held)
        assert queue.entries <= 2 * len(held) + 65
