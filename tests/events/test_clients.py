"""Clients of a publisher's sockets, libzmq's and hostile ones: what they can make it hold is bounded."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import pytest
import structlog
import zmq

from kvcr_actors.errors import EventEndpointError
from kvcr_actors.events import clients
from kvcr_actors.events.clients import Client
from kvcr_actors.events.config import EventsConfig
from kvcr_actors.events.contexts import ContextTable
from kvcr_actors.events.endpoints import Endpoint
from kvcr_actors.events.listening import Listener
from kvcr_actors.events.sockets import PublisherSockets
from kvcr_actors.events.stream import EventStream
from kvcr_actors.events.wire import END_OF_REPLAY, encode_sequence
from kvcr_actors.events.zmtp import GREETING, encode_message

pytestmark = pytest.mark.timeout(60)

INTRODUCTION = GREETING + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"
"""All that a subscriber says before its subscriptions."""


class Rig:
    """A publisher without its thread: a test gives it its turns."""

    def __init__(self, config: EventsConfig) -> None:
        self.config = config
        self.stream = EventStream(config.wire, ContextTable(), count().__next__)
        self.sockets = PublisherSockets(config)

    def until(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not happened():
            assert time.monotonic() < deadline
            self.sockets.serve_readers(self.stream)
            time.sleep(0.001)

    @property
    def subscribers(self) -> list[Client]:
        return list(self.sockets._pub.clients)


@pytest.fixture(params=["ipc", "tcp"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[Rig]:
    if request.param == "ipc":
        config = EventsConfig(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay", topic="kv-events")
    else:
        config = EventsConfig(str(free_port()), str(free_port()), topic="kv-events")
    made = Rig(config)
    yield made
    made.sockets.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def dialled(kind: int, endpoint: Endpoint | None) -> Generator[zmq.Socket[bytes]]:
    assert endpoint is not None
    with zmq.Context[zmq.Socket[bytes]].instance().socket(kind) as made:
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.SNDHWM, 0)
        made.connect(endpoint.at(0))
        yield made


def raw(endpoint: Endpoint | None) -> socket.socket:
    """A connection that says nothing by itself."""
    assert endpoint is not None
    if endpoint.scheme == "ipc":
        made = socket.socket(socket.AF_UNIX)
        made.connect(endpoint.host)
        return made
    return socket.create_connection((endpoint.host, endpoint.port))


@pytest.mark.parametrize("topic", [b"", b"kv", b"kv-events"])
def test_a_subscriber_to_the_topic_or_its_beginning_hears_batches(rig: Rig, topic: bytes) -> None:
    with dialled(zmq.SUB, rig.config.events) as reader:
        reader.setsockopt(zmq.SUBSCRIBE, topic)
        rig.until(lambda: any(client.prefixes for client in rig.subscribers))
        rig.sockets.send((7, b"payload" * 1_000))
        assert reader.poll(5_000)
        assert reader.recv_multipart() == [b"kv-events", encode_sequence(7), b"payload" * 1_000]
        reader.setsockopt(zmq.UNSUBSCRIBE, topic)
        rig.until(lambda: not any(client.prefixes for client in rig.subscribers))


def test_a_subscriber_to_another_topic_hears_nothing(rig: Rig) -> None:
    with dialled(zmq.SUB, rig.config.events) as reader:
        reader.setsockopt(zmq.SUBSCRIBE, b"kv-events-of-others")
        reader.setsockopt(zmq.SUBSCRIBE, b"kv")
        rig.until(lambda: any(client.prefixes for client in rig.subscribers))
        reader.setsockopt(zmq.UNSUBSCRIBE, b"kv")  # and what came before it was looked at
        rig.until(lambda: not any(client.prefixes for client in rig.subscribers))
        rig.sockets.send((7, b"payload"))
        assert not reader.poll(100)


def test_subscriptions_and_messages_of_a_subscriber_leave_nothing_behind(rig: Rig) -> None:
    frames = [b"\x01kv", *[b"\x01" + os.urandom(100), b"\x02" + os.urandom(100), b"\x01"] * 300, b"\x00", b"\x00k"]
    with raw(rig.config.events) as flood:
        flood.sendall(INTRODUCTION + b"".join(b"".join(encode_message((frame,))) for frame in frames))
        rig.until(lambda: any(client.prefixes[b""] == 299 for client in rig.subscribers))
        (client,) = rig.subscribers
        assert +client.prefixes == {b"": 299, b"kv": 1}
        assert len(client.stream._buffer) < 1_024


def test_a_message_without_end_costs_its_sender_the_connection(rig: Rig) -> None:
    with structlog.testing.capture_logs() as logs, dialled(zmq.DEALER, rig.config.replay) as flood:
        flood.send_multipart([bytes(200)] * 1_000)
        rig.until(lambda: bool(logs))
    assert logs[0]["error"] == "a message of more than 8 frames"


def test_a_frame_without_end_costs_its_sender_the_connection(rig: Rig) -> None:
    with structlog.testing.capture_logs() as logs, raw(rig.config.events) as flood:
        flood.sendall(INTRODUCTION + b"\x02" + (1 << 40).to_bytes(8, "big"))
        rig.until(lambda: bool(logs))
    assert logs[0]["error"] == "a frame of 1099511627776 bytes; the most is 512"


def test_who_only_connects_makes_room_for_those_who_speak(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "CLIENTS", 4)
    silent = [raw(rig.config.events) for _ in range(9)]
    rig.until(lambda: len(rig.subscribers) == 4)
    with dialled(zmq.SUB, rig.config.events) as reader:
        reader.setsockopt(zmq.SUBSCRIBE, b"")
        rig.until(lambda: any(client.prefixes for client in rig.subscribers))
        assert len(rig.subscribers) <= 4
    for connection in silent:
        connection.close()


def test_one_client_too_many_is_refused_and_those_before_it_stay(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "CLIENTS", 1)
    with structlog.testing.capture_logs() as logs, dialled(zmq.SUB, rig.config.events) as reader:
        reader.setsockopt(zmq.SUBSCRIBE, b"")
        rig.until(lambda: any(client.prefixes for client in rig.subscribers))
        first = rig.subscribers
        with raw(rig.config.events):
            rig.until(lambda: bool(logs))
        assert rig.subscribers == first
    assert logs[0]["error"] == "1 clients are connected, which is the most"


def test_who_does_not_introduce_itself_in_time_is_let_go(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_HANDSHAKE_S", 0.05)
    with structlog.testing.capture_logs() as logs, raw(rig.config.events) as silent:
        silent.sendall(GREETING[:20])
        rig.until(lambda: bool(logs))
        assert logs[0]["error"] == "no handshake"
        assert not rig.subscribers


def test_a_subscriber_that_never_reads_has_a_bounded_queue(tmp_path: Path) -> None:
    rig = Rig(EventsConfig(f"ipc://{tmp_path}/events", queue_batches=10))
    with dialled(zmq.SUB, rig.config.events) as reader:
        reader.setsockopt(zmq.RCVHWM, 1)
        reader.setsockopt(zmq.SUBSCRIBE, b"")
        rig.until(lambda: any(client.prefixes for client in rig.subscribers))
        for number in range(200):
            rig.sockets.send((number, bytes(200_000)))
        (client,) = rig.subscribers
        assert not client.has_room
        assert len(client._out) <= 20
    rig.sockets.close()


def test_what_a_publisher_sent_last_is_read_after_it_closed(tmp_path: Path) -> None:
    rig = Rig(EventsConfig(f"ipc://{tmp_path}/events"))
    with dialled(zmq.SUB, rig.config.events) as reader:
        reader.setsockopt(zmq.SUBSCRIBE, b"")
        rig.until(lambda: any(client.prefixes for client in rig.subscribers))
        rig.sockets.send((1, bytes(100_000)))
        rig.sockets.close()
        assert reader.poll(5_000)
        assert len(reader.recv_multipart()[2]) == 100_000


def test_a_request_socket_gets_a_replay_as_vllms_readers_ask_for_it(rig: Rig) -> None:
    for _ in range(3):
        rig.stream.heartbeat(0.0)
    with dialled(zmq.REQ, rig.config.replay) as reader:
        reader.send(encode_sequence(2))
        rig.until(lambda: bool(reader.poll(0)))
        assert reader.recv_multipart()[1] == encode_sequence(2)
    with dialled(zmq.DEALER, rig.config.replay) as reader:
        reader.send_multipart((b"", encode_sequence(0)))
        got: list[Sequence[bytes]] = []

        def ended() -> bool:
            while reader.poll(0):
                got.append(reader.recv_multipart())
            return bool(got) and got[-1][-2] == END_OF_REPLAY

        rig.until(ended)
        assert [frames[-2] for frames in got[:-1]] == [encode_sequence(number) for number in range(3)]


def test_the_oldest_of_too_many_replays_ends_with_its_connection(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcr_actors.events.sockets._REPLAYS", 1)
    monkeypatch.setattr("kvcr_actors.events.sockets._REPLAY_SLICE", 0)
    with structlog.testing.capture_logs() as logs, dialled(zmq.DEALER, rig.config.replay) as first:
        monkeypatch.setattr(PublisherSockets, "_continue", lambda sockets, router, reader, stream: None)
        first.send_multipart((b"", encode_sequence(0)))
        rig.until(lambda: len(rig.sockets._replays) == 1)
        with dialled(zmq.DEALER, rig.config.replay) as second:
            second.send_multipart((b"", encode_sequence(0)))
            rig.until(lambda: bool(logs))
    assert logs[0]["event"] == "events.replay_given_up"
    assert len(rig.sockets._replays) == 1


def test_a_replay_from_beyond_every_number_ends_at_once(rig: Rig) -> None:
    rig.stream.heartbeat(0.0)
    with dialled(zmq.DEALER, rig.config.replay) as reader:
        reader.send_multipart((b"", b"\xff" * 8))
        rig.until(lambda: bool(reader.poll(0)))
        assert reader.recv_multipart()[-2:] == [END_OF_REPLAY, b""]


def test_a_client_that_joins_is_awaited_until_it_has_said_all(rig: Rig) -> None:
    with raw(rig.config.events) as joining:
        joining.sendall(INTRODUCTION + b"\x00\x01\x02")
        rig.until(lambda: any(client.stream.is_ready for client in rig.subscribers))
        assert rig.sockets._pub.is_busy  # else a thousand subscriptions would take seconds


def test_who_takes_nothing_does_not_keep_the_thread_awake(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_PATIENCE_S", 0.05)
    with raw(rig.config.events) as stuck:
        stuck.sendall(INTRODUCTION + b"\x00\x01\x01")
        rig.until(lambda: any(client.prefixes for client in rig.subscribers))
        for number in range(50):
            rig.sockets.send((number, bytes(500_000)))
        assert any(client.has_output for client in rig.subscribers)
        rig.until(lambda: not rig.sockets._pub.is_busy)
        assert any(client.has_output for client in rig.subscribers)


def test_a_connection_that_ends_ends_for_its_client_although_a_forked_child_has_it_too(rig: Rig) -> None:
    with raw(rig.config.events) as peer:
        rig.until(lambda: bool(rig.subscribers))
        (client,) = rig.subscribers
        inherited = os.dup(client.connection.fileno())
        rig.sockets._pub.drop(client)
        peer.settimeout(5)
        while peer.recv(4096):
            pass
        assert not rig.sockets._pub._epoll.poll(0)
        os.close(inherited)


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_an_endpoint_that_is_closed_is_free_although_a_forked_child_has_it_too(tmp_path: Path, scheme: str) -> None:
    address = f"ipc://{tmp_path}/events" if scheme == "ipc" else f"tcp://127.0.0.1:{free_port()}"
    first = Listener(address, "events")
    inherited = os.dup(first.socket.fileno())
    first.close()
    Listener(address, "events").close()
    os.close(inherited)


@contextmanager
def descriptors_left(count: int) -> Generator[None]:
    """Leave as many file descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + count, hard))
    taken: list[int] = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for handle in taken[len(taken) - count :]:
            os.close(handle)
        del taken[len(taken) - count :]
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for handle in taken:
            os.close(handle)


