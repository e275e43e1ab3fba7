"""Slots are handed out once, in as few runs as can be, at a cost that the number of slots does not change."""

from __future__ import annotations

import gc
import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcr_actors.core.arena import SizeIndex, SlotArena


def test_a_fresh_arena_gives_one_run_from_slot_zero() -> None:
    arena = SlotArena(10)
    assert arena.allocate(4) == [range(4)]
    assert arena.allocate(6) == [range(4, 10)]
    assert (arena.free_slots, arena.largest_run, arena.runs) == (0, 0, 0)


def test_asking_for_more_than_is_free_changes_nothing() -> None:
    arena = SlotArena(10)
    arena.allocate(3)
    assert arena.allocate(8) is None
    assert (arena.free_slots, arena.largest_run) == (7, 7)
    arena.check()


def test_the_smallest_run_that_fits_is_used() -> None:
    arena = fragmented([3, 5, 4])
    assert arena.allocate(4) == [range(10, 14)]


def test_without_a_run_that_fits_the_largest_go_first() -> None:
    arena = fragmented([2, 6, 3, 4])
    runs = arena.allocate(11)
    assert runs is not None
    assert [len(run) for run in runs] == [6, 4, 1]
    assert len(set().union(*runs)) == 11
    arena.check()


def test_neighbours_coalesce_on_both_sides() -> None:
    arena = SlotArena(9)
    arena.allocate(9)
    arena.free(0, 3)
    arena.free(6, 3)
    assert (arena.runs, arena.largest_run) == (2, 3)
    arena.free(3, 3)
    assert (arena.runs, arena.largest_run) == (1, 9)


def test_a_run_can_come_back_in_parts_and_two_runs_in_one() -> None:
    arena = SlotArena(8)
    arena.allocate(4)
    arena.allocate(4)
    arena.free(2, 4)
    arena.check()
    assert (arena.free_slots, arena.largest_run) == (4, 4)


@pytest.mark.parametrize(
    ("start", "count", "words"),
    [
        (2, 1, "slot 2 is free already"),
        (0, 3, "slot 2 is free already"),
        (-1, 2, "not of this arena"),
        (7, 2, "not of this arena"),
        (0, 0, "not of this arena"),
    ],
)
def test_a_double_or_foreign_free_changes_nothing(start: int, count: int, words: str) -> None:
    arena = SlotArena(8)
    arena.allocate(8)
    arena.free(2, 2)
    with pytest.raises(ValueError, match=words):
        arena.free(start, count)
    assert (arena.free_slots, arena.runs) == (2, 1)
    arena.check()


def test_negative_sizes_are_refused_and_nothing_is_a_legal_size() -> None:
    with pytest.raises(ValueError, match="cannot have -1 slots"):
        SlotArena(-1)
    with pytest.raises(ValueError, match="-1 slots"):
        SlotArena(1).allocate(-1)
    empty = SlotArena(0)
    assert empty.allocate(0) == []
    assert empty.allocate(1) is None
    assert empty.largest_run == 0


def test_the_invariant_checker_sees_damage() -> None:
    arena = SlotArena(8)
    arena.allocate(2)
    arena.free_slots += 1
    with pytest.raises(AssertionError, match="are not the slots"):
        arena.check()
    arena.free_slots -= 1
    del arena._by_size[6][2]
    with pytest.raises(AssertionError, match="not indexed"):
        arena.check()
    arena._by_size[6][2] = None
    arena._add_run(0, 2)
    with pytest.raises(AssertionError, match="meet at slot 2"):
        arena.check()


def fragmented(sizes: list[int]) -> SlotArena:
    """An arena whose free runs have these sizes, in order, with one used slot after each."""
    arena = SlotArena(sum(sizes) + len(sizes))
    arena.allocate(arena.slots)
    start = 0
    for size in sizes:
        arena.free(start, size)
        start += size + 1
    return arena


def lines_run(call: Any) -> int:
    """How many lines of Python a call executes: work without a clock."""
    lines = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    gc.disable()  # a collection runs callbacks of others, line by line
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return lines


@pytest.mark.parametrize("stride", [2, 1000])
def test_scenario_47_freeing_and_taking_a_slot_is_constant_work_in_a_million_slots(stride: int) -> None:
    def work(slots: int) -> tuple[int, int, int]:
        arena = SlotArena(slots)
        arena.allocate(slots)
        for slot in range(0, slots - stride, stride):
            arena.free(slot, 1)
        middle = slots // 2 + 1
        free = lines_run(lambda: arena.free(middle, 1))
        take = lines_run(lambda: arena.allocate(1))
        several = lines_run(lambda: arena.allocate(3))
        return free, take, several

    small, large = work(4_000), work(1_000_000)
    assert all(big <= little + 8 for little, big in zip(small, large, strict=True)), (small, large)
    assert max(large) < 150


@given(
    bound=st.sampled_from([1, 255, 256, 70_000, 1 << 24]),
    data=st.data(),
)
@settings(max_examples=80, deadline=None)
def test_the_size_index_equals_a_sorted_set(bound: int, data: st.DataObject) -> None:
    index, model = SizeIndex(bound), set[int]()
    sizes = st.integers(1, bound) | st.integers(1, min(bound, 600))
    for size in data.draw(st.lists(sizes, max_size=40)):
        if size in model:
            index.remove(size)
            model.remove(size)
        else:
            index.add(size)
            model.add(size)
        asked = data.draw(sizes)
        assert index.at_least(asked) == min((s for s in model if s >= asked), default=None)
        assert index.largest() == max(model, default=0)


class ArenaMachine(RuleBasedStateMachine):
    """Against a plain set of free slots."""

    SLOTS = 600

    def __init__(self) -> None:
        super().__init__()
        self.arena = SlotArena(self.SLOTS)
        self.free = set(range(self.SLOTS))
        self.held: list[range] = []

    def _runs(self) -> list[int]:
        runs, length = [], 0
        for slot in range(self.SLOTS + 1):
            if slot in self.free:
                length += 1
            elif length:
                runs.append(length)
                length = 0
        return sorted(runs, reverse=True)

    @rule(count=st.integers(0, 40) | st.integers(0, SLOTS + 1))
    def allocate(self, count: int) -> None:
        before = self._runs()
        taken = self.arena.allocate(count)
        if count > len(self.free):
            assert taken is None
            return
        assert taken is not None
        fewest = next((n for n in range(len(before) + 1) if sum(before[:n]) >= count), None)
        assert len(taken) == fewest
        slots = [slot for run in taken for slot in run]
        assert len(slots) == count
        assert self.free.issuperset(slots)
        self.free.difference_update(slots)
        self.held.extend(taken)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free_part(self, data: st.DataObject) -> None:
        run = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        first = data.draw(st.integers(run.start, run.stop - 1))
        stop = data.draw(st.integers(first + 1, run.stop))
        self.arena.free(first, stop - first)
        self.free.update(range(first, stop))
        self.held.extend(rest for rest in (range(run.start, first), range(stop, run.stop)) if rest)

    @rule(start=st.integers(-2, SLOTS), count=st.integers(0, 5))
    def free_what_is_not_held(self, start: int, count: int) -> None:
        owned = count > 0 and all(0 <= s < self.SLOTS and s not in self.free for s in range(start, start + count))
        if not owned:
            with pytest.raises(ValueError):
                self.arena.free(start, count)

    @invariant()
    def matches_the_model(self) -> None:
        runs = self._runs()
        assert self.arena.free_slots == len(self.free)
        assert self.arena.largest_run == max(runs, default=0)
        assert self.arena.runs == len(runs)
        self.arena.check()


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
