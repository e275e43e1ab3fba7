"""A reader of one publisher over ZeroMQ, for programs that may block: the command line, tests, tools."""

from __future__ import annotations

import math
import time
from types import TracebackType
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvcr_actors.errors import EventEndpointError
from kvcr_actors.events.follower import StreamFollower
from kvcr_actors.events.stream import Message
from kvcr_actors.events.wire import (
    END_OF_REPLAY,
    MAX_PAYLOAD_BYTES,
    SEQUENCE_BYTES,
    decode_sequence,
    encode_sequence,
)

SILENT_S: Final = 5.0
"""A publisher says something each second; after so long without a word nobody knows what it holds."""
_REPLAY_S: Final = 2.0
"""The most that a replay may pause; what came until then counts."""
_QUEUE: Final = 10_000
_LOOK_S: Final = 0.1
_RETRY_S: Final = 0.5
"""How soon ZeroMQ says that it connects again; where it does not, the connection ended because of what it brought."""


class EventReader:
    """Follows the publisher at `endpoint`; with a `replay_endpoint` it asks for what it missed. Use it with `with`."""

    def __init__(self, endpoint: str, replay_endpoint: str | None = None) -> None:
        self.follower = StreamFollower(can_replay=replay_endpoint is not None)
        self._replay_endpoint = replay_endpoint
        self._heard_at = time.monotonic()
        self._sub = _Subscription(endpoint)
        self._dealer: zmq.Socket[bytes] | None = None
        self._replayed = -1
        self._replay_until = 0.0

    def __enter__(self) -> EventReader:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._sub.close(0)
        if self._dealer is not None:
            self._dealer.close(0)

    @property
    def silent_s(self) -> float:
        """Seconds since the last batch, or since the start."""
        return time.monotonic() - self._heard_at

    @property
    def faults(self) -> list[str]:
        """Say in words why the index cannot be trusted now; none if it can."""
        checks = [
            (self.follower.is_replaying, "a replay was not over"),
            (self.silent_s > SILENT_S, f"nothing was heard for {self.silent_s:.0f} s"),
        ]
        return self.follower.faults + [words for wrong, words in checks if wrong]

    def read(self, timeout_s: float) -> Message | None:
        """Wait for a live batch and follow it; None if none came in time. A replay goes on meanwhile, to no limit."""
        until = time.monotonic() + timeout_s
        while True:
            if self._sub.look():
                self.follower.note_cut_off()
            if self._dealer is not None:
                self._go_on(self._dealer)
            left_s = until - time.monotonic()
            look_s = 0.0 if self._dealer is not None else min(_LOOK_S, max(0.0, left_s))
            if self._sub.socket.poll(math.ceil(look_s * 1_000)):
                return self._take_live(self._sub.socket.recv_multipart())
            if left_s <= 0:
                return None

    def _take_live(self, frames: list[bytes]) -> Message | None:
        self._heard_at = time.monotonic()
        if len(frames) != 3 or len(frames[1]) != SEQUENCE_BYTES or frames[1] == END_OF_REPLAY:
            self.follower.note_malformed()
            return None
        sequence = decode_sequence(frames[1])
        start = self.follower.receive(sequence, frames[2])
        if start is not None and self._replay_endpoint is not None:
            # A socket a replay: what comes late from one that was given up cannot be taken for the next.
            self._dealer = _connect(zmq.DEALER, self._replay_endpoint)
            self._dealer.send_multipart((b"", encode_sequence(start)))
            self._replayed, self._replay_until = -1, time.monotonic() + _REPLAY_S
        return sequence, frames[2]

    def _go_on(self, dealer: zmq.Socket[bytes]) -> None:
        """Take one message of the replay, if one comes in a moment."""
        if not dealer.poll(math.ceil(_LOOK_S * 1_000)):
            if time.monotonic() > self._replay_until:
                self._end_replay(dealer)
            return
        self._replay_until = time.monotonic() + _REPLAY_S
        frames = dealer.recv_multipart()
        if len(frames) < 3 or frames[-2] == END_OF_REPLAY:
            self._end_replay(dealer)
            return
        sequence = decode_sequence(frames[-2]) if len(frames[-2]) == SEQUENCE_BYTES else -1
        if sequence <= self._replayed:  # nor would it end by itself
            self.follower.note_malformed()
            self._end_replay(dealer)
            return
        self._replayed = sequence
        self.follower.replayed(sequence, frames[-1])

    def _end_replay(self, dealer: zmq.Socket[bytes]) -> None:
        dealer.close(0)
        self._dealer = None
        self.follower.end_replay()


class _Subscription:
    """A SUB socket that is made anew where ZeroMQ does not connect again: after a frame beyond the bound."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._lost_at: float | None = None
        self._open()

    def look(self) -> bool:
        """Look at the connection; True if it had to be made anew."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            self._lost_at = time.monotonic() if event == zmq.EVENT_DISCONNECTED else None
        if self._lost_at is None or time.monotonic() - self._lost_at < _RETRY_S:
            return False
        self.close(0)
        self._open()
        return True

    def close(self, linger_ms: int) -> None:
        self.socket.disable_monitor()
        self._monitor.close(linger_ms)
        self.socket.close(linger_ms)

    def _open(self) -> None:
        self._lost_at = None
        self.socket = _connect(zmq.SUB, self._endpoint)
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")


def _connect(kind: int, endpoint: str) -> zmq.Socket[bytes]:
    socket = zmq.Context[zmq.Socket[bytes]].instance().socket(kind)
    try:
        socket.setsockopt(zmq.RCVHWM, _QUEUE)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
        socket.setsockopt(zmq.IPV6, 1 if "[" in endpoint else 0)
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close(0)
        raise EventEndpointError(f"endpoint {endpoint}: {error}; write tcp://HOST:PORT of a publisher") from error
    return socket