@pytest.mark.parametrize("left", [0, 1, 2, 3])
def test_a_start_without_descriptors_names_the_endpoint_and_leaves_no_port(left: int) -> None:
    ports = free_port(), free_port()
    config = EventsConfig(*map(str, ports))
    complaint = r"(events|replay) endpoint tcp://.*Too many open files"
    with descriptors_left(left), pytest.raises(EventEndpointError, match=complaint) as told:
        PublisherSockets(config)
    for port in ports:
        Listener(f"tcp://127.0.0.1:{port}", "events").close()
    assert told.value.__traceback__  # which would keep a listener alive


def test_clients_wait_while_there_is_no_descriptor_for_them(rig: Rig) -> None:
    with structlog.testing.capture_logs() as logs, raw(rig.config.events) as waiting:
        waiting.sendall(INTRODUCTION)
        with descriptors_left(0):
            rig.sockets.serve_readers(rig.stream)
        assert logs[0]["error"] == "[Errno 24] Too many open files"
        assert not rig.subscribers
        rig.until(lambda: any(client.stream.is_ready for client in rig.subscribers))


_WRITES_TO_ONE_THAT_IS_GONE = """
import signal, socket
from kvcr_actors.events.clients import Client
from kvcr_actors.events.zmtp import PUBLISHER, encode_message
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
here, there = socket.socketpair()
there.close()
client = Client(here, PUBLISHER, 1)
client.put(encode_message((b"x",)))
try:
    client.write()
except BrokenPipeError:
    print("told")
"""


