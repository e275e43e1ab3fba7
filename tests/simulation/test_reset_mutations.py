"""What a reset must forget, planted to be kept: the simulator finds each by the bytes of an older generation."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from kvcr_actors.actors import deposit
from kvcr_actors.actors.state import LoopState
from kvcr_actors.simulation.faults import parse_kinds
from kvcr_actors.simulation.run import run_seed
from kvcr_actors.simulation.world import SimulationOptions
from kvcr_actors.stores.bounded import BoundedBackend

Patch = pytest.MonkeyPatch

OLD_BYTES = re.compile(
    "AssertionError: bytes of generation [0-9]+ (restored for request|in host memory).* after the reset to [0-9]+"
)
"""The rule that each breaks."""


def host_memory_keeps_its_pages(patch: Patch) -> None:
    """The pages of before a reset stand in host memory as if nothing had been."""
    assert callable(LoopState.forget_host)
    patch.setattr(LoopState, "forget_host", lambda self, when_gone: when_gone() or 0)


def a_clear_leaves_the_store(patch: Patch) -> None:
    """The store that a reset is to clear keeps its pages."""
    assert callable(BoundedBackend.clear)
    patch.setattr(BoundedBackend, "clear", lambda self: 0)


def pages_of_before_are_deposited(patch: Patch) -> None:
    """What waited for the old store goes to the one that takes its place."""
    assert isinstance(deposit._Order.is_forgotten, property)
    patch.setattr(deposit._Order, "is_forgotten", property(lambda self: False))


MUTATIONS: dict[Callable[[Patch], None], tuple[str, range]] = {
    host_memory_keeps_its_pages: ("order.reset,order.delay", range(6)),
    a_clear_leaves_the_store: ("order.reset,order.delay", range(6)),
    pages_of_before_are_deposited: ("order.reset,write.reorder,write.stall", range(5, 15)),
}
"""Each planted fault, what else goes wrong, and seeds of which one finds it."""


@pytest.mark.parametrize("plant", MUTATIONS, ids=lambda plant: plant.__name__)
def test_what_a_reset_must_forget_is_found_by_its_bytes(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    kinds, seeds = MUTATIONS[plant]
    options = SimulationOptions(kinds=parse_kinds(kinds))
    before = [run_seed(options, seed).failure for seed in seeds[:2]]
    assert before == [None, None]
    plant(monkeypatch)
    failures = [failure for seed in seeds if (failure := run_seed(options, seed).failure) is not None]
    assert any(OLD_BYTES.match(failure) for failure in failures), failures
