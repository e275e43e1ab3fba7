"""A publisher's two sockets, for its thread alone: one for the batches, one for replays; neither ever waits.

Both speak ZeroMQ's protocol to clients of any kind: SUB and XSUB here, DEALER and REQ there. Whatever clients send, of
a subscriber only the prefixes of the one topic are kept, and of a reader of replays one replay.
"""

from __future__ import annotations

import time
from typing import Final

import attrs
import structlog

from kvcr_actors.errors import EventFormatError
from kvcr_actors.events.clients import Client, Server
from kvcr_actors.events.config import EventsConfig
from kvcr_actors.events.stream import EventStream, Message
from kvcr_actors.events.wire import END_OF_REPLAY, decode_sequence, encode_sequence
from kvcr_actors.events.zmtp import CANCEL, PUBLISHER, REPLIER, SUBSCRIBE, encode_message

log = structlog.get_logger()

_REPLAYS: Final = 64
"""Replays that may be under way; the oldest ends for a further one."""
_REPLAY_SLICE: Final = 32
_REPLAY_QUEUE: Final = 16
"""Batches that wait for a reader of a replay; the rest follows as it reads."""
_REPLAY_STALL_S: Final = 30.0
"""How long a reader may take nothing of its replay before it ends."""
_BUSY_LOOK_S: Final = 0.005
_IDLE_LOOK_S: Final = 0.05
_LINGER_S: Final = 1.0


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
        self._replays: dict[Client, _Replay] = {}
        self._bad_requests = 0
        self._tells_joiners = config.begins_anew_on_join
        self._pub = Server(PUBLISHER, config.events.at(config.data_parallel_rank), "events", config.queue_batches)
        self._router: Server | None = None
        if config.replay is not None:
            try:
                self._router = Server(REPLIER, config.replay.at(config.data_parallel_rank), "replay", _REPLAY_QUEUE)
            except BaseException:
                self._pub.close(0)
                raise

    @property
    def next_look_s(self) -> float:
        """When readers want the next turn."""
        is_busy = self._replays or self._pub.is_busy or (self._router is not None and self._router.is_busy)
        return _BUSY_LOOK_S if is_busy else _IDLE_LOOK_S

    def send(self, message: Message) -> None:
        """Publish a batch; for a reader whose queue is full it is lost."""
        sequence, payload = message
        buffers = encode_message((self._topic, encode_sequence(sequence), payload))
        for client in self._pub.clients:
            if client.prefixes:
                self._pub.send(client, buffers)

    def serve_readers(self, stream: EventStream) -> None:
        """Look at who joined and who asks for a replay; send each replay's next batches, as far as its reader takes."""
        for client, frames in self._pub.turn():
            joins = [self._note_interest(client, frame) for frame in frames]
            if self._tells_joiners and any(joins):
                stream.ask_snapshot()
        router = self._router
        if router is None:
            return
        for client, frames in router.turn():
            self._begin(router, client, frames, stream)
        now = time.monotonic()
        for reader, replay in list(self._replays.items()):
            if not reader.is_open:
                del self._replays[reader]
            elif reader.has_room:
                self._continue(router, reader, stream)
            elif now - replay.moved_at > _REPLAY_STALL_S:
                self._give_up(router, reader, stream)

    def close(self) -> None:
        """Close both; what is queued has a second to leave."""
        self._pub.close(_LINGER_S)
        if self._router is not None:
            self._router.close(0)

    def _note_interest(self, client: Client, frame: bytes) -> bool:
        """Count a subscription, or one less, to the topic; whether it is one more. What can never match is nothing."""
        action, prefix = frame[:1], frame[1:]
        if not self._topic.startswith(prefix):
            return False
        if action == SUBSCRIBE:
            client.prefixes[prefix] += 1
        elif action == CANCEL and client.prefixes[prefix] > 1:
            client.prefixes[prefix] -= 1
        elif action == CANCEL:
            del client.prefixes[prefix]
        return action == SUBSCRIBE

    def _begin(self, router: Server, client: Client, frames: tuple[bytes, ...], stream: EventStream) -> None:
        try:
            start = decode_sequence(b"" if len(frames) != 2 or frames[0] else frames[1])
        except EventFormatError as error:
            self._bad_requests += 1
            if self._bad_requests & (self._bad_requests - 1) == 0:  # the first, the second, the fourth ...
                log.warning("events.bad_replay_request", count=self._bad_requests, error=str(error))
            return
        self._replays.pop(client, None)
        while len(self._replays) >= _REPLAYS:
            self._give_up(router, next(iter(self._replays)), stream)
        self._replays[client] = _Replay(start, stream.newest, stream.covers(start), time.monotonic())

    def _continue(self, router: Server, reader: Client, stream: EventStream) -> None:
        replay = self._replays[reader]
        replay.is_whole = replay.is_whole and stream.covers(replay.next)
        batches = [batch for batch in stream.replay(replay.next, _REPLAY_SLICE) if batch[0] <= replay.end]
        for sequence, payload in batches:
            if not router.send(reader, encode_message((b"", self._topic, encode_sequence(sequence), payload))):
                return  # its queue is full, and the next turn tries again; or it is gone
            replay.next, replay.moved_at = sequence + 1, time.monotonic()
        if not batches or replay.next > replay.end:  # none: what is left of it is no longer kept
            if not router.send(reader, encode_message((b"", self._topic, END_OF_REPLAY, b""))):
                return
            if not replay.is_whole:
                stream.ask_snapshot()
            del self._replays[reader]

    def _give_up(self, router: Server, reader: Client, stream: EventStream) -> None:
        """End a replay that its reader leaves unread, or that is one too many; a snapshot tells it the rest."""
        replay = self._replays.pop(reader)
        log.info("events.replay_given_up", unread=replay.end - replay.next + 1)
        router.drop(reader)
        stream.ask_snapshot()
