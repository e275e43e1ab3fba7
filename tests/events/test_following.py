"""Whatever happens in between, a reader that follows the protocol ends with the content; without order it does not."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcr_actors.core.backlog import EventBacklog
from kvcr_actors.core.inventory import InventoryEvent
from kvcr_actors.events import announcer
from kvcr_actors.events.stream import StreamLimits
from kvcr_actors.types import PageKey, Tier
from tests.events.world import STORE, World

STEPS = (
    "store",
    "store",
    "evict",
    "evict_any",
    "clear",
    "kvcr_store",
    "kvcr_evict",
    "send",
    "send",
    "lossy",
    "restart",
    "learn",
    "learn",
)
steps = st.lists(st.tuples(st.sampled_from(STEPS), st.sampled_from(list(Tier)), st.integers(1, 6)), max_size=80)
LIMITS = (
    StreamLimits(snapshot_pause_s=0.0),
    StreamLimits(events=2, blocks=3, buffer_batches=4, snapshot_pause_s=0.0),
    StreamLimits(events=3, blocks=8, buffer_batches=6, backlog_changes=7, snapshot_pause_s=0.0),
    StreamLimits(events=3, blocks=8, buffer_batches=6, backlog_changes=7, snapshot_pause_s=4.0),
)
bounds = st.sampled_from(LIMITS)


def play(world: World, plan: Iterable[tuple[str, Tier, int]]) -> None:
    for step, tier, count in plan:
        match step:
            case "store":
                world.store(tier, count)
            case "evict":
                world.evict(tier, count)
            case "evict_any":
                world.evict(tier, count, leaves=False)
            case "clear":
                world.clear(tier)
            case "kvcr_store":
                world.store(Tier.HOST, count, STORE)
            case "kvcr_evict":
                world.evict(Tier.HOST, count, STORE, leaves=False)
            case "send":
                world.send(count)
            case "lossy":
                world.lose = lambda: world.rng.random() < 0.4
                world.send(count)
                world.lose = lambda: False
            case "restart":
                world.restart()
            case "learn":
                world.learn(count)
    world.settle()
    world.assert_followed()


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 1 << 20), plan=steps, limits=bounds, known=st.booleans())
def test_a_follower_ends_with_the_content(
    seed: int, plan: list[tuple[str, Tier, int]], limits: StreamLimits, *, known: bool
) -> None:
    """Also where what the pages were computed from becomes known only later."""
    play(World(seed, limits=limits, known=known), plan)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("limits", LIMITS)
def test_a_follower_ends_with_the_content_of_long_histories(limits: StreamLimits, *, known: bool) -> None:
    for seed in range(100):
        rng = random.Random(seed)
        # Some go without what makes all easy again, some without what makes any order of removals right.
        left_out = {0: ("clear", "restart"), 1: ("evict_any",), 2: ("clear", "restart", "evict_any")}.get(seed % 4, ())
        steps = [step for step in STEPS if step not in left_out]
        plan = [(rng.choice(steps), rng.choice(list(Tier)), rng.randint(1, 6)) for _ in range(120)]
        play(World(seed, limits=limits, known=known), plan)


def _as_named(pages: Mapping[PageKey, PageKey | None]) -> list[PageKey]:
    return list(pages)


def _as_told(keys: Iterable[PageKey], parents: Mapping[PageKey, PageKey | None]) -> list[PageKey]:
    del parents
    return list(keys)


def _newest_first(backlog: EventBacklog) -> InventoryEvent | None:
    return backlog._queue.pop() if backlog._queue else None


@pytest.mark.parametrize(
    ("owner", "name", "disorder"),
    [
        (announcer, "parents_first", _as_named),
        (announcer, "leaves_first", _as_told),
        (EventBacklog, "take", _newest_first),
    ],
)
def test_without_an_order_a_follower_ends_wrong(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, disorder: object
) -> None:
    monkeypatch.setattr(owner, name, disorder)
    failures = 0
    for seed in range(40):
        try:
            play(World(seed), [("store", Tier.DEVICE, 8), ("store", Tier.DEVICE, 6), ("evict", Tier.DEVICE, 5)] * 3)
        except AssertionError:
            failures += 1
    assert failures > 20
