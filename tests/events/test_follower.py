"""A reader notices what it missed, asks for it, and knows whether its index can be trusted."""

from __future__ import annotations

from kvcr_actors.events.follower import StreamFollower
from kvcr_actors.events.wire import (
    MAX_PAYLOAD_BYTES,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    WireEvent,
    WireHash,
    encode_batch,
)
from kvcr_actors.types import Tier


def batch(*events: WireEvent) -> bytes:
    return encode_batch(EventBatch(0.0, list(events)))


def stored(*blocks: int) -> BlockStored:
    return BlockStored(list(blocks), None, [0] * len(blocks), 1, None, "CPU", None)


CLEAR = AllBlocksCleared()


def test_a_late_joiner_asks_for_everything_first() -> None:
    follower = StreamFollower(can_replay=True)
    assert follower.receive(7, batch(stored(2))) == 0
    assert follower.receive(8, batch(stored(3))) is None  # held until the replay is over
    follower.replayed(6, batch(CLEAR, stored(1)))
    follower.replayed(7, batch(stored(2)))
    follower.end_replay()
    assert follower.index.keys(Tier.HOST) == {1, 2, 3}
    assert (follower.expected, follower.totals.stale, follower.faults) == (9, 1, [])


def test_a_gap_is_closed_by_a_replay() -> None:
    follower = StreamFollower(can_replay=True)
    follower.receive(0, batch(CLEAR))
    follower.end_replay()
    assert follower.receive(3, batch(stored(3))) == 1
    follower.replayed(1, batch(stored(1)))
    follower.replayed(2, batch(stored(2)))
    follower.end_replay()
    assert follower.index.keys(Tier.HOST) == {1, 2, 3}
    assert (follower.totals.gaps, follower.totals.lost, follower.in_doubt) == (1, 0, False)


def test_a_replay_that_does_not_come_leaves_doubt_until_the_next_clear() -> None:
    follower = StreamFollower(can_replay=True)
    follower.receive(0, batch(CLEAR))
    follower.end_replay()
    follower.receive(4, batch(stored(4)))
    follower.end_replay()
    assert (follower.totals.lost, follower.in_doubt) == (3, True)
    assert "3 lost" in follower.faults[0]
    follower.receive(5, batch(CLEAR, stored(5)))
    assert not follower.faults
    assert follower.index.keys(Tier.HOST) == {5}


def test_without_replays_it_says_that_it_does_not_know_what_was_before() -> None:
    follower = StreamFollower(can_replay=False)
    assert follower.receive(5, batch(stored(1))) is None
    assert follower.in_doubt
    assert StreamFollower(can_replay=False).faults == ["no batch came"]


def test_old_numbers_are_ignored() -> None:
    follower = StreamFollower(can_replay=False)
    follower.receive(5, batch(CLEAR, stored(1)))
    follower.receive(5, batch(CLEAR))
    assert (follower.totals.stale, follower.index.keys(Tier.HOST)) == (1, {1})


def test_what_cannot_be_read_is_counted_and_doubted() -> None:
    follower = StreamFollower(can_replay=False)
    follower.receive(0, batch(CLEAR))
    follower.receive(1, b"\xc1")
    follower.receive(2, batch(BlockRemoved([1], "TAPE")))
    follower.note_malformed()
    assert (follower.totals.malformed, follower.in_doubt) == (3, True)


def test_a_removal_of_what_is_not_held_is_a_fault_and_a_repeated_store_is_not() -> None:
    follower = StreamFollower(can_replay=False)
    follower.receive(0, batch(CLEAR, stored(1), stored(1)))
    assert (follower.index.repeated, follower.faults) == (1, [])
    follower.receive(1, batch(BlockRemoved([9], "CPU")))
    assert follower.faults == ["1 blocks were removed while not held"]


def test_what_was_removed_while_batches_were_missing_contradicts_nothing() -> None:
    follower = StreamFollower(can_replay=False)
    follower.receive(0, batch(CLEAR))
    follower.receive(2, batch(BlockRemoved([9], "CPU")))
    follower.receive(3, batch(CLEAR))
    assert (follower.index.anomalies, follower.faults) == (1, [])


