"""Clean-up comes to its end whatever raises, each part once, and what was raised is raised."""

from __future__ import annotations

from functools import partial

import pytest

from kvcr_actors.runtime.endings import EndingErrors, run_endings


class Part:
    """Raises the first `failures` times."""

    def __init__(self, name: str, done: list[str], failures: int = 0) -> None:
        self._name, self._done, self._failures = name, done, failures

    def __call__(self) -> None:
        if self._failures:
            self._failures -= 1
            raise OSError(f"{self._name} broke off")
        self._done.append(self._name)


def test_every_ending_runs_in_order_and_one_that_broke_off_runs_again() -> None:
    done: list[str] = []
    with pytest.raises(EndingErrors) as raised:
        run_endings(Part("a", done), Part("b", done, 1), Part("c", done))
    assert done == ["a", "b", "c"]
    assert [str(error) for error in raised.value.exceptions] == ["b broke off"]


def test_one_that_breaks_off_twice_is_left_and_told_twice() -> None:
    done: list[str] = []
    with pytest.raises(EndingErrors) as raised:
        run_endings(Part("a", done, 2), Part("b", done))
    assert done == ["b"]
    assert len(raised.value.exceptions) == 2


def test_an_ending_that_is_made_of_endings_does_not_run_again() -> None:
    done: list[str] = []
    inner = partial(run_endings, Part("a", done, 1), Part("b", done))
    with pytest.raises(EndingErrors) as raised:
        run_endings(inner, Part("c", done))
    assert done == ["a", "b", "c"]
    assert [str(error) for error in raised.value.exceptions] == ["a broke off"]


def test_without_an_error_nothing_is_raised() -> None:
    done: list[str] = []
    run_endings(Part("a", done))
    run_endings()
    assert done == ["a"]
