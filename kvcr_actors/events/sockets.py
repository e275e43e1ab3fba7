"""A publisher's two sockets, for its thread alone: XPUB for the batches, ROUTER for replays; neither ever waits.

XPUB is a PUB that tells of subscriptions: some readers cannot ask for what they missed before they joined.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import attrs
import structlog
import zmq

from kvcr_actors.errors import EventEndpointError, EventFormatError
from kvcr_actors.events.config import EventsConfig
from kvcr_actors.events.stream import EventStream, Message
from kvcr_actors.events.wire import END_OF_REPLAY, decode_sequence, encode_sequence

log = structlog.get_logger()

_REPLAYS: Final = 64
"""Replays that may be under way; the oldest ends for a further one."""
_REPLAY_SLICE: Final = 32
_REPLAY_QUEUE: Final = 64
"""Batches that wait for a reader of a replay; the rest follows as it reads."""
_REPLAY_LOOK_S: Final = 0.005
_IDLE_LOOK_S: Final = 0.05
_REQUEST_BYTES: Final = 256
_LINGER_MS: Final = 1_000
_SUBSCRIBE: Final = b"\x01"


@attrs.define
class _Replay:
    next: int
    end: int


class PublisherSockets:
    """Opened in the constructor; EventEndpointError names the endpoint."""

    def __init__(self, config: EventsConfig) -> None:
        self._topic = config.topic.encode()
        self._replays: dict[bytes, _Replay] = {}
        self._router: zmq.Socket[bytes] | None = None
        self._looks = config.begins_anew_on_join or config.replay is not None
        self._tells_joiners = config.begins_anew_on_join
        self._pub = _bind(zmq.XPUB, config.events.at(config.data_parallel_rank), "events", config.queue_batches)
        self._pub.setsockopt(zmq.XPUB_VERBOSE, 1)
        if config.replay is not None:
            try:
                router = _bind(zmq.ROUTER, config.replay.at(config.data_parallel_rank), "replay", _REPLAY_QUEUE)
            except EventEndpointError:
                self._pub.close(0)
                raise
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._router = router

    @property
    def next_look_s(self) -> float | None:
        """When readers want the next turn; None if none may come."""
        if not self._looks:
            return None
        return _REPLAY_LOOK_S if self._replays else _IDLE_LOOK_S

    def send(self, message: Message) -> None:
        """Publish a batch; for a reader whose queue is full it is lost."""
        sequence, payload = message
        self._pub.send_multipart((self._topic, encode_sequence(sequence), payload), zmq.NOBLOCK)

    def serve_readers(self, stream: EventStream) -> None:
        """Look at who joined and who asks for a replay; send each replay's next batches, as far as its reader takes."""
        for frames in _received(self._pub):
            if self._tells_joiners and frames[0][:1] == _SUBSCRIBE:
                stream.ask_snapshot()
        router = self._router
        if router is None:
            return
        for frames in _received(router):
            self._begin(frames, stream)
        for reader in list(self._replays):
            try:
                self._continue(router, reader, stream)
            except zmq.Again:
                continue  # its queue is full; the next turn tries again
            except zmq.ZMQError as error:
                log.info("events.replay_ended", error=str(error))
                del self._replays[reader]

    def close(self) -> None:
        """Close both; what is queued has a second to leave."""
        self._pub.close(_LINGER_MS)
        if self._router is not None:
            self._router.close(0)

    def _begin(self, frames: list[bytes], stream: EventStream) -> None:
        try:
            start = decode_sequence(b"" if len(frames) != 3 or frames[1] else frames[2])
        except EventFormatError as error:
            log.warning("events.bad_replay_request", frames=len(frames), error=str(error))
            return
        if not stream.covers(start):
            stream.ask_snapshot()
        self._replays.pop(frames[0], None)
        while len(self._replays) >= _REPLAYS:
            del self._replays[next(iter(self._replays))]
        self._replays[frames[0]] = _Replay(start, stream.newest)

    def _continue(self, router: zmq.Socket[bytes], reader: bytes, stream: EventStream) -> None:
        replay = self._replays[reader]
        if not stream.covers(replay.next):
            stream.ask_snapshot()
        for sequence, payload in stream.replay(replay.next, _REPLAY_SLICE):
            if sequence > replay.end:
                break
            router.send_multipart((reader, b"", self._topic, encode_sequence(sequence), payload), zmq.NOBLOCK)
            replay.next = sequence + 1
        if replay.next > replay.end:
            router.send_multipart((reader, b"", self._topic, END_OF_REPLAY, b""), zmq.NOBLOCK)
            del self._replays[reader]


def _received(socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
    """Everything that waits in a socket."""
    while True:
        try:
            yield socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return


def _bind(kind: int, address: str, what: str, queue: int) -> zmq.Socket[bytes]:
    socket = zmq.Context[zmq.Socket[bytes]].instance().socket(kind)
    try:
        socket.setsockopt(zmq.SNDHWM, queue)
        socket.setsockopt(zmq.MAXMSGSIZE, _REQUEST_BYTES)
        socket.setsockopt(zmq.IPV6, 1 if "[" in address else 0)
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close(0)
        raise EventEndpointError(f"{what} endpoint {address}: {error}; free it, or choose another") from error
    return socket