def test_a_client_that_is_gone_costs_no_process_that_wants_sigpipe() -> None:
    command = [sys.executable, "-c", _WRITES_TO_ONE_THAT_IS_GONE]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "told\n")


@pytest.mark.parametrize("is_relative", [False, True])
def test_a_file_at_the_path_of_a_socket_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_relative: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "precious"
    path.write_text("precious")
    config = EventsConfig("ipc://precious" if is_relative else f"ipc://{path}")
    with pytest.raises(EventEndpointError, match=f"ipc://{path}: there is something that is no socket; free it"):
        PublisherSockets(config)
    assert path.read_text() == "precious"


def test_a_link_and_a_folder_at_the_path_of_a_socket_stay(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "folder").mkdir()
    for name in ("link", "folder"):
        with pytest.raises(EventEndpointError, match="no socket"):
            Listener(f"ipc://{tmp_path}/{name}", "events")
    assert (tmp_path / "link").is_symlink()


def test_a_socket_that_nobody_serves_is_replaced_and_goes_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "events"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    listener = Listener(f"ipc://{path}", "events")
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    listener.close()
    assert not path.exists()


def test_a_path_that_another_took_meanwhile_is_left_to_it(tmp_path: Path) -> None:
    path = tmp_path / "events"
    listener = Listener(f"ipc://{path}", "events")
    path.rename(tmp_path / "moved")
    path.write_text("another's")
    listener.close()
    assert path.read_text() == "another's"


