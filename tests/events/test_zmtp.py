"""ZeroMQ's protocol without sockets: what a client may say, what is refused, and that it is held to its bounds."""

from __future__ import annotations

import pytest

from kvcr_actors.events.zmtp import (
    GREETING,
    MAX_FRAME_BYTES,
    PUBLISHER,
    REPLIER,
    ClientError,
    ClientStream,
    Role,
    encode_message,
)


def command(name: bytes, rest: bytes = b"") -> bytes:
    body = bytes((len(name),)) + name + rest
    return bytes((4, len(body))) + body


def ready(kind: bytes) -> bytes:
    return command(b"READY", b"\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind)


def introduced(role: Role = PUBLISHER, kind: bytes = b"SUB") -> ClientStream:
    stream = ClientStream(role)
    assert list(stream.feed(GREETING + ready(kind))) == []
    assert stream.is_ready
    return stream


def wire(*frames: bytes) -> bytes:
    return b"".join(encode_message(frames))


def test_a_client_is_greeted_at_once_and_answered_when_it_is_ready() -> None:
    stream = ClientStream(PUBLISHER)
    assert stream.answers == [GREETING]
    assert len(GREETING) == 64
    list(stream.feed(GREETING + ready(b"XSUB")))
    assert stream.answers[1] == command(b"READY", b"\x0bSocket-Type\x00\x00\x00\x03PUB\x08Identity\x00\x00\x00\x00")


def test_bytes_may_come_one_at_a_time() -> None:
    stream = ClientStream(REPLIER)
    data = GREETING + ready(b"REQ") + wire(b"", b"x" * 300) + wire(b"y")
    messages = [message for place in range(len(data)) for message in stream.feed(data[place : place + 1])]
    assert messages == [(b"", b"x" * 300), (b"y",)]


def test_subscriptions_of_both_versions_are_one_thing() -> None:
    stream = introduced()
    data = wire(b"\x01kv") + command(b"SUBSCRIBE", b"kv") + command(b"CANCEL", b"kv") + command(b"SOMETHING")
    assert list(stream.feed(data)) == [(b"\x01kv",), (b"\x01kv",), (b"\x00kv",)]


def test_a_ping_is_answered_with_what_it_carries() -> None:
    stream = introduced()
    stream.answers.clear()
    assert list(stream.feed(command(b"PING", b"\x00\x0acontext"))) == []
    assert stream.answers == [command(b"PONG", b"context")]


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"GET / HTTP/1.1", "does not speak"),
        (b"\xff" + bytes(9), "does not speak"),
        (b"\x01\x00", "does not speak"),
        (GREETING[:10] + b"\x01", "version 1"),
        (GREETING.replace(b"NULL", b"PLAIN", 1)[:64], "mechanism b'PLAIN"),
        (GREETING + wire(b"\x01"), "before the handshake"),
        (GREETING + command(b"PING", b"\0\0"), "b'PING' before READY"),
        (GREETING + bytes((4, 0)), "b'' before READY"),
        (GREETING + ready(b"PUSH"), r"a b'PUSH' socket; here connect SUB, XSUB"),
        (GREETING + command(b"READY", b"\x0bSocket-Type\x00\x00\x00\xffSUB"), "cut off"),
        (GREETING + ready(b"SUB") + command(b"ERROR", b"\x04oops"), "reports b'oops'"),
        (GREETING + ready(b"SUB") + b"\x08\x00", "flags 0x8"),
        (GREETING + ready(b"SUB") + b"\x02" + (64 << 20).to_bytes(8, "big"), "a frame of 67108864 bytes"),
        (GREETING + ready(b"SUB") + wire(b"x" * (MAX_FRAME_BYTES + 1)), "a frame of 513 bytes"),
        (GREETING + ready(b"SUB") + b"\x01\x00" * 9, "more than 8 frames"),
    ],
)
def test_what_is_no_such_client_is_refused(data: bytes, complaint: str) -> None:
    stream = ClientStream(PUBLISHER)
    with pytest.raises(ClientError, match=complaint):
        list(stream.feed(data))


def test_whatever_comes_the_most_that_is_kept_is_a_message_of_a_few_frames() -> None:
    stream = introduced()
    for _ in range(1_000):
        list(stream.feed(wire(b"\x01" + b"x" * 200)))
    list(stream.feed(b"\x03" + MAX_FRAME_BYTES.to_bytes(8, "big") + b"x" * (MAX_FRAME_BYTES - 1)))
    assert len(stream._buffer) + sum(map(len, stream._frames)) < 8 * MAX_FRAME_BYTES
