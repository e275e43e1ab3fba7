"""No number is given twice, whatever happens between two starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcr_actors.errors import ConfigError
from kvcr_actors.events.sequence import SequenceCounter


def test_numbers_go_on_behind_what_was_promised(tmp_path: Path) -> None:
    path = tmp_path / "sequence"
    first = SequenceCounter(path)
    given = [first.take() for _ in range(70_000)]  # more than one write promises
    assert given == list(range(70_000))
    assert SequenceCounter(path).take() > given[-1]  # as after a crash: nothing was closed


def test_a_start_that_gives_no_number_promises_none(tmp_path: Path) -> None:
    path = tmp_path / "sequence"
    assert SequenceCounter(path).next == 0
    assert not path.exists()


def test_without_a_file_the_clock_moves_the_start_forward() -> None:
    assert SequenceCounter(clock=lambda: 500).take() == 500
    assert SequenceCounter().take() < SequenceCounter().take()


@pytest.mark.parametrize("text", ["", "seven", "-1", "1.5", str(1 << 64), "\N{DIGIT ONE}\N{ARABIC-INDIC DIGIT ONE}"])
def test_a_damaged_file_is_refused_and_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "sequence"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"sequence file .*/sequence"):
        SequenceCounter(path)
    assert path.read_text() == text


def test_a_number_that_cannot_be_promised_is_not_given(tmp_path: Path) -> None:
    counter = SequenceCounter(tmp_path / "nowhere" / "sequence")
    with pytest.raises(FileNotFoundError):
        counter.take()
    (tmp_path / "nowhere").mkdir()
    assert counter.take() == 0
