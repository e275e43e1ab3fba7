"""What waits for a slow sink is bounded, and the index of what has left it is always what the events say."""

from __future__ import annotations

import random

import pytest

from kvcr_actors.core.backlog import EventBacklog, _NetChange, weight
from kvcr_actors.core.inventory import (
    BlocksRemoved,
    BlocksStored,
    InventoryEvent,
    InventoryIndex,
    Ownership,
    TierCleared,
)
from kvcr_actors.types import Tier


def stored(*keys: bytes, tier: Tier = Tier.HOST) -> BlocksStored:
    return BlocksStored(tier, keys, (None,) * len(keys))


def removed(*keys: bytes, tier: Tier = Tier.HOST) -> BlocksRemoved:
    return BlocksRemoved(tier, keys)


def drain(backlog: EventBacklog) -> list[InventoryEvent]:
    events: list[InventoryEvent] = []
    while (event := backlog.take()) is not None:
        backlog.index.apply(event)
        events.append(event)
    return events


def test_events_leave_one_by_one_in_order_below_the_limit() -> None:
    backlog = EventBacklog(10)
    events = [stored(b"a", b"b"), removed(b"b"), stored(b"b"), TierCleared(Tier.HOST)]
    backlog.push(events)
    assert len(backlog) == 5
    assert drain(backlog) == events
    assert (len(backlog), backlog.coalesced, backlog.dropped, backlog.has_gap) == (0, 0, 0, False)


def test_gaps_count_the_events_that_were_dropped_of_each_holding_until_they_are_taken() -> None:
    backlog = EventBacklog(2)
    events = [stored(b"a"), stored(b"b", tier=Tier.STORE), removed(b"a"), stored(b"c"), stored(b"d")]
    backlog.push(events, coalesce=False)
    assert backlog.has_gap
    assert backlog.take_gaps() == {(Tier.HOST, Ownership.ENGINE): 2, (Tier.STORE, Ownership.ENGINE): 1}
    assert not backlog.has_gap
    assert not backlog.take_gaps()
    assert backlog.index.keys(Tier.STORE) == {b"b"}


def test_past_the_limit_changes_of_one_key_become_one() -> None:
    backlog = EventBacklog(4)
    backlog.push([stored(b"a", b"b"), removed(b"b"), stored(b"c")])
    backlog.push([stored(b"b"), removed(b"c")])
    assert drain(backlog) == [stored(b"a", b"b")]
    assert (backlog.coalesced, backlog.has_gap) == (4, False)


def test_what_was_held_before_and_after_is_not_told() -> None:
    backlog = EventBacklog(3)
    backlog.push([stored(b"a")])
    drain(backlog)
    backlog.push([removed(b"a"), stored(b"a"), stored(b"b"), removed(b"b")])
    assert drain(backlog) == []
    backlog.push([removed(b"a"), stored(b"a"), removed(b"a"), stored(b"b")])
    assert drain(backlog) == [removed(b"a"), stored(b"b")]


def test_a_clear_makes_what_came_before_it_moot() -> None:
    backlog = EventBacklog(3)
    backlog.push([stored(b"a"), stored(b"x", tier=Tier.STORE), TierCleared(Tier.HOST), stored(b"b")])
    assert drain(backlog) == [TierCleared(Tier.HOST), stored(b"b"), stored(b"x", tier=Tier.STORE)]


def test_the_oldest_are_dropped_last_of_all_and_the_index_still_knows_them() -> None:
    backlog = EventBacklog(2)
    backlog.push([stored(b"a"), stored(b"b", tier=Tier.STORE), stored(b"c", tier=Tier.DEVICE)])
    assert backlog.has_gap
    assert backlog.dropped == 1
    assert len(drain(backlog)) == 2
    assert [len(backlog.index.keys(tier)) for tier in Tier] == [1, 1, 1]


def test_without_coalescing_only_the_oldest_go() -> None:
    backlog = EventBacklog(2)
    backlog.push([stored(b"a"), removed(b"a"), stored(b"b")], coalesce=False)
    assert drain(backlog) == [removed(b"a"), stored(b"b")]
    assert (backlog.coalesced, backlog.dropped, backlog.has_gap) == (0, 1, True)


def test_a_full_queue_is_not_coalesced_anew_for_every_change(monkeypatch: pytest.MonkeyPatch) -> None:
    backlog, looks = EventBacklog(1_000), 0
    add = _NetChange.add

    def count(net: _NetChange, event: InventoryEvent) -> None:
        nonlocal looks
        looks += 1
        add(net, event)

    monkeypatch.setattr(_NetChange, "add", count)
    monkeypatch.setattr("kvcr_actors.core.backlog._PART_KEYS", 1)
    tiers = list(Tier)
    for number in range(4_000):
        backlog.push([stored(number.to_bytes(2, "big"), tier=tiers[number % 3])])
    assert backlog.coalesced == 0
    assert 1_000 < looks < 20_000


def test_coalesced_changes_are_dropped_and_told_in_parts() -> None:
    backlog = EventBacklog(10_000)
    for number in range(10_001):
        backlog.push([stored(number.to_bytes(2, "big"))])
    assert (len(backlog), backlog.dropped) == (10_001 - 4_096, 4_096)


def test_what_is_stored_twice_and_removed_once_is_gone() -> None:
    backlog = EventBacklog(3)
    backlog.push([stored(b"a")])
    drain(backlog)
    backlog.push([stored(b"a"), removed(b"a"), stored(b"b"), removed(b"b")])
    assert drain(backlog) == [removed(b"a")]


def test_any_history_ends_in_the_same_index() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        backlog, truth = EventBacklog(rng.choice([3, 8, 1000])), InventoryIndex()
        held: dict[tuple[Tier, Ownership], set[bytes]] = {(tier, owner): set() for tier in Tier for owner in Ownership}
        for _ in range(60):
            tier, owner = holding = rng.choice(list(held))
            keys = [bytes([number]) for number in rng.sample(range(12), 3)]
            new = tuple(key for key in keys if key not in held[holding])
            old = tuple(key for key in keys if key in held[holding])
            events: list[InventoryEvent] = [BlocksStored(tier, new, (None,) * len(new), owner)] if new else []
            events += [BlocksRemoved(tier, old, owner)] if old else []
            held[holding] = (held[holding] | set(new)) - set(old)
            if rng.random() < 0.05:
                held[holding].clear()
                events.append(TierCleared(tier, owner))
            truth.publish(events)
            backlog.push(events, coalesce=rng.random() < 0.8)
            if rng.random() < 0.3:
                event = backlog.take()
                if event is not None:
                    backlog.index.apply(event)
        drain(backlog)
        for tier, owner in held:
            assert set(backlog.index.holding(tier, owner)) == held[tier, owner] == set(truth.holding(tier, owner))
        assert backlog.index.anomalies == 0


def test_a_clear_weighs_as_much_as_one_key() -> None:
    assert (weight(TierCleared(Tier.HOST)), weight(removed(b"a", b"b")), weight(stored())) == (1, 2, 1)
