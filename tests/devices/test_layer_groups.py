from __future__ import annotations

import threading

import pytest

from kvcr_actors.devices.layer_groups import GROUP_BYTES, LayerGate, LayerGroups, check_layers, choose_groups
from kvcr_actors.errors import ConfigError, DeadlineError
from kvcr_actors.types import CacheLayout, PoolSpec

MIB = 1 << 20
LAYOUT = CacheLayout((PoolSpec("kv", 16, MIB), PoolSpec("state", 2, 4 * MIB)))
LAYERS = check_layers(LAYOUT, [[layer for layer in range(8) for _ in range(2)], [2, 6]])


@pytest.mark.parametrize("pages", [{0: 1}, {0: 5}, {0: 5, 1: 3}, {0: 40, 1: 1}, {1: 1}, {1: 9}, {1: 40}])
@pytest.mark.parametrize("most", [1, 3, 8, 100])
def test_groups_hold_every_plane_once_and_no_layer_waits_for_too_little(pages: dict[int, int], most: int) -> None:
    groups = choose_groups(LAYOUT, LAYERS, pages, most=most)
    assert 1 <= len(groups.ends) <= most
    assert len(groups.planes) == len(groups.ends)
    assert any(groups.planes[0][pool][1] for pool in pages)
    for pool, spec in enumerate(LAYOUT.pools):
        ranges = [of_group[pool] for of_group in groups.planes]
        assert [plane for first, count in ranges for plane in range(first, first + count)] == list(range(spec.planes))
        for group, (first, count) in enumerate(ranges):
            assert all(groups.group_of(LAYERS[pool][plane]) == group for plane in range(first, first + count))


def test_the_number_of_groups_follows_the_payload() -> None:
    assert len(choose_groups(LAYOUT, LAYERS, {1: 1}).ends) == 1
    assert len(choose_groups(LAYOUT, LAYERS, {0: 2}).ends) == 2 * 16 * MIB // GROUP_BYTES
    assert len(choose_groups(LAYOUT, LAYERS, {0: 1000}).ends) == 8


def test_the_first_group_is_about_its_share() -> None:
    layout = CacheLayout((PoolSpec("kv", 84, MIB),))
    layers = check_layers(layout, [[layer for layer in range(42) for _ in range(2)]])
    first, count = choose_groups(layout, layers, {0: 10}).planes[0][0]
    assert (first, count) == (0, 12)


def test_layers_that_do_not_describe_the_planes_are_refused_by_name() -> None:
    assert check_layers(LAYOUT, None) == ((0,) * 16, (0, 0))
    for wrong in ([[0] * 16], [[0] * 15, [0, 0]], [[0] * 16, [1, 0]], [[0] * 16, [-1, 0]]):
        with pytest.raises(ConfigError, match="layers"):
            check_layers(LAYOUT, wrong)


def test_the_gate_waits_for_every_open_restores_group_and_for_no_other() -> None:
    gate, waited = LayerGate[str](), list[str]()
    first, second, closed = gate.expect(), gate.expect(), gate.expect()
    gate.launched(first, LayerGroups((), (2, 8)), ["a0", "a1"])
    gate.launched(second, LayerGroups((), (8,)), ["b0"])
    gate.launched(closed, LayerGroups((), (8,)), ["c0"])
    gate.close(closed)
    gate.wait_layer(1, waited.append, 1)
    gate.wait_layer(2, waited.append, 1)
    gate.wait_layer(99, waited.append, 1)
    assert waited == ["a0", "b0", "a1", "b0", "a1", "b0"]


def test_a_restore_that_is_not_launched_holds_the_caller_until_its_deadline() -> None:
    gate = LayerGate[str]()
    gate.expect()
    with pytest.raises(DeadlineError, match="layer 3"):
        gate.wait_layer(3, lambda _: None, 0.01)


@pytest.mark.parametrize("fails", [False, True])
def test_a_caller_goes_on_when_the_restore_is_launched_or_has_failed(fails: bool) -> None:
    gate, waited = LayerGate[str](), list[str]()
    restore = gate.expect()
    caller = threading.Thread(target=gate.wait_layer, args=(0, waited.append, 30))
    caller.start()
    if fails:
        gate.close(restore)
    else:
        gate.launched(restore, LayerGroups((), (1,)), ["a0"])
    caller.join(30)
    assert not caller.is_alive()
    assert waited == ([] if fails else ["a0"])
