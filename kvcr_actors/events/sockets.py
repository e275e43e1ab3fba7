"""A publisher's two sockets, for its thread alone: XPUB for the batches, ROUTER for replays; neither ever waits.

XPUB is a PUB that tells of subscriptions: some readers cannot ask for what they missed before they joined.
"""

from __future__ import annotations

import socket as system
import time
from collections.abc import Iterator
from itertools import islice
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
_REPLAY_QUEUE: Final = 16
"""Batches that wait for a reader of a replay; the rest follows as it reads."""
_REPLAY_STALL_S: Final = 30.0
"""How long a reader may take nothing of its replay before it ends."""
_REQUESTS: Final = 64
"""Of subscriptions and of replay requests, how many are looked at in a turn: a flood must not keep batches back."""
_REPLAY_LOOK_S: Final = 0.005
_IDLE_LOOK_S: Final = 0.05
_BIND_S: Final = 0.5
_BIND_LOOK_S: Final = 0.02
_REQUEST_BYTES: Final = 256
_LINGER_MS: Final = 1_000
_SUBSCRIBE: Final = b"\x01"


@attrs.define
class _Replay:
    next: int
    end: int
    is_whole: bool
    """Whether all that was asked for was still kept; if not, a snapshot must follow."""
    moved_at: float


class PublisherSockets:
    """Opened in the constructor; EventEndpointError names the endpoint."""

    def __init__(self, config: EventsConfig) -> None:
        self._topic = config.topic.encode()
        self._replays: dict[bytes, _Replay] = {}
        self._bad_requests = 0
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
        for frames in islice(_received(self._pub), _REQUESTS):
            if self._tells_joiners and frames[0][:1] == _SUBSCRIBE:
                stream.ask_snapshot()
        router = self._router
        if router is None:
            return
        for frames in islice(_received(router), _REQUESTS):
            self._begin(frames, stream)
        now = time.monotonic()
        for reader, replay in list(self._replays.items()):
            try:
                self._continue(router, reader, stream)
            except zmq.Again:  # its queue is full; the next turn tries again
                if now - replay.moved_at > _REPLAY_STALL_S:
                    self._give_up(reader, stream)
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
            self._bad_requests += 1
            if self._bad_requests & (self._bad_requests - 1) == 0:  # the first, the second, the fourth ...
                log.warning("events.bad_replay_request", count=self._bad_requests, error=str(error))
            return
        self._replays.pop(frames[0], None)
        while len(self._replays) >= _REPLAYS:
            self._give_up(next(iter(self._replays)), stream)
        self._replays[frames[0]] = _Replay(start, stream.newest, stream.covers(start), time.monotonic())

    def _continue(self, router: zmq.Socket[bytes], reader: bytes, stream: EventStream) -> None:
        replay = self._replays[reader]
        replay.is_whole = replay.is_whole and stream.covers(replay.next)
        batches = [batch for batch in stream.replay(replay.next, _REPLAY_SLICE) if batch[0] <= replay.end]
        for sequence, payload in batches:
            router.send_multipart((reader, b"", self._topic, encode_sequence(sequence), payload), zmq.NOBLOCK)
            replay.next, replay.moved_at = sequence + 1, time.monotonic()
        if not batches or replay.next > replay.end:  # none: what is left of it is no longer kept
            router.send_multipart((reader, b"", self._topic, END_OF_REPLAY, b""), zmq.NOBLOCK)
            if not replay.is_whole:
                stream.ask_snapshot()
            del self._replays[reader]

    def _give_up(self, reader: bytes, stream: EventStream) -> None:
        """End a replay that its reader leaves unread, or that is one too many; a snapshot tells it the rest."""
        log.info("events.replay_given_up", unread=self._replays[reader].end - self._replays[reader].next + 1)
        del self._replays[reader]
        stream.ask_snapshot()


def _received(socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
    """What waits in a socket."""
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
        _bind_when_free(socket, address, time.monotonic() + _BIND_S)
    except zmq.ZMQError as error:
        socket.close(0)
        raise EventEndpointError(f"{what} endpoint {address}: {error}; free it, or choose another") from error
    return socket


def _bind_when_free(socket: zmq.Socket[bytes], address: str, until: float) -> None:
    """Bind; a publisher of this process that was just closed needs a moment to free its address."""
    while True:
        try:
            _refuse_served(address)
            socket.bind(address)
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or time.monotonic() > until:
                raise
            time.sleep(_BIND_LOOK_S)
        else:
            return


def _refuse_served(address: str) -> None:
    """Raise if somebody listens at an ipc address: to bind it would silently take its readers."""
    if not address.startswith("ipc:///"):
        return  # of the others, the system says so
    with system.socket(system.AF_UNIX) as probe:
        probe.settimeout(0)
        try:
            probe.connect(address.removeprefix("ipc://"))
        except BlockingIOError:
            pass  # so many wait there that one more would, too
        except OSError:
            return
    raise zmq.ZMQError(zmq.EADDRINUSE)
