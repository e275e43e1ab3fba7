"""A reader of one publisher over ZeroMQ, for programs that may block: the command line, tests, tools."""

from __future__ import annotations

import math
import time
from types import TracebackType
from typing import Final

import zmq

from kvcr_actors.errors import EventEndpointError, EventFormatError
from kvcr_actors.events.follower import StreamFollower
from kvcr_actors.events.stream import Message
from kvcr_actors.events.wire import END_OF_REPLAY, MAX_PAYLOAD_BYTES, decode_sequence, encode_sequence

_REPLAY_S: Final = 2.0
"""The most that a replay may pause; what came until then counts."""
_QUEUE: Final = 10_000


class EventReader:
    """Follows the publisher at `endpoint`; with a `replay_endpoint` it asks for what it missed. Use it with `with`."""

    def __init__(self, endpoint: str, replay_endpoint: str | None = None) -> None:
        self.follower = StreamFollower(can_replay=replay_endpoint is not None)
        self._replay_endpoint = replay_endpoint
        self._heard_at = time.monotonic()
        self._sub = _connect(zmq.SUB, endpoint)
        self._sub.setsockopt(zmq.SUBSCRIBE, b"")

    def __enter__(self) -> EventReader:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._sub.close(0)

    @property
    def silent_s(self) -> float:
        """Seconds since the last batch, or since the start."""
        return time.monotonic() - self._heard_at

    def read(self, timeout_s: float) -> Message | None:
        """Wait for a batch and follow it, a replay included; None if none came in time."""
        if not self._sub.poll(math.ceil(timeout_s * 1_000)):
            return None
        frames = self._sub.recv_multipart()
        self._heard_at = time.monotonic()
        try:
            sequence = decode_sequence(frames[1] if len(frames) == 3 else b"")
        except EventFormatError:
            self.follower.note_malformed()
            return None
        start = self.follower.receive(sequence, frames[2])
        if start is not None and self._replay_endpoint is not None:
            try:
                self._replay(self._replay_endpoint, start)
            finally:
                self.follower.end_replay()
        return sequence, frames[2]

    def _replay(self, endpoint: str, start: int) -> None:
        # A socket a replay: what comes late from one that was given up cannot be taken for the next.
        dealer = _connect(zmq.DEALER, endpoint)
        try:
            dealer.send_multipart((b"", encode_sequence(start)))
            while dealer.poll(math.ceil(_REPLAY_S * 1_000)):
                frames = dealer.recv_multipart()
                if len(frames) < 3 or frames[-2] == END_OF_REPLAY:
                    return
                self.follower.replayed(decode_sequence(frames[-2]), frames[-1])
        except EventFormatError:
            self.follower.note_malformed()
        finally:
            dealer.close(0)


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
