"""LRU is exact whatever order pages come, go and are touched in, and its heap stays small."""

from __future__ import annotations

import attrs
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcr_actors.core.eviction import EvictionPolicy, LruEviction


@attrs.define(eq=False)
class Page:
    stamp: int


def test_the_least_recent_page_is_named_until_it_is_discarded() -> None:
    policy: EvictionPolicy[Page] = LruEviction[Page]()
    old, new = Page(1), Page(2)
    policy.add(new)
    policy.add(old)
    assert policy.victim() is old
    assert policy.victim() is old
    policy.discard(old)
    assert policy.victim() is new
    policy.discard(new)
    assert policy.victim() is None


def test_a_touched_page_moves_back() -> None:
    policy = LruEviction[Page]()
    first, second = Page(1), Page(2)
    policy.add(first)
    policy.add(second)
    first.stamp = 3
    policy.touch(first)
    assert policy.victim() is second


def test_pages_with_equal_stamps_leave_in_the_order_they_came() -> None:
    policy = LruEviction[Page]()
    first, second = Page(1), Page(1)
    policy.add(first)
    policy.add(second)
    assert policy.victim() is first


def test_pages_that_come_and_go_leave_no_entries_behind() -> None:
    policy = LruEviction[Page]()
    kept = Page(0)
    policy.add(kept)
    for stamp in range(1, 1000):
        page = Page(stamp)
        policy.add(page)
        policy.discard(page)
    assert len(policy) == 1
    assert policy.entries < 70
    assert policy.victim() is kept


class EagerlyCompacting(LruEviction[Page]):
    _SLACK = 4


class LruMachine(RuleBasedStateMachine):
    """Against `min` over the evictable pages."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = EagerlyCompacting()
        self.pages: list[Page] = []
        self.evictable: list[Page] = []
        self.stamp = 0

    @rule()
    def new_page(self) -> None:
        self.stamp += 1
        page = Page(self.stamp)
        self.pages.append(page)
        self.evictable.append(page)
        self.policy.add(page)

    @precondition(lambda self: self.pages)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.pages))
        self.stamp += 1
        page.stamp = self.stamp
        if page in self.evictable:
            self.policy.touch(page)

    @precondition(lambda self: self.pages)
    @rule(data=st.data())
    def pin_or_unpin(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.pages))
        if page in self.evictable:
            self.evictable.remove(page)
            self.policy.discard(page)
        else:
            self.evictable.append(page)
            self.policy.add(page)

    @precondition(lambda self: self.evictable)
    @rule()
    def evict(self) -> None:
        page = self.policy.victim()
        assert page is min(self.evictable, key=lambda p: p.stamp)
        self.policy.discard(page)
        self.evictable.remove(page)

    @invariant()
    def heap_is_bounded(self) -> None:
        assert len(self.policy) == len(self.evictable)
        assert self.policy.entries <= 2 * len(self.evictable) + EagerlyCompacting._SLACK + 1


TestLruMachine = LruMachine.TestCase
TestLruMachine.settings = settings(max_examples=50, stateful_step_count=60, deadline=None)
