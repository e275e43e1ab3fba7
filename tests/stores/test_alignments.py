"""Alignments that nobody waits for are bounded by what a store's thread has done, and those beyond are counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcr_actors.stores import alignments
from kvcr_actors.stores.alignments import MOST_ALIGNMENTS, Alignments


def admitted(kept: Alignments, count: int, align: Callable[[], None]) -> list[Callable[[], None]]:
    return [run for _ in range(count) if (run := kept.admit(align)) is not None]


def nothing() -> None:
    pass


def test_a_thread_that_hangs_is_given_so_many_and_no_more() -> None:
    kept = Alignments()
    assert len(admitted(kept, 3 * MOST_ALIGNMENTS, nothing)) == MOST_ALIGNMENTS
    assert kept.shed == 2 * MOST_ALIGNMENTS


def test_each_that_is_done_makes_room_for_one() -> None:
    kept, done = Alignments(), list[int]()
    waiting = admitted(kept, MOST_ALIGNMENTS, lambda: done.append(1))
    for run in waiting[:3]:
        run()
    assert len(done) == 3
    assert len(admitted(kept, 10, nothing)) == 3
    assert kept.shed == 7


def test_one_that_fails_makes_room_as_well() -> None:
    def fail() -> None:
        raise OSError("planted")

    kept = Alignments()
    for run in admitted(kept, MOST_ALIGNMENTS, fail):
        with pytest.raises(OSError, match="planted"):
            run()
    assert len(admitted(kept, MOST_ALIGNMENTS, nothing)) == MOST_ALIGNMENTS
    assert kept.shed == 0


def test_without_its_bound_they_grow(monkeypatch: Any) -> None:
    monkeypatch.setattr(alignments, "MOST_ALIGNMENTS", 1 << 30)
    with pytest.raises(AssertionError):
        test_a_thread_that_hangs_is_given_so_many_and_no_more()