def test_an_owners_clear_leaves_the_others_alone() -> None:
    follower = StreamFollower(can_replay=False)
    owned = BlockStored([2], None, [0], 1, None, "CPU", None, ownership="kvcr")
    follower.receive(0, batch(CLEAR, stored(1), owned))
    follower.receive(1, batch(AllBlocksCleared("kvcr")))
    assert (follower.index.keys(Tier.HOST), follower.index.keys(Tier.HOST, "kvcr")) == ({1}, set())
    assert follower.describe()["blocks"] == {"host": 1, "host (kvcr)": 0}


def test_numbers_that_went_back_are_a_restart_that_is_not_followed() -> None:
    follower = StreamFollower(can_replay=False)
    follower.receive(1_000, batch(CLEAR, stored(1)))
    follower.receive(0, batch(stored(2)))
    follower.receive(1, batch(stored(3)))
    assert (follower.totals.restarts, follower.totals.stale, follower.index.keys(Tier.HOST)) == (1, 2, {1})
    assert follower.faults[-1] == "the publisher began again at lower numbers (1 times)"


def test_what_comes_again_after_a_replay_is_no_restart() -> None:
    follower = StreamFollower(can_replay=True)
    follower.receive(0, batch(CLEAR))
    for number in range(3):
        follower.replayed(number, batch(CLEAR))
    follower.end_replay()
    follower.receive(1, batch())
    follower.receive(2, batch())
    assert (follower.totals.restarts, follower.totals.stale, follower.faults) == (0, 3, [])


def test_what_waits_for_a_replay_is_bounded_in_bytes_and_the_rest_is_lost_and_told() -> None:
    follower = StreamFollower(can_replay=True)
    follower.receive(0, batch())
    follower.end_replay()
    large = b"\xc1" * MAX_PAYLOAD_BYTES
    assert follower.receive(10, large) == 1
    for sequence in range(11, 110):
        follower.receive(sequence, large)
    follower.end_replay()
    assert follower.totals.malformed == (256 << 20) // MAX_PAYLOAD_BYTES
    assert follower.totals.lost == 109 - follower.totals.malformed
    assert follower.in_doubt


def test_cache_groups_are_kept_apart() -> None:
    follower = StreamFollower(can_replay=False)
    groups = [BlockStored([1, 2, 3], None, [0] * 3, 1, None, "CPU", None, group_idx=group) for group in (0, 1)]
    follower.receive(0, batch(CLEAR, *groups))
    follower.receive(1, batch(BlockRemoved([1, 2], "CPU", group_idx=1), BlockRemoved([1], "CPU", group_idx=0)))
    assert follower.index.keys(Tier.HOST, group=0) == {2, 3}
    assert follower.index.keys(Tier.HOST, group=1) == {3}
    assert follower.describe()["blocks"] == {"host (group 0)": 2, "host (group 1)": 1}
    assert not follower.faults
    follower.receive(2, batch(CLEAR))
    assert set(follower.describe()["blocks"].values()) == {0}


def test_owners_without_end_are_refused() -> None:
    follower = StreamFollower(can_replay=False)
    follower.receive(0, batch(CLEAR))
    for number in range(1, 101):
        event = BlockStored([number], None, [0], 1, None, "CPU", None, ownership=f"owner{number}")
        follower.receive(number, batch(event))
    assert (len(follower.index.content), follower.totals.malformed) == (64, 36)


class Counted(dict[WireHash, WireHash | None]):
    """Blocks that nobody may print."""

    def __repr__(self) -> str:
        raise AssertionError("a description must not cost as much as the index is large")


def test_a_description_does_not_look_at_the_blocks() -> None:
    follower = StreamFollower(can_replay=False)
    follower.index.content[Tier.HOST, None] = Counted({1: None})
    assert follower.describe()["blocks"] == {"host": 1}
