from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcr_actors.core.rounds import (
    OperationTable,
    Resolution,
    RoundShape,
    first_agreement,
    operation_number,
    step_operation,
)
from kvcr_actors.errors import ConfigError

SHAPE = RoundShape(slots=3, words=2)
PROPOSALS = st.dictionaries(st.integers(1, (1 << 63) - 1), st.integers(0, (1 << 128) - 1), max_size=8)


def test_numbers_are_the_same_in_every_process_and_tell_kinds_types_and_subjects_apart() -> None:
    assert operation_number("backup", 7) == 4690667289690644051
    names = [("backup", 7), ("backup", "7"), ("backup", b"7"), ("prefetch", 7), ("backup", 77)]
    assert len({operation_number(kind, subject) for kind, subject in names}) == len(names)


def test_a_subject_that_prints_differently_in_each_process_is_refused() -> None:
    with pytest.raises(ConfigError, match="str, int or bytes"):
        operation_number("prefetch", object())


@pytest.mark.parametrize(("slots", "words"), [(0, 1), (1, 0)])
def test_an_empty_shape_is_refused(slots: int, words: int) -> None:
    with pytest.raises(ConfigError, match="1 or more"):
        RoundShape(slots, words)


@given(PROPOSALS, st.integers(0, 1000))
def test_a_table_has_one_size_and_carries_as_many_proposals_as_fit(proposals: dict[int, int], turn: int) -> None:
    table = SHAPE.encode(proposals, turn)
    carried = SHAPE.decode(table)
    assert len(table) == SHAPE.table_bytes
    assert len(carried) == min(len(proposals), SHAPE.slots)
    assert carried.items() <= proposals.items()


def test_every_proposal_has_its_turn_within_few_rounds() -> None:
    proposals = {operation_number("prefetch", index): 1 for index in range(40)}
    carried: set[int] = set()
    for turn in range(60):
        carried |= SHAPE.decode(SHAPE.encode(proposals, turn)).keys()
    assert carried == proposals.keys()


def test_bits_above_the_shape_are_lost() -> None:
    assert SHAPE.decode(SHAPE.encode({1: 1 << SHAPE.bits | 5})) == {1: 5}


def test_only_what_stands_in_every_table_is_agreed_and_its_bits_are_intersected() -> None:
    tables = [SHAPE.encode(one) for one in ({1: 0b110, 2: 1}, {1: 0b011, 3: 1}, {1: 0b111})]
    assert SHAPE.resolve(tables) == Resolution({1: 0b010}, others_open=True)
    assert SHAPE.resolve(tables[2:]) == Resolution({1: 0b111}, others_open=False)


def test_a_table_of_another_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match="shapes must be equal"):
        SHAPE.resolve([bytes(8)])


def test_one_name_opened_twice_is_settled_in_order() -> None:
    table = OperationTable(SHAPE)
    first, second = table.open(7, 0b01, 10.0), table.open(7, 0b10, 10.0)
    assert SHAPE.decode(table.encode(0)) == {7: 0b01}
    assert table.settle({7: 0b01}, 0.0) == [(first, 0b01)]
    assert SHAPE.decode(table.encode(1)) == {7: 0b10}
    assert table.settle({7: 0b11}, 0.0) == [(second, 0b11)]
    assert len(table) == 0


def test_what_expires_ends_with_nothing_and_what_is_agreed_in_time_does_not() -> None:
    table = OperationTable(SHAPE)
    agreed, waiting, late = table.open(1, 1, 5.0), table.open(2, 1, 9.0), table.open(3, 1, 5.0)
    behind = table.open(2, 1, 5.0)
    assert table.settle({1: 1, 99: 1}, 5.0) == [(agreed, 1), (behind, 0), (late, 0)]
    assert list(table) == [waiting]
    assert table.clear() == [waiting]
    assert table.clear() == []


def test_only_what_is_still_open_is_dropped() -> None:
    table = OperationTable(SHAPE)
    first, second, third = table.open(1, 1, 9.0), table.open(1, 1, 9.0), table.open(2, 1, 9.0)
    table.settle({1: 1}, 0.0)
    assert table.drop([first, second]) == [second]
    assert table.drop([second]) == []
    assert list(table) == [third]


def test_bits_taken_back_count_from_the_next_round_on_and_every_rank_hears_the_same() -> None:
    table = OperationTable(SHAPE)
    entry = table.open(1, 0b11, 5.0)
    sent = table.encode(0)
    entry.bits = 0
    assert SHAPE.decode(table.encode(1)) == {1: 0}
    assert table.settle(SHAPE.resolve([sent]).agreed, 0.0) == [(entry, 0b11)]


def test_a_step_is_named_by_its_nodes_and_a_search_by_its_first_agreement() -> None:
    assert step_operation([1, 23]) == step_operation(iter((1, 23)))
    assert step_operation([1, 23]) != step_operation([12, 3])
    assert first_agreement("r") == ("prefetch 1", "r")