@pytest.mark.parametrize("is_relative", [False, True])
def test_a_socket_that_is_served_is_left_to_its_publisher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_relative: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    first = Listener(f"ipc://{tmp_path}/events", "events")
    config = EventsConfig("ipc://events" if is_relative else f"ipc://{tmp_path}/events")
    with pytest.raises(EventEndpointError, match="Address already in use; free it"):
        PublisherSockets(config)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / "events"))
    first.close()


@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        ("ipc:///no/such/folder/x", "No such file or directory"),
        (f"ipc:///tmp/{'x' * 200}", "AF_UNIX path too long"),
        ("tcp://192.0.2.1:5557", "Cannot assign requested address"),
    ],
)
def test_an_address_that_cannot_be_bound_is_named(address: str, complaint: str) -> None:
    with pytest.raises(EventEndpointError, match=f"events endpoint {address}: {complaint}"):
        Listener(address, "events")


@pytest.mark.parametrize("host", ["*", "lo", "localhost", "127.0.0.2", "[::1]"])
def test_every_way_to_name_an_address_of_this_machine_is_bound(host: str) -> None:
    port = free_port()
    listener = Listener(f"tcp://{host}:{port}", "events")
    with socket.create_connection(("::1" if host == "[::1]" else "127.0.0.2" if "2" in host else "127.0.0.1", port)):
        pass
    listener.close()


def test_an_abstract_name_takes_no_path() -> None:
    name = f"@kvcr-actors-{os.getpid()}"
    listener = Listener(f"ipc://{name}", "events")
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(f"\0{name[1:]}")
    with pytest.raises(EventEndpointError, match="in use"):
        Listener(f"ipc://{name}", "events")
    listener.close()
    assert not Path(name).exists()
