"""The feed and the intake: any history through any bounds, from any thread, ends in the same content."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import pytest

from kvcr_actors.actors.publisher import Outlets
from kvcr_actors.core.backlog import EventBacklog
from kvcr_actors.core.inventory import (
    BlocksRemoved,
    BlocksStored,
    Holding,
    InventoryEvent,
    InventoryIndex,
    Ownership,
    TierCleared,
)
from kvcr_actors.core.stats import ControllerStats
from kvcr_actors.events.feed import EventFeed
from kvcr_actors.events.intake import EventIntake
from kvcr_actors.messages import InventoryChanged
from kvcr_actors.runtime.inbox import Inbox
from kvcr_actors.types import Tier

HOLDINGS: list[Holding] = [(tier, owner) for tier in Tier for owner in Ownership]


def new_feed(*, has_sinks: bool = True) -> tuple[EventFeed, Inbox[InventoryChanged]]:
    inbox: Inbox[InventoryChanged] = Inbox("publisher", 2)
    return EventFeed(inbox, has_sinks=has_sinks), inbox


def stored(tier: Tier, *keys: bytes) -> BlocksStored:
    return BlocksStored(tier, keys, (None,) * len(keys))


def bound(monkeypatch: pytest.MonkeyPatch, publishes: int, changes: int) -> None:
    monkeypatch.setattr("kvcr_actors.events.intake.PUBLISHES_KEPT", publishes)
    monkeypatch.setattr("kvcr_actors.events.feed.CHANGES_KEPT", changes)


def test_word_is_left_in_the_inbox_and_events_come_out_in_order() -> None:
    feed, inbox = new_feed()
    events = [stored(Tier.HOST, b"a"), stored(Tier.STORE, b"a"), BlocksRemoved(Tier.HOST, (b"a",)), stored(Tier.HOST)]
    assert feed.post(events[:1])
    assert len(inbox) == 1
    assert all(feed.post([event]) for event in events[1:])  # the inbox is full, the feed is not
    assert feed.take() == (events, {})
    inbox.close()
    assert feed.post(events[:1])  # the assembly looks once more
    feed.close()
    assert not feed.post(events[:1])
    assert feed.take() == (events[:1], {})


def test_where_nobody_listens_nothing_is_kept() -> None:
    feed, inbox = new_feed(has_sinks=False)
    assert feed.post([stored(Tier.HOST, b"a")])
    assert (feed.take(), len(inbox)) == (([], {}), 0)


def test_the_oldest_events_past_the_bounds_are_restated_by_holding(monkeypatch: pytest.MonkeyPatch) -> None:
    bound(monkeypatch, 1, 2)
    feed, _ = new_feed()
    for number in range(6):
        feed.post([stored(Tier.DEVICE if number % 2 else Tier.HOST, bytes([number]))])
    events, gaps = feed.take()
    assert events == [stored(Tier.HOST, b"\4"), stored(Tier.DEVICE, b"\5")]
    assert gaps == {(Tier.HOST, Ownership.ENGINE): 2, (Tier.DEVICE, Ownership.ENGINE): 2}
    assert feed.restate([(Tier.HOST, Ownership.ENGINE)]) == [
        TierCleared(Tier.HOST),
        stored(Tier.HOST, b"\0", b"\2", b"\4"),
    ]
    assert feed.take() == ([], {})


def test_a_large_holding_is_restated_in_parts() -> None:
    feed, _ = new_feed()
    keys = tuple(number.to_bytes(2, "big") for number in range(10_000))
    feed.post([BlocksStored(Tier.STORE, keys, (None, *keys[:-1]))])
    feed.take()
    clear, *parts = feed.restate([(Tier.STORE, Ownership.ENGINE)])
    index = InventoryIndex()
    index.publish([stored(Tier.STORE, b"old"), clear, *parts])
    assert dict(index.holding(Tier.STORE, Ownership.ENGINE)) == dict(zip(keys, (None, *keys[:-1]), strict=True))
    assert max(len(part.keys) for part in parts if isinstance(part, BlocksStored)) < 5_000


class Moody:
    """A sink that at times takes a part and raises."""

    def __init__(self, rng: random.Random) -> None:
        self.index = InventoryIndex()
        self.rng = rng
        self.is_well = False

    def publish(self, events: Sequence[InventoryEvent]) -> None:
        if not self.is_well and self.rng.random() < 0.4:
            self.index.publish(self.rng.sample(events, len(events) // 2))
            raise OSError("not now")
        self.index.publish(events)


def change(rng: random.Random, held: dict[Holding, dict[bytes, None]]) -> list[InventoryEvent]:
    """What an engine may tell: mostly right, at times twice, or of what it never held."""
    tier, owner = holding = rng.choice(HOLDINGS)
    keys = tuple(bytes([number]) for number in rng.sample(range(12), 3))
    match rng.randrange(9):
        case 0:
            held[holding].clear()
            return [TierCleared(tier, owner)]
        case 1 | 2 | 3:
            for key in keys:
                held[holding].pop(key, None)
            return [BlocksRemoved(tier, keys, owner)]
        case _:
            held[holding].update(dict.fromkeys(keys))
            return [BlocksStored(tier, keys, (None,) * 3, owner)]


@pytest.mark.anyio
async def test_any_history_ends_in_the_same_content_for_every_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped = 0
    for seed in range(150):
        rng = random.Random(seed)
        bound(monkeypatch, rng.choice([1, 3, 1_000]), rng.choice([3, 12, 1_000]))
        feed, _ = new_feed()
        moody, healthy, stats = Moody(rng), InventoryIndex(), ControllerStats()
        outlets = Outlets([moody, healthy], feed, stats)
        held: dict[Holding, dict[bytes, None]] = {holding: {} for holding in HOLDINGS}
        for _ in range(80):
            feed.post(change(rng, held))
            if rng.random() < 0.15:
                outlets.publish(last=rng.random() < 0.5)
        moody.is_well = True
        outlets.publish(last=True)
        assert outlets.is_whole
        dropped += stats.events_dropped
        for tier, owner in held:
            content = held[tier, owner].keys()
            assert moody.index.holding(tier, owner).keys() == content
            assert healthy.holding(tier, owner).keys() == content
    assert dropped


@pytest.mark.timeout(60)
def test_threads_that_leave_events_beside_one_that_takes_them_lose_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcr_actors.events.intake.PUBLISHES_KEPT", 4)
    backlog = EventBacklog(16)
    intake = EventIntake(backlog)
    truth = {tier: set[bytes]() for tier in (Tier.DEVICE, Tier.HOST)}

    def live(tier: Tier) -> None:
        rng = random.Random(tier.value)
        for number in range(4_000):
            keys = tuple(bytes([n]) for n in rng.sample(range(200), 3))
            if number % 2:
                truth[tier].update(keys)
                intake.leave([stored(tier, *keys)])
            else:
                truth[tier].difference_update(keys)
                intake.leave([BlocksRemoved(tier, keys)])

    threads = [threading.Thread(target=live, args=(tier,)) for tier in truth]
    for thread in threads:
        thread.start()
    taken = 0
    while any(thread.is_alive() for thread in threads):
        with intake.lock:
            taken += len(intake.take_all())
    with intake.lock:
        taken += len(intake.take_all())
        gaps = backlog.take_gaps()
    assert taken + gaps.total() == 8_000
    for tier, keys in truth.items():
        assert backlog.index.holding(tier, Ownership.ENGINE).keys() == keys


def test_who_leaves_events_never_waits_for_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcr_actors.events.intake.PUBLISHES_KEPT", 2)
    intake = EventIntake(EventBacklog(4))
    with intake.lock:
        for _ in range(10):
            intake.leave([stored(Tier.HOST, b"a")])
        assert len(intake) == 10
    for _ in range(8):
        intake.leave([stored(Tier.HOST, b"a")])
    assert len(intake) == 2
