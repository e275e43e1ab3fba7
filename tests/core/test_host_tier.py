"""Host memory holds whole pages, gives every slot back once, and tells every change in order."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcr_actors.core.arena import SlotArena
from kvcr_actors.core.eviction import LruEviction
from kvcr_actors.core.host_page import first_not_ready
from kvcr_actors.core.host_tier import HostPage, HostTier, NewPath, PagesFreed, PagesRemoved, PagesStored, PageState
from kvcr_actors.core.inventory import BlocksRemoved, BlocksStored, InventoryIndex
from kvcr_actors.errors import NoHostMemoryError
from kvcr_actors.types import NO_SLOT, CacheLayout, PageKey, PoolSpec, Tier, TrailingPages

KV = PoolSpec("kv", 2, 64)
ONE_POOL = CacheLayout((KV,))
TWO_POOLS = CacheLayout((KV, PoolSpec("swa", 2, 32, TrailingPages(1))))


def names(text: str) -> tuple[PageKey, ...]:
    return tuple(letter.encode() for letter in text)


def ready(tier: HostTier, text: str, parent: HostPage | None = None) -> list[HostPage]:
    """A committed path of one-letter keys."""
    pages = tier.reserve(parent, names(text))
    assert tier.commit(pages) == pages
    return pages


def path(text: str, parent: HostPage | None = None) -> NewPath:
    """A path of one-letter keys that is to be reserved, with a component in each of two pools."""
    return NewPath(parent, names(text), [3] * len(text))


def state_of(tier: HostTier) -> tuple:
    """All that a refused call must leave as it was."""
    tier.check()
    return (
        tier.contents(),
        tier.free_pages,
        tier.filling_pages,
        {page.key: (page.state, page.slots, page.pins, page.children) for page in tier._tree},
        [(arena.free_slots, arena.largest_run) for arena in tier._slots.arenas],
    )


def test_pages_go_from_filling_to_ready_to_gone() -> None:
    tier = HostTier(TWO_POOLS, 4)
    pages = tier.reserve(None, names("ab"))
    assert [page.state for page in pages] == [PageState.FILLING] * 2
    assert [page.slots for page in pages] == [(0, 0), (1, 1)]
    assert (tier.free_pages, tier.filling_pages, tier.ready_pages, tier.capacity) == (2, 2, 0, 4)
    assert tier.match(names("ab")) == []
    assert tier.get(b"a") is pages[0]
    tier.commit(pages)
    assert tier.match(names("abz")) == pages
    assert (tier.filling_pages, tier.ready_pages) == (0, 2)
    assert tier.evict(5) == 2
    assert [page.state for page in pages] == [PageState.GONE] * 2
    assert (tier.free_pages, tier.get(b"a")) == (4, None)
    assert "gone" in repr(pages[0])
    tier.check()


def test_one_call_takes_one_run_a_pool_so_that_copies_merge() -> None:
    tier = HostTier(TWO_POOLS, 16)
    ready(tier, "abcdef")
    tier.evict(2)
    pages = tier.reserve(None, names("uvwxyz"))
    assert [page.slots[0] for page in pages] == list(range(pages[0].slots[0], pages[0].slots[0] + 6))


def test_a_pool_that_keeps_nothing_for_a_page_gives_no_slot() -> None:
    tier = HostTier(TWO_POOLS, 4)
    pages = tier.reserve(None, names("abcd"), [1, 3, 0, 2])
    assert [page.slots for page in pages] == [(0, NO_SLOT), (1, 0), (NO_SLOT, NO_SLOT), (NO_SLOT, 1)]
    assert [page.mask for page in pages] == [1, 3, 0, 2]
    tier.check()
    tier.abandon(pages)
    tier.check()
    assert tier.free_pages == 4


def test_pages_without_components_are_bounded_too() -> None:
    tier = HostTier(ONE_POOL, 2)
    tier.commit(tier.reserve(None, names("ab"), [0, 0]))
    tier.commit(tier.reserve(None, names("c"), [0]))
    assert len(tier.contents()) == 2
    tier.check()


@pytest.mark.parametrize(("free", "needed"), [(3, 2), (3, 3), (3, 4), (3, 5), (0, 2)])
def test_scenario_41_no_more_is_evicted_than_is_needed(free: int, needed: int) -> None:
    tier = HostTier(ONE_POOL, 8)
    ready(tier, "abcdefgh"[: 8 - free])
    before = tier.ready_pages
    tier.reserve(None, names("uvwxyz"[:needed]))
    assert before - tier.ready_pages == max(0, needed - free)
    tier.check()


def test_the_least_recent_leaves_go_first() -> None:
    tier = HostTier(ONE_POOL, 4)
    old = ready(tier, "ab")
    ready(tier, "xy")
    tier.touch(old)
    tier.reserve(None, names("n"))
    assert tier.contents() == {b"a", b"b", b"x"}


def test_the_parent_of_a_reservation_and_all_above_it_stay() -> None:
    tier = HostTier(ONE_POOL, 4)
    path = ready(tier, "ab")
    ready(tier, "xy")
    tier.reserve(path[1], names("cd"))
    assert tier.contents() == {b"a", b"b"}
    assert path[1].pins == 0


def test_a_reservation_that_cannot_fit_changes_nothing() -> None:
    tier = HostTier(TWO_POOLS, 6)
    path = ready(tier, "ab")
    ready(tier, "wxy")
    tier.pin(path[1])
    tier.take_changes()
    before = state_of(tier)
    for parent, keys in [(None, "klmno"), (None, "klmnopqrs"), (path[1], "klmno")]:
        with pytest.raises(NoHostMemoryError, match="are free, and eviction"):
            tier.reserve(parent, names(keys))
        assert state_of(tier) == before
    assert tier.take_changes() == []
    tier.reserve(path[1], names("klmn"))
    assert tier.contents() == {b"a", b"b"}
    tier.check()


def test_paths_are_reserved_together_or_not_at_all() -> None:
    tier = HostTier(TWO_POOLS, 6)
    (a,) = ready(tier, "a")
    (b,) = ready(tier, "b")
    ready(tier, "wxyz")
    before = state_of(tier)
    with pytest.raises(NoHostMemoryError):
        tier.reserve_all([path("kl", a), path("mno", b)])
    assert state_of(tier) == before
    below_a, below_b, root = tier.reserve_all([path("kl", a), path("m", b), NewPath(None, names("n"), [1])])
    assert [page.parent for page in (*below_a, *below_b, *root)] == [a, below_a[0], b, None]
    assert [page.slots for page in (*below_a, *below_b)] == [(2, 2), (3, 3), (4, 4)]
    assert (root[0].slots, root[0].mask) == ((5, NO_SLOT), 1)
    # The parents are the oldest pages, and stay: only what is not needed for these paths left.
    assert tier.contents() == {b"a", b"b"}
    tier.check()


@given(capacity=st.integers(1, 12), sizes=st.lists(st.integers(0, 4), max_size=5), masks=st.randoms())
@settings(max_examples=150, deadline=None)
def test_paths_together_evict_what_they_would_one_by_one(capacity: int, sizes: list[int], masks: Random) -> None:
    def filled() -> HostTier:
        tier = HostTier(TWO_POOLS, capacity)
        for number in range(capacity):
            tier.commit(tier.reserve(None, [bytes([number])], [1 + number % 3]))
        return tier

    new = [
        NewPath(None, [bytes([100 + at, number]) for number in range(size)], masks.choices(range(4), k=size))
        for at, size in enumerate(sizes)
    ]
    together, alone = filled(), filled()
    try:
        for one in new:
            alone.reserve(one.parent, one.keys, one.masks)
    except NoHostMemoryError:
        with pytest.raises(NoHostMemoryError):
            together.reserve_all(new)
        assert together.contents() == filled().contents()
        return
    together.reserve_all(new)
    assert together.contents() == alone.contents()
    together.check()


def test_the_order_of_eviction_survives_a_refused_reservation() -> None:
    tier = HostTier(ONE_POOL, 5)
    ready(tier, "ab")
    ready(tier, "xy")
    (pinned,) = ready(tier, "p")
    tier.pin(pinned)
    with pytest.raises(NoHostMemoryError):
        tier.reserve(None, names("klmno"))
    tier.take_changes()
    tier.evict(4)
    assert tier.take_changes()[0] == PagesRemoved(names("bayx"))


def test_pages_that_are_filling_are_not_taken_for_others() -> None:
    tier = HostTier(ONE_POOL, 2)
    tier.reserve(None, names("ab"))
    with pytest.raises(NoHostMemoryError, match="2 of 2 pages are filling"):
        tier.reserve(None, names("c"))


def test_a_page_that_was_cut_off_ends_the_run_of_absent_keys() -> None:
    tier = HostTier(ONE_POOL, 4)
    head, _ = tier.reserve(None, names("ab"))
    assert tier.absent_run(names("xyz")) == 3
    tier.abandon([head])
    assert tier.absent_run(names("ab")) == 1


def test_a_child_whose_parent_is_not_ready_is_not_committed() -> None:
    tier = HostTier(ONE_POOL, 4)
    parent = tier.reserve(None, names("a"))
    child = tier.reserve(parent[0], names("b"))
    assert tier.commit(child) == []
    tier.abandon(parent)
    assert parent[0].state is PageState.GONE
    assert tier.commit(child) == []
    tier.check()
    again = ready(tier, "a")
    assert again[0] is not parent[0]
    assert tier.commit(child) == []
    tier.abandon(child)
    tier.check()
    assert tier.contents() == {b"a"}
    assert tier.free_pages == 3


def test_a_path_commits_as_far_as_its_filled_pages_reach() -> None:
    tier = HostTier(ONE_POOL, 4)
    a, b, c = tier.reserve(None, names("abc"))
    assert tier.commit([a, c]) == [a]
    assert tier.commit([b]) == [b]
    assert tier.commit([c]) == [c]


def test_stored_is_told_parents_first_and_removed_leaves_first() -> None:
    tier = HostTier(TWO_POOLS, 4)
    path = ready(tier, "ab")
    ready(tier, "c", path[1])
    tier.evict(1)
    tier.evict(1)
    ready(tier, "z")
    assert tier.take_changes() == [
        PagesStored(names("abc"), (None, b"a", b"b")),
        PagesRemoved(names("cb")),
        PagesStored(names("z"), (None,)),
        PagesFreed(((2, 1), (2, 1))),
    ]
    assert tier.take_changes() == []


def test_an_abandoned_page_frees_its_slots_and_is_never_told() -> None:
    tier = HostTier(TWO_POOLS, 4)
    tier.abandon(tier.reserve(None, names("ab"), [3, 1]))
    assert tier.commit([]) == []
    assert tier.evict(3) == 0
    assert tier.take_changes() == [PagesFreed(((0, 1), (0,)))]


def test_clear_leaves_only_what_is_claimed_or_filling() -> None:
    tier = HostTier(ONE_POOL, 8)
    path = ready(tier, "abc")
    ready(tier, "xy")
    filling = tier.reserve(path[0], names("f"))
    tier.pin(path[1])
    assert tier.clear() == 3
    assert tier.contents() == {b"a", b"b"}
    tier.unpin(path[1])
    tier.abandon(filling)
    assert tier.clear() == 2
    assert (tier.free_pages, tier.ready_pages) == (8, 0)
    tier.check()


def test_misuse_is_refused_before_any_change() -> None:
    tier = HostTier(TWO_POOLS, 8)
    (a,) = ready(tier, "a")
    b, c = tier.reserve(a, names("bc"))
    (gone,) = tier.reserve(None, names("g"))
    tier.abandon([gone])
    tier.pin(c)
    before = state_of(tier)
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: tier.reserve(gone, names("n")), "is gone"),
        (lambda: tier.reserve(None, names("na")), "61 is held already"),
        (lambda: tier.reserve(None, names("nc")), "63 is held already"),
        (lambda: tier.reserve(None, names("nn")), "name a key twice"),
        (lambda: tier.reserve_all([path("n"), path("kn")]), "name a key twice"),
        (lambda: tier.reserve_all([path("n"), path("k", gone)]), "is gone"),
        (lambda: tier.reserve(None, names("n"), [1, 1]), "2 masks for 1 keys"),
        (lambda: tier.reserve(None, names("n"), [4]), "a pool that does not exist"),
        (lambda: tier.commit([b, a]), "is not filling"),
        (lambda: tier.commit([b, b]), "a page is named twice"),
        (lambda: tier.abandon([b, gone]), "is not filling"),
        (lambda: tier.abandon([b, b]), "a page is named twice"),
        (lambda: tier.abandon([b, c]), "1 pins"),
        (lambda: tier.unpin(b), "no pin"),
    ]
    for call, words in refused:
        with pytest.raises(ValueError, match=words):
            call()
        assert state_of(tier) == before


def test_a_policy_of_ones_own_chooses_the_victims() -> None:
    class MostRecent(LruEviction[HostPage]):
        def victim(self) -> HostPage | None:
            return max(self._evictable, key=lambda page: page.stamp, default=None)

    tier = HostTier(ONE_POOL, 3, MostRecent())
    ready(tier, "a")
    ready(tier, "b")
    tier.evict(1)
    assert tier.contents() == {b"a"}


def test_the_invariant_checker_sees_damage() -> None:
    def damaged(harm: Callable[[HostTier, HostPage], object]) -> HostTier:
        tier = HostTier(ONE_POOL, 4)
        harm(tier, ready(tier, "ab")[0])
        return tier

    for harm, words in [
        (lambda tier, page: setattr(tier, "_ready", 1), "1 pages count as ready"),
        (lambda tier, page: setattr(page, "state", PageState.FILLING), "its state or its mask"),
        (lambda tier, page: setattr(page, "mask", 0), "its state or its mask"),
        (lambda tier, page: setattr(page, "slots", (1,)), "pool 0"),
        (lambda tier, page: tier._slots.arenas[0].free(0, 1), "pool 0: 2 slots in pages, 3 free"),
    ]:
        with pytest.raises(AssertionError, match=words):
            damaged(harm).check()


def test_an_arena_that_breaks_its_word_is_noticed() -> None:
    class Broken(SlotArena):
        def allocate(self, count: int) -> list[range] | None:
            return None

    tier = HostTier(ONE_POOL, 4)
    tier._slots.arenas = (Broken(4),)
    with pytest.raises(AssertionError, match="lacks the room"):
        tier.reserve(None, names("a"))


@given(
    requests=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), max_size=40),
    capacity=st.integers(1, 12),
)
@settings(max_examples=150, deadline=None)
def test_the_sequential_replay_hits_what_an_lru_over_blocks_hits(requests: list[list[int]], capacity: int) -> None:
    tier = HostTier(ONE_POOL, capacity)
    resident: list[tuple[int, ...]] = []
    for request in requests:
        path = [tuple(request[: end + 1]) for end in range(len(request))]
        expected = next((i for i, block in enumerate(path) if block not in resident), len(path))
        resident = [block for block in resident if block not in path] + path[::-1]
        resident = resident[-capacity:]

        keys = [bytes(block) for block in path]
        found = tier.match(keys)
        assert len(found) == expected
        tier.touch(found)
        rest = keys[len(found) : capacity]
        new = tier.commit(tier.reserve(found[-1] if found else None, rest))
        tier.touch([*found, *new])
        assert tier.contents() == {bytes(block) for block in resident}


class HostTierMachine(RuleBasedStateMachine):
    """Any order of calls keeps every slot counted, and the events rebuild the content."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = HostTier(TWO_POOLS, 10)
        self.index = InventoryIndex()
        self.filling: list[HostPage] = []
        self.ready: list[HostPage] = []
        self.pinned: list[HostPage] = []
        self.freed = [0, 0]
        self.taken = [0, 0]
        self.names = 0

    def _keys(self, count: int) -> list[PageKey]:
        self.names += count
        return [name.to_bytes(4, "big") for name in range(self.names - count, self.names)]

    @rule(data=st.data(), counts=st.lists(st.integers(0, 11), max_size=3))
    def reserve(self, data: st.DataObject, counts: list[int]) -> None:
        parents = [page for page in (*self.filling, *self.ready) if page.state is not PageState.GONE]
        paths = [
            NewPath(
                data.draw(st.none() | st.sampled_from(parents)) if parents else None,
                self._keys(count),
                data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)),
            )
            for count in counts
        ]
        before, ready = state_of(self.tier), self.tier.ready_pages
        free = self.tier.free_pages
        try:
            reserved = self.tier.reserve_all(paths)
        except NoHostMemoryError:
            assert state_of(self.tier) == before
            return
        assert self.tier.ready_pages >= ready - max(0, sum(counts) - free)
        assert [[page.key for page in pages] for pages in reserved] == [list(one.keys) for one in paths]
        pages = [page for pages in reserved for page in pages]
        for page in pages:
            for pool in range(2):
                self.taken[pool] += page.slots[pool] != NO_SLOT
        self.filling.extend(pages)

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, len(self.filling)))
        pages = self.filling[:count]
        done = self.tier.commit(pages)
        for page in pages:
            above = page.parent
            assert (page in done) == (above is None or above.state is PageState.READY)
        self.filling = [page for page in self.filling if page not in done]
        self.ready.extend(done)

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        page = self.filling.pop(data.draw(st.integers(0, len(self.filling) - 1)))
        self.tier.abandon([page])

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.ready))
        if page.state is PageState.READY:
            self.tier.touch([page])

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.ready))
        if page.state is PageState.READY:
            self.tier.pin(page)
            self.pinned.append(page)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.tier.unpin(self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1))))

    @rule(count=st.integers(0, 3))
    def evict(self, count: int) -> None:
        before = self.tier.ready_pages
        assert self.tier.evict(count) == before - self.tier.ready_pages <= count

    @rule()
    def take_changes(self) -> None:
        for change in self.tier.take_changes():
            match change:
                case PagesStored(keys, parents):
                    for key, parent in zip(keys, parents, strict=True):
                        assert parent is None or parent in self.index.keys(Tier.HOST) | set(keys)
                        self.index.apply(BlocksStored(Tier.HOST, (key,), (parent,)))
                case PagesRemoved(keys):
                    self.index.apply(BlocksRemoved(Tier.HOST, keys))
                case PagesFreed(slots):
                    for pool in range(2):
                        self.freed[pool] += len(slots[pool])
        assert self.index.keys(Tier.HOST) == self.tier.contents()
        assert self.index.anomalies == 0
        used = [arena.slots - arena.free_slots for arena in self.tier._slots.arenas]
        assert used == [taken - freed for taken, freed in zip(self.taken, self.freed, strict=True)]

    @invariant()
    def claims_hold_and_slots_add_up(self) -> None:
        self.tier.check()
        assert all(page.state is PageState.READY for page in self.pinned)
        assert self.tier.filling_pages == len(self.filling)

    def teardown(self) -> None:
        for page in self.pinned:
            self.tier.unpin(page)
        self.tier.abandon(self.filling)
        self.tier.clear()
        assert self.tier.free_pages == self.tier.capacity
        self.tier.check()


TestHostTierMachine = HostTierMachine.TestCase
TestHostTierMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_first_page_that_is_not_ready_is_the_one_nearest_to_the_root() -> None:
    tier = HostTier(ONE_POOL, 8)
    (root,) = ready(tier, "a")
    filling = tier.reserve(root, names("bcd"))
    assert [first_not_ready(page) for page in filling] == [filling[0]] * 3
    (alone,) = tier.reserve(None, names("e"))
    assert first_not_ready(alone) is alone
