"""A planted fault that is itself wrong is reported as such, and is never what a test was looking for."""

from __future__ import annotations

from typing import Any

import pytest

from kvcr_actors.actors.confirmation import ConfirmationActor
from kvcr_actors.actors.prefetch import PrefetchActor
from kvcr_actors.actors.state import LoopState
from kvcr_actors.transfers import Operation
from tests.actors.test_protections import (
    BACKUP_OPEN,
    a_late_copy_beside_a_prefetch,
    assert_breaks,
    every_await_of_the_confirmation,
)
from tests.planting import MisplantedError, Planter, planted
from tests.simulation.test_mutations import LEFT_OPEN, Found, find


def a_name_that_is_gone(planter: Planter) -> None:
    planter.setattr(ConfirmationActor, "_give_in", lambda *args: None)


def an_attribute_that_is_gone(planter: Planter) -> None:
    """The claims stay open, as with a fault that keeps them, but by an AttributeError of the fault's own."""

    def cancel(actor: PrefetchActor, *args: object) -> None:
        actor._renamed_meanwhile.clear()  # type: ignore[attr-defined]

    planter.setattr(PrefetchActor, "_cancel", cancel)


def an_argument_that_came_new(planter: Planter) -> None:
    planter.setattr(ConfirmationActor, "_give_up", lambda actor: None)


def nothing_that_is_used(planter: Planter) -> None:
    planter.setattr(LoopState, "__repr__", lambda state: "a state")


def another_fault(planter: Planter) -> None:
    planter.setattr(LoopState, "release_when_quiet", lambda state, operation, claim, size: claim.release())


def test_a_mutation_of_a_name_that_is_gone_is_an_error_of_the_mutation() -> None:
    with pytest.raises(MisplantedError, match="a_name_that_is_gone cannot be planted: AttributeError"):
        find(a_name_that_is_gone, Found(LEFT_OPEN))


def test_a_mutation_that_raises_of_itself_is_an_error_of_the_mutation_whatever_breaks() -> None:
    with pytest.raises(MisplantedError, match=r"raised AttributeError: .* no attribute '_renamed_meanwhile'"):
        find(an_attribute_that_is_gone, Found(".*"))


def test_a_protection_that_is_removed_with_a_wrong_signature_is_an_error_of_the_removal() -> None:
    with pytest.raises(MisplantedError, match="raised TypeError: an_argument_that_came_new"):
        assert_breaks(an_argument_that_came_new, every_await_of_the_confirmation, ".*")


def test_a_replacement_that_nothing_calls_is_an_error() -> None:
    with pytest.raises(MisplantedError, match=r"the replacement of LoopState.__repr__ was never called"):
        assert_breaks(nothing_that_is_used, a_late_copy_beside_a_prefetch, ".*")


def test_another_rule_than_the_one_named_is_not_what_was_looked_for() -> None:
    with pytest.raises(AssertionError, match=r"not .*claims left open.*, but .*wrong bytes"):
        assert_breaks(another_fault, a_late_copy_beside_a_prefetch, BACKUP_OPEN)


def test_an_error_of_the_product_under_a_replacement_is_no_error_of_the_replacement() -> None:
    real = Operation.settle
    with planted(
        lambda planter: planter.setattr(Operation, "settle", lambda operation, outcome: real(operation, outcome))
    ) as planter:
        broken: Any = object()
        with pytest.raises(AttributeError):
            Operation.settle(broken, 1)
    planter.check()
