"""ZMTP 3, ZeroMQ's protocol, for the side that binds, without I/O: bytes of one client in, its messages out.

libzmq's sockets cannot bound what clients make them hold. PUB and XPUB keep every subscription, with
ZMQ_XPUB_MANUAL too, and ROUTER every frame of a message until its last one comes; MAXMSGSIZE, RCVHWM and HANDSHAKE_IVL
leave both as they are. Here a client can fill one frame and one message of a few frames, and nothing else: what it
subscribes to is for the caller to keep, who needs only the prefixes of its one topic.

Spoken is version 3.0 with the mechanism NULL, which every ZeroMQ since 2013 falls back to. The commands of 3.1 are
understood as well: a subscription that comes as a command is given as the message that it was before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

import attrs

SUBSCRIBE: Final = b"\x01"
CANCEL: Final = b"\x00"
"""First bytes of what a subscriber sends; the prefix of the topics follows."""

MAX_FRAME_BYTES: Final = 512
MAX_FRAMES: Final = 8

_GREETING_BYTES: Final = 64
_VERSION_AT: Final = 10
_MECHANISM: Final = slice(12, 32)
_MORE, _LONG, _COMMAND = 1, 2, 4
_SHORTEST_LONG: Final = 256

GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
"""What the side that binds sends first."""

Buffers: TypeAlias = tuple[bytes, bytes]
"""A message as it goes out: everything before the last frame's body, and that body."""


class ClientError(Exception):
    """A client speaks something else, or exceeds a bound: its connection ends."""


@attrs.frozen
class Role:
    """What a socket is, and which sockets may connect to it."""

    own: bytes
    clients: frozenset[bytes]


PUBLISHER: Final = Role(b"PUB", frozenset({b"SUB", b"XSUB"}))
REPLIER: Final = Role(b"ROUTER", frozenset({b"DEALER", b"REQ", b"ROUTER"}))


def encode_message(frames: Sequence[bytes]) -> Buffers:
    """Give a message's bytes; the body of its last frame is not copied."""
    *first, last = frames
    parts = [part for frame in first for part in (_frame_head(_MORE, len(frame)), frame)]
    return b"".join([*parts, _frame_head(0, len(last))]), last


class ClientStream:
    """What one client sends. `answers` collects what is to be sent to it for the protocol's sake."""

    def __init__(self, role: Role) -> None:
        self.answers: list[bytes] = [GREETING]
        self.is_ready = False
        """Whether the handshake is over."""
        self._role = role
        self._buffer = bytearray()
        self._greeted = False
        self._frames: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[tuple[bytes, ...]]:
        """Take bytes and give the messages that they end; ClientError if they are no such protocol, or too much."""
        self._buffer += data
        if not self._greeted and not self._take_greeting():
            return
        while (frame := self._take_frame()) is not None:
            message = self._handle(*frame)
            if message is not None:
                yield message

    def _take_greeting(self) -> bool:
        got = bytes(self._buffer[:_GREETING_BYTES])
        if got[:1] != b"\xff" or (len(got) >= _VERSION_AT and not got[_VERSION_AT - 1] & 1):
            raise ClientError("it does not speak ZeroMQ's protocol")
        if len(got) > _VERSION_AT and got[_VERSION_AT] < 3:
            raise ClientError(f"it speaks version {got[_VERSION_AT]} of ZeroMQ's protocol; 3 is needed")
        if len(got) < _GREETING_BYTES:
            return False
        mechanism = got[_MECHANISM].rstrip(b"\0")
        if mechanism != b"NULL":
            raise ClientError(f"it wants the mechanism {mechanism!r}; here is only NULL")
        del self._buffer[:_GREETING_BYTES]
        self._greeted = True
        return True

    def _take_frame(self) -> tuple[int, bytes] | None:
        buffer = self._buffer
        if len(buffer) < 2:
            return None
        flags, start = buffer[0], 9 if buffer[0] & _LONG else 2
        if flags & ~(_MORE | _LONG | _COMMAND):
            raise ClientError(f"a frame with the flags {flags:#x}")
        if len(buffer) < start:
            return None
        end = start + int.from_bytes(buffer[1:start], "big")
        if end - start > MAX_FRAME_BYTES:
            raise ClientError(f"a frame of {end - start} bytes; the most is {MAX_FRAME_BYTES}")
        if len(buffer) < end:
            return None
        body = bytes(buffer[start:end])
        del buffer[:end]
        return flags, body

    def _handle(self, flags: int, body: bytes) -> tuple[bytes, ...] | None:
        """Take one frame; give the message that it ends, if it does."""
        if flags & _COMMAND:
            return self._command(body[1 : 1 + body[0]] if body else b"", body[1 + body[0] :] if body else b"")
        if not self.is_ready:
            raise ClientError("a message before the handshake")
        self._frames.append(body)
        if len(self._frames) > MAX_FRAMES:
            raise ClientError(f"a message of more than {MAX_FRAMES} frames")
        if flags & _MORE:
            return None
        message, self._frames = tuple(self._frames), []
        return message

    def _command(self, name: bytes, rest: bytes) -> tuple[bytes, ...] | None:
        if not self.is_ready:
            if name != b"READY":
                raise ClientError(f"the command {name!r} before READY")
            self._begin(rest)
        elif name == b"PING":
            self.answers.append(_command(b"PONG", rest[2:]))  # behind a time to live of two bytes
        elif name == b"SUBSCRIBE":
            return (SUBSCRIBE + rest,)
        elif name == b"CANCEL":
            return (CANCEL + rest,)
        elif name == b"ERROR":
            raise ClientError(f"it reports {rest[1:]!r}")
        return None

    def _begin(self, metadata: bytes) -> None:
        kind = dict(_properties(metadata)).get(b"socket-type", b"")
        if kind not in self._role.clients:
            allowed = ", ".join(sorted(name.decode() for name in self._role.clients))
            raise ClientError(f"it is a {kind!r} socket; here connect {allowed}")
        self.is_ready = True
        properties = _property(b"Socket-Type", self._role.own) + _property(b"Identity", b"")
        self.answers.append(_command(b"READY", properties))


def _frame_head(flags: int, size: int) -> bytes:
    if size < _SHORTEST_LONG:
        return bytes((flags, size))
    return bytes((flags | _LONG,)) + size.to_bytes(8, "big")


def _command(name: bytes, rest: bytes) -> bytes:
    body = bytes((len(name),)) + name + rest
    return _frame_head(_COMMAND, len(body)) + body


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value


def _properties(metadata: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Names, in small letters, and values; ClientError if one is cut off."""
    at = 0
    while at < len(metadata):
        value_at = at + 1 + metadata[at] + 4
        end = value_at + int.from_bytes(metadata[value_at - 4 : value_at], "big")
        if end > len(metadata):
            raise ClientError("a READY command that is cut off")
        yield metadata[at + 1 : value_at - 4].lower(), metadata[value_at:end]
        at = end
