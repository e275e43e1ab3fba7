"""Parents come first and leaves go first, whatever the order in which an engine names them."""

from __future__ import annotations

from kvcr_actors.core.ordering import leaves_first, parents_first

PARENTS = {b"a": None, b"b": b"a", b"c": b"b", b"d": b"b", b"x": b"elsewhere"}


def test_parents_come_first_and_the_rest_keeps_its_place() -> None:
    named = {key: PARENTS[key] for key in (b"x", b"c", b"a", b"d", b"b")}
    assert parents_first(named) == [b"x", b"a", b"b", b"c", b"d"]


def test_what_is_in_order_stays_as_it_is() -> None:
    assert parents_first(PARENTS) == list(PARENTS)
    assert leaves_first([b"d", b"x", b"c", b"b", b"a"], PARENTS) == [b"d", b"x", b"c", b"b", b"a"]


def test_leaves_go_first_and_each_only_once() -> None:
    assert leaves_first([b"a", b"c", b"b", b"c"], PARENTS) == [b"c", b"b", b"a"]


def test_keys_that_nobody_knows_can_go_at_any_time() -> None:
    assert set(leaves_first([b"a", b"?", b"b"], PARENTS)) == {b"a", b"b", b"?"}


def test_a_loop_in_damaged_data_ends() -> None:
    assert sorted(parents_first({b"a": b"b", b"b": b"a"})) == [b"a", b"b"]
