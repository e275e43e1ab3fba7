"""Batches within their bounds, replays, snapshots, and blocks that cannot be told at once."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

import numpy as np
import pytest

from kvcr_actors.core.inventory import BlocksRemoved, BlocksStored, InventoryEvent
from kvcr_actors.core.keys import chain_seed, page_keys, router_key
from kvcr_actors.errors import ConfigError, InvalidNodeError
from kvcr_actors.events.contexts import ContextTable
from kvcr_actors.events.follower import StreamFollower
from kvcr_actors.events.stream import EventStream, Message, StreamLimits
from kvcr_actors.events.wire import DIALECTS, AllBlocksCleared, BlockRemoved, BlockStored, WireEvent, decode_batch
from kvcr_actors.types import PageContext, PageKey, Tier

SIZE = 4


def pages_of(count: int, first: int = 0, **names: str) -> tuple[tuple[PageKey, ...], PageContext]:
    tokens = [
        (1 << 31) + first + token for token in range(count * SIZE)
    ]  # five bytes each: the most that a token takes
    keys = page_keys(tokens, SIZE, chain_seed(page_tokens=SIZE, salt=names.get("salt"), adapter=names.get("adapter")))
    return keys, PageContext(tokens, SIZE, names.get("adapter"), names.get("salt"))


def stored(tier: Tier, keys: Sequence[PageKey], first: int = 0) -> BlocksStored:
    return BlocksStored(tier, tuple(keys[first:]), (None, *keys)[first : len(keys)])


class Desk:
    """A stream, its table, and what it has sent."""

    def __init__(self, limits: StreamLimits | None = None, dialect: str = "dynamo") -> None:
        self.table = ContextTable()
        self.stream = EventStream(DIALECTS[dialect], self.table, count().__next__, limits=limits)
        self.now = 0.0

    def forget(self, key: PageKey) -> None:
        for half in (self.table._late, self.table._early):
            half.places.pop(key, None)

    def send(self, events: Iterable[InventoryEvent] = ()) -> list[Message]:
        self.stream.push(events)
        messages: list[Message] = []
        while (message := self.stream.next_message(self.now, 0.0)) is not None:
            messages.append(message)
        return messages

    def told(self, events: Iterable[InventoryEvent] = ()) -> list[WireEvent]:
        return [event for _, payload in self.send(events) for event in decode_batch(payload).events]


def test_a_stream_begins_with_a_clear() -> None:
    assert Desk().told() == [AllBlocksCleared(), AllBlocksCleared("kvcr")]
    assert Desk(dialect="vllm").told() == [AllBlocksCleared()]


@pytest.mark.parametrize("payload_bytes", [1_024, 5_000, 256 << 10, 8 << 20])
def test_no_batch_is_larger_than_its_bounds(payload_bytes: int) -> None:
    desk = Desk(StreamLimits(payload_bytes=payload_bytes))
    long, long_context = pages_of(20_000)
    many = [pages_of(3, 1_000_000 + 100 * number, salt=f"tenant {number}") for number in range(400)]
    for keys, context in [(long, long_context), *many]:
        desk.table.note(keys, context)
    messages = desk.send([stored(Tier.HOST, long), *(stored(Tier.HOST, keys) for keys, _ in many)])
    messages += desk.send([BlocksRemoved(Tier.HOST, tuple(reversed(long)))])
    follower = StreamFollower(can_replay=False)
    for sequence, payload in messages:
        events = decode_batch(payload).events
        assert len(payload) <= payload_bytes
        assert len(events) <= 128
        assert sum(len(event.block_hashes) for event in events if not isinstance(event, AllBlocksCleared)) <= 8_192
        follower.receive(sequence, payload)
    assert len(follower.index.keys(Tier.HOST)) == 1_200
    assert not follower.faults


@pytest.mark.parametrize(
    "values", [{"events": 129}, {"blocks": 8_193}, {"payload_bytes": (8 << 20) + 1}, {"blocks": 0}]
)
def test_bounds_beyond_what_readers_take_are_refused(values: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        StreamLimits(**values)


def test_a_chain_is_one_event_with_its_tokens() -> None:
    desk = Desk()
    keys, context = pages_of(3, salt="tenant", adapter="style")
    desk.table.note(keys, context)
    desk.send()
    (event,) = desk.told([stored(Tier.STORE, keys, 1)])
    assert isinstance(event, BlockStored)
    assert event.block_hashes == [router_key(key) for key in keys[1:]]
    assert event.parent_block_hash == router_key(keys[0])
    assert event.token_ids == list(context.tokens[SIZE:])
    assert (event.block_size, event.medium, event.cache_salt, event.lora_name) == (SIZE, "STORAGE", "tenant", "style")


def test_a_block_of_unknown_origin_waits_until_an_event_names_it_with_one() -> None:
    desk = Desk()
    keys, context = pages_of(2)
    desk.send()
    assert desk.told([stored(Tier.STORE, keys)]) == []  # a store opens, and holds what another process computed
    assert desk.stream.describe()["untold"] == 2
    desk.table.note(keys, context)
    told = desk.told([stored(Tier.HOST, keys)])
    assert [(event.medium, len(event.block_hashes)) for event in told if isinstance(event, BlockStored)] == [
        ("CPU", 2),
        ("STORAGE", 2),
    ]
    assert desk.stream.describe()["untold"] == 0


@pytest.mark.parametrize("untold", [0, 1])
def test_a_block_told_late_and_a_new_one_are_told_parents_first(untold: int) -> None:
    desk = Desk()
    keys, context = pages_of(3)
    desk.send()
    assert desk.told([stored(Tier.DEVICE, keys[: untold + 1], untold)]) == []
    desk.table.note(keys, context)
    told = desk.told([stored(Tier.DEVICE, keys)])
    assert [event.block_hashes for event in told if isinstance(event, BlockStored)] == [
        [router_key(key) for key in keys]
    ]


def test_what_was_never_told_is_not_taken_back() -> None:
    desk = Desk()
    keys, _ = pages_of(2)
    desk.send()
    assert desk.told([stored(Tier.STORE, keys), BlocksRemoved(Tier.STORE, keys[::-1])]) == []


def test_a_device_block_that_was_cut_off_is_stated_again_with_its_parent() -> None:
    desk = Desk()
    keys, context = pages_of(4)
    desk.table.note(keys, context)
    desk.send()
    desk.told([stored(Tier.DEVICE, keys), BlocksRemoved(Tier.DEVICE, keys[1:2])])
    told = desk.told([BlocksStored(Tier.DEVICE, keys[1:2], keys[:1])])
    assert [len(event.block_hashes) for event in told if isinstance(event, BlockStored)] == [1, 2]
    assert desk.stream.describe()["restated"] == 2


def test_a_block_that_was_cut_off_and_went_is_stated_no_more() -> None:
    desk = Desk()
    keys, context = pages_of(3)
    desk.table.note(keys, context)
    desk.send()
    desk.told([stored(Tier.DEVICE, keys), BlocksRemoved(Tier.DEVICE, keys[1:2]), BlocksRemoved(Tier.DEVICE, keys[2:])])
    desk.told([stored(Tier.DEVICE, keys, 1)])
    assert [event.medium for event in desk.told([stored(Tier.HOST, keys)]) if isinstance(event, BlockStored)] == ["CPU"]
    assert desk.stream.describe()["restated"] == 0


def test_a_block_whose_origin_is_forgotten_while_it_is_cut_off_waits_as_any_other() -> None:
    desk = Desk()
    keys, context = pages_of(3)
    desk.table.note(keys, context)
    desk.send()
    desk.told([stored(Tier.DEVICE, keys), BlocksRemoved(Tier.DEVICE, keys[1:2])])
    desk.forget(keys[2])
    back = BlocksStored(Tier.DEVICE, keys[1:2], keys[:1])
    desk.told([back, BlocksRemoved(Tier.DEVICE, keys[1:2])])
    desk.table.note(keys, context)
    assert [event.block_hashes for event in desk.told([back]) if isinstance(event, BlockStored)] == [
        [router_key(keys[1])]
    ]


def test_a_block_too_large_for_a_batch_is_counted_and_holds_up_nothing() -> None:
    desk = Desk(StreamLimits(payload_bytes=1_024))
    wide = page_keys(range(400), 400, chain_seed(page_tokens=400))
    desk.table.note(wide, PageContext(range(400), 400))
    keys, context = pages_of(1)
    desk.table.note(keys, context)
    desk.send()
    assert len(desk.told([stored(Tier.HOST, wide), stored(Tier.HOST, keys)])) == 1
    assert desk.stream.describe()["inexpressible"] == 1


@pytest.mark.parametrize("odd", [-1, 1 << 32])
def test_a_token_that_the_wire_cannot_say_ends_its_chain_there_and_stops_nothing_else(odd: Any) -> None:
    desk = Desk()
    keys, context = pages_of(4)
    tokens = list(context.tokens)
    tokens[2 * SIZE + 1] = odd
    desk.table.note(keys, PageContext(tokens, SIZE))
    others, other = pages_of(2, 500)
    desk.table.note(others, other)
    desk.send()
    told = desk.told([stored(Tier.DEVICE, keys), stored(Tier.DEVICE, others)])
    assert [len(event.block_hashes) for event in told if isinstance(event, BlockStored)] == [2, 2]
    assert (desk.stream.describe()["inexpressible"], desk.stream.describe()["untold"]) == (2, 2)
    gone = desk.told([BlocksRemoved(Tier.DEVICE, keys[::-1])])
    assert [event.block_hashes for event in gone if isinstance(event, BlockRemoved)] == [
        [router_key(key) for key in keys[1::-1]]
    ]


def test_tokens_that_are_too_few_are_not_told_as_those_of_another_block() -> None:
    desk = Desk()
    keys, context = pages_of(3)

    class Short:
        def find(self, key: PageKey) -> tuple[PageContext, int]:
            place = keys.index(key)
            return context, 9 if place == 1 else place

    desk.stream = EventStream(DIALECTS["dynamo"], Short(), count().__next__)
    desk.send()
    (event,) = desk.told([stored(Tier.HOST, keys)])
    assert isinstance(event, BlockStored)
    assert (event.block_hashes, event.token_ids) == ([router_key(keys[0])], list(context.page(0)))


@pytest.mark.parametrize(
    "form", [list, tuple, bytes, lambda tokens: array("q", tokens), lambda tokens: list(np.array(tokens))]
)
def test_tokens_may_come_in_any_sequence_of_integers(form: Callable[[list[int]], Sequence[int]]) -> None:
    desk = Desk()
    tokens = list(range(2 * SIZE))
    keys = page_keys(tokens, SIZE, chain_seed(page_tokens=SIZE))
    desk.table.note(keys, PageContext(form(tokens), SIZE))
    desk.send()
    (event,) = desk.told([stored(Tier.HOST, keys)])
    assert isinstance(event, BlockStored)
    assert event.token_ids == tokens


def test_an_overflow_ends_in_a_snapshot_and_a_follower_is_right_again() -> None:
    desk = Desk(StreamLimits(backlog_changes=5, snapshot_pause_s=10.0))
    keys, context = pages_of(30)
    desk.table.note(keys, context)
    follower = StreamFollower(can_replay=False)
    for message in desk.send():
        follower.receive(*message)
    desk.now = 1.0
    for message in desk.send([stored(Tier.HOST, keys), BlocksRemoved(Tier.HOST, keys[20:][::-1])]):
        follower.receive(*message)
    assert desk.stream.backlog.dropped
    desk.now = 10.0  # not before the pause has passed
    for message in desk.send():
        follower.receive(*message)
    assert follower.index.keys(Tier.HOST) == {router_key(key) for key in keys[:20]}
    assert desk.stream.snapshots == 2


def test_a_replay_reaches_back_as_far_as_the_buffer_or_says_that_it_does_not() -> None:
    desk = Desk(StreamLimits(buffer_batches=5))
    keys, context = pages_of(1)
    desk.table.note(keys, context)
    desk.send()
    assert desk.stream.covers(0)
    assert desk.stream.replay((1 << 64) - 1, 5) == ()
    for _ in range(6):
        desk.stream.heartbeat(0.0)
    assert not desk.stream.covers(0)
    assert desk.stream.covers(2)
    assert [sequence for sequence, _ in desk.stream.replay(0, 3)] == [2, 3, 4]
    assert [sequence for sequence, _ in desk.stream.replay(5, 100)] == [5, 6]
    desk.stream.ask_snapshot()
    desk.now = 2.0
    desk.send()
    assert desk.stream.covers(0)  # what came before the clear does not matter any more


def test_snapshots_leave_readers_most_of_the_time_with_a_whole_index() -> None:
    """However often a reader that cannot follow asks for one."""
    desk = Desk(StreamLimits(events=1, blocks=1, payload_bytes=1_024))
    keys, context = pages_of(100)
    desk.table.note(keys, context)
    desk.send([stored(Tier.HOST, keys)])
    desk.now = 1_000.0
    told: list[bool] = []
    for _ in range(2_000):
        desk.stream.ask_snapshot()
        desk.now += 1.0
        told.append(desk.stream.next_message(desk.now, 0.0) is not None)
    assert desk.stream.snapshots == 3
    assert told.count(True) == 2 * (2 + 100)


def test_a_replay_that_lacks_the_engines_clear_does_not_begin_at_the_stores() -> None:
    desk = Desk(StreamLimits(events=1, buffer_batches=2))
    desk.send()  # two clears, a batch each
    assert desk.stream.covers(0)
    desk.stream.heartbeat(0.0)
    assert not desk.stream.covers(0)


def test_the_replay_buffer_is_bounded_in_bytes() -> None:
    desk = Desk(StreamLimits(buffer_bytes=4_000, payload_bytes=1_024))
    keys, context = pages_of(2_000)
    desk.table.note(keys, context)
    desk.send([stored(Tier.HOST, keys)])
    assert desk.stream.describe()["buffered_bytes"] <= 4_000


def test_a_number_that_cannot_be_had_loses_nothing() -> None:
    table, broken = ContextTable(), True
    numbers = count()

    def take() -> int:
        if broken:
            raise OSError("no space left")
        return next(numbers)

    stream = EventStream(DIALECTS["dynamo"], table, take)
    with pytest.raises(OSError, match="no space"):
        stream.next_message(0.0, 0.0)
    broken = False
    message = stream.next_message(0.0, 0.0)
    assert message is not None
    assert decode_batch(message[1]).events == [AllBlocksCleared(), AllBlocksCleared("kvcr")]


def test_what_a_context_source_raises_at_loses_no_block() -> None:
    keys, context = pages_of(1)
    answers = iter([None, LookupError("not now")])

    class Moody:
        def find(self, key: PageKey) -> tuple[PageContext, int] | None:
            answer = next(answers, (context, 0))
            if isinstance(answer, LookupError):
                raise answer
            return answer

    desk, follower = Desk(), StreamFollower(can_replay=False)
    desk.stream = EventStream(DIALECTS["dynamo"], Moody(), count().__next__)
    desk.send([stored(Tier.HOST, keys)])  # of unknown origin
    with pytest.raises(LookupError):
        desk.send([stored(Tier.DEVICE, keys)])
    desk.stream.begin_anew()
    for message in desk.send():
        follower.receive(*message)
    assert follower.index.keys(Tier.HOST) == follower.index.keys(Tier.DEVICE) == {router_key(keys[0])}
    assert not follower.faults


def test_a_removal_names_its_medium() -> None:
    desk = Desk(dialect="sglang")
    keys, context = pages_of(2)
    desk.table.note(keys, context)
    desk.send()
    told = desk.told([stored(Tier.HOST, keys), BlocksRemoved(Tier.HOST, keys[1:])])
    assert isinstance(told[-1], BlockRemoved)
    assert told[-1].medium == "CPU_PINNED"


def test_the_table_forgets_the_earlier_half() -> None:
    table = ContextTable(limit=8)
    runs = [pages_of(2, 100 * number) for number in range(5)]
    for keys, context in runs:
        table.note(keys, context)
        assert len(table) <= 8
    assert [table.find(keys[1]) is not None for keys, _ in runs] == [False, False, True, True, True]
    assert table.find(runs[-1][0][1]) == (runs[-1][1], 1)
    with pytest.raises(InvalidNodeError, match="1 keys for a context of 2 pages"):
        table.note(runs[0][0][:1], runs[0][1])


@pytest.mark.parametrize("look", range(1, 6))
def test_a_page_that_is_noted_anew_while_it_is_looked_for_is_not_found_half_old(look: int) -> None:
    """The interleaving of two threads, made by a key that has itself noted at one of the looks at it."""
    keys, first = pages_of(3)
    second = PageContext(range(SIZE), SIZE)
    table = ContextTable()
    table.note(keys, first)
    looks = 0

    class Key(bytes):
        __slots__ = ()

        def __hash__(self) -> int:
            nonlocal looks
            looks += 1
            if looks == look:
                table.note(keys[2:], second)
            return super().__hash__()

    assert table.find(Key(keys[2])) in ((first, 2), (second, 0))


def test_a_page_that_is_looked_for_while_it_is_noted_anew_is_not_found_half_old() -> None:
    keys, first = pages_of(3)
    second = PageContext(range(SIZE), SIZE)
    table = ContextTable()
    table.note(keys, first)
    found: list[object] = []
    reader = threading.Thread(target=lambda: found.append(table.find(keys[2])))
    looks = 0

    class Key(bytes):
        __slots__ = ()

        def __hash__(self) -> int:
            nonlocal looks
            looks += 1
            if looks == 2:  # its context is written, its place is not
                reader.start()
                reader.join(0.2)
            return super().__hash__()

    table.note([Key(keys[2])], second)
    reader.join()
    assert found in ([(first, 2)], [(second, 0)])


@pytest.mark.parametrize(("tokens", "size"), [((), 1), ((1, 2, 3), 2), ((1,), 0)])
def test_a_context_has_whole_pages(tokens: tuple[int, ...], size: int) -> None:
    with pytest.raises(InvalidNodeError, match="whole pages"):
        PageContext(tokens, size)
