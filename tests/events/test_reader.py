"""The reader against publishers that are hostile, or gone: it keeps its time, and knows when it knows nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from kvcr_actors.events import reader as reader_module
from kvcr_actors.events.reader import EventReader
from kvcr_actors.events.wire import (
    END_OF_REPLAY,
    MAX_PAYLOAD_BYTES,
    AllBlocksCleared,
    EventBatch,
    encode_batch,
    encode_sequence,
)
from kvcr_actors.events.zmtp import SUBSCRIBE

pytestmark = pytest.mark.timeout(60)

EMPTY = encode_batch(EventBatch(0.0, []))
CLEAR = encode_batch(EventBatch(0.0, [AllBlocksCleared()]))


class Publisher:
    """libzmq's own sockets, as other engines use them."""

    def __init__(self, folder: Path) -> None:
        context = zmq.Context[zmq.Socket[bytes]].instance()
        self.events, self.replays = f"ipc://{folder}/events", f"ipc://{folder}/replay"
        self.pub, self.router = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
        self.pub.setsockopt(zmq.XPUB_VERBOSE, 1)  # also of one whose last connection is not cleared away yet
        self.pub.bind(self.events)
        self.router.bind(self.replays)

    def joined(self) -> None:
        """Wait for a subscription."""
        while True:
            assert self.pub.poll(10_000)
            if self.pub.recv()[:1] == SUBSCRIBE:
                return

    def send(self, number: int, payload: bytes = EMPTY) -> None:
        self.pub.send_multipart((b"t", encode_sequence(number), payload))


@pytest.fixture
def publisher(tmp_path: Path) -> Generator[Publisher]:
    made = Publisher(tmp_path)
    yield made
    made.pub.close(0)
    made.router.close(0)


@contextmanager
def following(publisher: Publisher, *, replay: bool = False) -> Generator[EventReader]:
    with EventReader(publisher.events, publisher.replays if replay else None) as reader:
        publisher.joined()
        yield reader


def read_until(reader: EventReader, happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < deadline
        reader.read(0.02)


def test_a_frame_that_is_too_large_is_a_fault_and_what_follows_is_heard(publisher: Publisher) -> None:
    with following(publisher) as reader:
        publisher.send(0, CLEAR)
        read_until(reader, lambda: reader.follower.expected == 1)
        assert reader.faults == []
        publisher.send(1, bytes(MAX_PAYLOAD_BYTES + 1))
        read_until(reader, lambda: reader.follower.totals.cut_off == 1)
        publisher.joined()
        publisher.send(2, CLEAR)
        read_until(reader, lambda: reader.follower.expected == 3)
        assert reader.faults == ["1 times the publisher sent a frame that is too large, or no ZeroMQ"]


def test_a_publisher_that_ends_and_comes_back_is_no_fault_of_its_own(publisher: Publisher, tmp_path: Path) -> None:
    with following(publisher) as reader:
        publisher.send(0, CLEAR)
        read_until(reader, lambda: reader.follower.expected == 1)
        publisher.pub.close(0)
        publisher.router.close(0)
        time.sleep(2 * reader_module._RETRY_S)
        reader.read(0.1)
        again = Publisher(tmp_path)
        publisher.pub, publisher.router = again.pub, again.router
        publisher.joined()
        publisher.send(1)
        read_until(reader, lambda: reader.follower.expected == 2)
        assert reader.faults == []


@pytest.mark.parametrize("numbers", [[5] * 50, range(50)], ids=["the same number", "ever higher numbers"])
def test_a_replay_without_end_holds_neither_time_nor_live_batches_up(
    publisher: Publisher, numbers: Sequence[int]
) -> None:
    with following(publisher, replay=True) as reader:
        publisher.send(100)
        assert reader.read(5.0) is not None
        (who, *_) = publisher.router.recv_multipart()
        reads = 0
        for number in numbers:
            publisher.router.send_multipart((who, b"", b"t", encode_sequence(number), EMPTY))
            publisher.send(101 + reads)
            reads += reader.read(5.0) is not None
        assert reads == 50
        is_over = len(set(numbers)) == 1  # numbers that do not rise end it
        assert reader.follower.totals.malformed == is_over
        assert ("a replay was not over" in reader.faults) is not is_over


def test_a_replay_that_is_over_leaves_no_fault(publisher: Publisher) -> None:
    with following(publisher, replay=True) as reader:
        publisher.send(1)
        assert reader.read(5.0) is not None
        assert "a replay was not over" in reader.faults
        (who, *_) = publisher.router.recv_multipart()
        for number, payload in ((0, CLEAR), (1, EMPTY)):
            publisher.router.send_multipart((who, b"", encode_sequence(number), payload))
        publisher.router.send_multipart((who, b"", END_OF_REPLAY, b""))
        read_until(reader, lambda: not reader.follower.is_replaying)
        assert reader.faults == []


def test_silence_is_a_fault(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "SILENT_S", 0.05)
    with following(publisher) as reader:
        publisher.send(0, CLEAR)
        read_until(reader, lambda: reader.follower.expected == 1)
        time.sleep(0.1)
        assert reader.faults == ["nothing was heard for 0 s"]


def test_the_number_that_ends_a_replay_is_none_of_a_batch(publisher: Publisher) -> None:
    with following(publisher) as reader:
        publisher.send((1 << 64) - 1)
        assert reader.read(5.0) is None
        publisher.send(0, CLEAR)
        read_until(reader, lambda: reader.follower.expected == 1)
        assert reader.faults == ["1 messages could not be read"]
