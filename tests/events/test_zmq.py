"""The sink and the reader over real sockets: nothing blocks, nothing is lost for good, silence is noticed."""

from __future__ import annotations

import socket
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
import structlog
import zmq

from kvcr_actors.core.inventory import BlocksRemoved, BlocksStored, InventoryEvent
from kvcr_actors.core.keys import KeyAdapter, PageKeyAdapter, RouterForm, chain_seed, page_keys, router_key
from kvcr_actors.errors import ConfigError, DeadlineError, EventEndpointError
from kvcr_actors.events import sequence
from kvcr_actors.events.config import EventsConfig
from kvcr_actors.events.contexts import ContextTable, Origin
from kvcr_actors.events.follower import StreamFollower
from kvcr_actors.events.reader import EventReader
from kvcr_actors.events.sockets import PublisherSockets
from kvcr_actors.events.stream import EventStream, Message, StreamLimits
from kvcr_actors.events.wire import END_OF_REPLAY, AllBlocksCleared, decode_batch, encode_sequence
from kvcr_actors.events.zmq import ZmqEventSink
from kvcr_actors.testing.services import open_services
from kvcr_actors.types import PageContext, PageKey, Tier

pytestmark = [pytest.mark.anyio, pytest.mark.real_clock, pytest.mark.timeout(60)]

TOKENS = list(range(4_000))
KEYS = page_keys(TOKENS, 4, chain_seed(page_tokens=4))
CONTEXTS = ContextTable()
CONTEXTS.note(KEYS, PageContext(TOKENS, 4))
HASHES = [router_key(key) for key in KEYS]


def stored(first: int, last: int) -> BlocksStored:
    return BlocksStored(Tier.HOST, KEYS[first:last], (None, *KEYS)[first:last])


def removed(keys: Sequence[PageKey]) -> BlocksRemoved:
    return BlocksRemoved(Tier.HOST, tuple(reversed(keys)))


def config_at(folder: Path, *, replay: bool = True, **more: Any) -> EventsConfig:
    values = {"heartbeat_s": 0.1, "silent_after_s": 1.0, **more}
    return EventsConfig(f"ipc://{folder}/events", f"ipc://{folder}/replay" if replay else None, **values)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@asynccontextmanager
async def publishing(config: EventsConfig, keys: KeyAdapter[Any] | None = None) -> AsyncGenerator[ZmqEventSink]:
    async with open_services() as services:
        sink = ZmqEventSink(config, CONTEXTS, keys)
        await sink.open(services)
        try:
            yield sink
        finally:
            await sink.close(10)


async def follow(
    config: EventsConfig, until: Callable[[StreamFollower], bool], *, replay: bool = True, timeout_s: float = 15
) -> StreamFollower:
    """Read in a thread until the follower satisfies a condition."""
    replays = config.replay.at(0) if replay and config.replay is not None else None
    stop = threading.Event()

    def read() -> StreamFollower:
        with EventReader(config.events.at(0), replays) as reader:
            while not until(reader.follower) and not stop.is_set():
                reader.read(0.1)
            return reader.follower

    with anyio.fail_after(timeout_s):
        try:
            return await anyio.to_thread.run_sync(read, abandon_on_cancel=True)
        finally:
            stop.set()


def holds(*hashes: int) -> Callable[[StreamFollower], bool]:
    return lambda follower: follower.index.keys(Tier.HOST) == set(hashes) and not follower.in_doubt


@pytest.mark.parametrize("form", [RouterForm.WHOLE, RouterForm.LAST_64])
async def test_pages_are_called_what_the_engine_calls_them(tmp_path: Path, form: RouterForm) -> None:
    config = config_at(tmp_path, dialect="vllm")
    names = PageKeyAdapter(form)
    async with publishing(config, names) as sink:
        sink.publish([stored(0, 40)])
        sink.publish([removed(KEYS[30:40])])
        expected = frozenset(map(names.encode_to_router, KEYS[:30]))
        follower = await follow(config, lambda follower: follower.index.keys(Tier.HOST) == expected)
    assert follower.index.keys(Tier.HOST) == expected


async def test_a_form_that_the_dialects_readers_do_not_take_is_refused_when_the_sink_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dialect dynamo: its readers take no block hash such as b'"):
        ZmqEventSink(config_at(tmp_path), CONTEXTS, PageKeyAdapter(RouterForm.WHOLE))


async def test_a_reader_that_joins_late_asks_for_what_it_missed(tmp_path: Path) -> None:
    config = config_at(tmp_path)
    async with publishing(config) as sink:
        sink.publish([stored(0, 10)])
        follower = await follow(config, holds(*HASHES[:10]))
        assert not follower.faults
        assert sink.describe()["snapshots"] == 1


async def test_a_reader_that_cannot_ask_is_told_everything(tmp_path: Path) -> None:
    config = config_at(tmp_path, replay=False)
    async with publishing(config) as sink:
        sink.publish([stored(0, 10)])
        assert not (await follow(config, holds(*HASHES[:10]))).faults


async def test_a_lost_batch_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_at(tmp_path)
    lost: list[Message] = []
    send = PublisherSockets.send

    def lossy(sockets: PublisherSockets, message: Message) -> None:
        if len(message[1]) > 200 and not lost:
            lost.append(message)
        else:
            send(sockets, message)

    monkeypatch.setattr(PublisherSockets, "send", lossy)
    async with publishing(config) as sink, anyio.create_task_group() as tasks:
        followed: list[StreamFollower] = []

        async def read() -> None:
            followed.append(await follow(config, holds(*HASHES[:4])))

        tasks.start_soon(read)
        await anyio.sleep(0.5)
        sink.publish([stored(0, 10)])
        sink.publish([removed(KEYS[4:10])])
    assert lost
    assert not followed[0].faults


async def test_numbers_move_forward_over_a_restart(tmp_path: Path) -> None:
    config = config_at(tmp_path, sequence_file=tmp_path / "sequence")
    async with publishing(config) as sink:
        sink.publish([stored(0, 10)])
        before = (await follow(config, holds(*HASHES[:10]))).expected
    async with publishing(config) as sink:
        sink.publish([stored(0, 3)])
        after = await follow(config, holds(*HASHES[:3]))
    assert before is not None
    assert after.expected is not None
    assert after.expected > before


async def test_a_replay_larger_than_every_queue_reaches_a_slow_reader_whole(tmp_path: Path) -> None:
    """One that reads nothing for a while holds up neither the publisher nor other readers."""
    config = config_at(tmp_path, limits=StreamLimits(events=1, blocks=1, payload_bytes=1_024))
    async with publishing(config) as sink:
        for _ in range(2):
            sink.publish([stored(0, 1_000)])
            sink.publish([removed(KEYS)])
        sink.publish([stored(990, 1_000)])
        await follow(config, holds(*HASHES[990:]))
        dealer = zmq.Context.instance().socket(zmq.DEALER)
        dealer.setsockopt(zmq.RCVHWM, 1)
        assert config.replay is not None
        dealer.connect(config.replay.at(0))
        dealer.send_multipart((b"", encode_sequence(0)))
        await anyio.sleep(0.5)
        assert not (await follow(config, holds(*HASHES[990:]))).faults

        def read_all() -> int:
            batches = 0
            while dealer.poll(5_000) and dealer.recv_multipart()[-2] != END_OF_REPLAY:
                batches += 1
            return batches

        with anyio.fail_after(20):
            assert await anyio.to_thread.run_sync(read_all) > 4_000
        dealer.close(0)


@contextmanager
def socket_pair(
    folder: Path, limits: StreamLimits
) -> Generator[tuple[PublisherSockets, EventStream, zmq.Socket[bytes]]]:
    """A publisher without its thread, and the socket of a reader of replays that takes one batch at a time."""
    config = config_at(folder)
    assert config.replay is not None
    stream = EventStream(config.wire, CONTEXTS, count().__next__, limits=limits)
    sockets = PublisherSockets(config)
    dealer = zmq.Context[zmq.Socket[bytes]].instance().socket(zmq.DEALER)
    try:
        dealer.setsockopt(zmq.RCVHWM, 1)
        dealer.connect(config.replay.at(0))
        yield sockets, stream, dealer
    finally:
        dealer.close(0)
        sockets.close()


def send_all(stream: EventStream, events: Sequence[InventoryEvent] = ()) -> list[Message]:
    stream.push(events)
    messages: list[Message] = []
    while (message := stream.next_message(float(stream.batches), 0.0)) is not None:
        messages.append(message)
    return messages


async def test_a_replay_ends_although_its_rest_is_no_longer_kept(tmp_path: Path) -> None:
    """A slow reader must not wait for an end that never comes; a snapshot tells it what it missed."""
    limits = StreamLimits(events=1, blocks=1, payload_bytes=1_024, buffer_batches=1_010, snapshot_pause_s=0.0)
    with socket_pair(tmp_path, limits) as (sockets, stream, dealer):
        send_all(stream, [stored(0, 1_000)])
        dealer.send_multipart((b"", encode_sequence(0)))
        for _ in range(20):  # its queues fill
            sockets.serve_readers(stream)
            await anyio.sleep(0.01)
        send_all(stream, [removed(KEYS)])
        read = 0
        with anyio.fail_after(20):
            while True:
                sockets.serve_readers(stream)
                if await anyio.to_thread.run_sync(dealer.poll, 10):
                    if dealer.recv_multipart()[-2] == END_OF_REPLAY:
                        break
                    read += 1
        assert 0 < read < 1_000
        assert AllBlocksCleared() in [
            event for _, payload in send_all(stream) for event in decode_batch(payload).events
        ]


async def test_a_replay_that_nobody_reads_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcr_actors.events.sockets._REPLAY_STALL_S", 0.0)
    with socket_pair(tmp_path, StreamLimits(events=1, blocks=1, payload_bytes=1_024)) as (sockets, stream, dealer):
        send_all(stream, [stored(0, 1_000)])
        dealer.send_multipart((b"", encode_sequence(0)))
        with anyio.fail_after(20), structlog.testing.capture_logs() as logs:
            while not logs:
                sockets.serve_readers(stream)
                await anyio.sleep(0.01)
        assert [line["event"] for line in logs] == ["events.replay_given_up"]
        assert sockets.next_look_s == 0.05
        assert AllBlocksCleared() in [
            event for _, payload in send_all(stream) for event in decode_batch(payload).events
        ]


async def test_a_flood_of_requests_keeps_no_batch_back(tmp_path: Path) -> None:
    with socket_pair(tmp_path, StreamLimits()) as (sockets, stream, dealer):
        with structlog.testing.capture_logs() as logs:
            for _ in range(500):
                dealer.send_multipart((b"no", b"request"))
            with anyio.fail_after(20):
                while not logs:
                    await anyio.sleep(0.05)
                    sockets.serve_readers(stream)
        assert logs[-1]["count"] <= 64


@pytest.mark.parametrize("frames", [[b"", b"1234567"], [b"x"], [b"x", bytes(8)], [b"", bytes(8), b"more"]])
async def test_a_request_that_is_none_is_ignored(tmp_path: Path, frames: list[bytes]) -> None:
    config = config_at(tmp_path)
    async with publishing(config) as sink:
        dealer = zmq.Context.instance().socket(zmq.DEALER)
        assert config.replay is not None
        dealer.connect(config.replay.at(0))
        dealer.send_multipart(frames)
        sink.publish([stored(0, 2)])
        assert not (await follow(config, holds(*HASHES[:2]))).faults
        assert not dealer.poll(0)
        dealer.close(0)


async def test_a_reader_that_never_reads_costs_a_bounded_queue_and_comes_back_by_a_replay(tmp_path: Path) -> None:
    config = config_at(tmp_path, queue_batches=10, limits=StreamLimits(buffer_batches=20, snapshot_pause_s=0.1))
    async with publishing(config) as sink:
        with EventReader(config.events.at(0), config.replay.at(0) if config.replay else None) as reader:
            await anyio.sleep(0.3)
            for _ in range(300):
                sink.publish([stored(0, 100)])
                sink.publish([removed(KEYS[:100])])
                await anyio.lowlevel.checkpoint()
            sink.publish([stored(0, 7)])
            await anyio.sleep(0.5)
            assert sink.describe()["buffered"] <= 20

            def catch_up() -> None:
                while reader.follower.index.keys(Tier.HOST) != set(HASHES[:7]) or reader.follower.in_doubt:
                    reader.read(0.1)

            with anyio.fail_after(20):
                await anyio.to_thread.run_sync(catch_up, abandon_on_cancel=True)


async def test_what_comes_while_the_thread_awakes_wakes_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One publish rings just before the thread takes the ring, the next just before it sleeps."""
    wait = ZmqEventSink._wait
    slept: list[bool] = []

    def meddle(sink: ZmqEventSink, timeout_s: float) -> None:
        if not slept and timeout_s == 0.0 and sink._stream.batches:
            sink.publish([stored(0, 1)])
            slept.append(False)
        elif slept == [False]:
            sink.publish([stored(1, 2)])
            slept.append(not sink._doorbell.empty())
        wait(sink, timeout_s)

    monkeypatch.setattr(ZmqEventSink, "_wait", meddle)
    config = config_at(tmp_path)
    async with publishing(config):
        await follow(config, holds(*HASHES[:2]))
    assert slept == [False, True]


async def test_a_file_that_hangs_stops_neither_the_loop_nor_the_bound_of_what_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, goes_on, writes = threading.Event(), threading.Event(), []

    def hang(path: Path, number: int) -> None:
        writes.append(number)
        if len(writes) > 1:
            hangs.set()
            assert goes_on.wait(20)

    monkeypatch.setattr(sequence, "_RESERVE", 100)
    monkeypatch.setattr(sequence, "_write", hang)
    limits = StreamLimits(events=1, backlog_changes=500)
    config = config_at(tmp_path, sequence_file=tmp_path / "sequence", limits=limits)
    async with publishing(config) as sink:
        try:
            await anyio.to_thread.run_sync(hangs.wait, 10)
            for number in range(3_000):
                sink.publish([stored(number % 1_000, number % 1_000 + 1)])
            assert len(sink._intake) <= 1_024
            assert sink.describe()["waiting"] <= 500
        finally:
            goes_on.set()
        sink.publish([removed(KEYS), stored(0, 5)])
        assert not (await follow(config, holds(*HASHES[:5]))).faults


async def test_a_publisher_whose_socket_fails_begins_anew_and_a_reader_ends_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, failed = PublisherSockets.send, threading.Event()

    def fail_once(sockets: PublisherSockets, message: Message) -> None:
        if not failed.is_set() and len(decode_batch(message[1]).events):
            failed.set()
            raise zmq.ZMQError(zmq.ENOTSOCK)
        send(sockets, message)

    config = config_at(tmp_path, replay=False)
    async with publishing(config) as sink:
        sink.publish([stored(0, 10)])
        await follow(config, holds(*HASHES[:10]), replay=False)
        monkeypatch.setattr(PublisherSockets, "send", fail_once)
        sink.publish([removed(KEYS[5:10])])
        await anyio.to_thread.run_sync(failed.wait, 10)
        sink.publish([stored(20, 22)])
        follower = await follow(config, holds(*HASHES[:5], *HASHES[20:22]), replay=False)
        assert not follower.faults
        assert (sink.describe()["failures"], sink.describe()["active"]) == (1, True)


async def test_a_context_source_that_raises_loses_no_event(tmp_path: Path) -> None:
    class Moody:
        looks = 0

        def find(self, key: PageKey) -> Origin | None:
            self.looks += 1
            if self.looks in (3, 12):  # while an event is told, and while a snapshot is
                raise LookupError("not now")
            return CONTEXTS.find(key)

    contexts = Moody()
    config = config_at(tmp_path)
    async with open_services() as services:
        sink = ZmqEventSink(config, contexts)
        await sink.open(services)
        sink.publish([stored(0, 10)])
        follower = await follow(config, holds(*HASHES[:10]))
        assert not follower.faults
        assert sink.describe()["failures"] == 2
        await sink.close(10)


async def test_a_publisher_that_goes_on_failing_ends_at_its_close(tmp_path: Path) -> None:
    class Broken:
        def find(self, key: PageKey) -> Origin | None:
            raise LookupError("never")

    async with open_services() as services:
        sink = ZmqEventSink(config_at(tmp_path), Broken())
        await sink.open(services)
        for _ in range(3):
            sink.publish([stored(0, 10)])
            await anyio.sleep(0.02)
        await sink.close(10)
        assert sink.describe()["active"] is False


async def test_a_sequence_file_that_cannot_be_written_is_named_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "sequence"
    async with open_services() as services:
        sink = ZmqEventSink(config_at(tmp_path, sequence_file=path), CONTEXTS)
        with pytest.raises(ConfigError, match=r"nowhere/sequence cannot be written .*name another"):
            await sink.open(services)
        assert sink.describe()["active"] is False


async def test_a_sequence_file_that_fails_later_holds_the_stream_up_until_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence, "_RESERVE", 100)
    monkeypatch.setattr("kvcr_actors.events.zmq._RETRY_S", 0.02)
    config = config_at(tmp_path, sequence_file=tmp_path / "folder" / "sequence", limits=StreamLimits(events=1))
    (tmp_path / "folder").mkdir()
    with structlog.testing.capture_logs() as logs:
        async with publishing(config) as sink:
            (tmp_path / "folder").rename(tmp_path / "moved")
            for number in range(200):
                sink.publish([stored(number, number + 1)])
            await heard(logs, "events.sequence_file")
            (tmp_path / "moved").rename(tmp_path / "folder")
            assert not (await follow(config, holds(*HASHES[:200]))).faults


async def test_a_sink_that_has_no_numbers_left_says_so_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence, "_RESERVE", 100)
    monkeypatch.setattr("kvcr_actors.events.zmq._RETRY_S", 0.02)
    (tmp_path / "folder").mkdir()
    config = config_at(tmp_path, sequence_file=tmp_path / "folder" / "sequence", limits=StreamLimits(events=1))
    async with open_services() as services:
        sink = ZmqEventSink(config, CONTEXTS)
        await sink.open(services)
        (tmp_path / "folder").rename(tmp_path / "moved")
        sink.publish([stored(number, number + 1) for number in range(200)])
        with pytest.raises(DeadlineError, match=r"changes were not sent in 0\.5 s"):
            await sink.close(0.5)
        await sink.close(10)


async def test_a_thread_that_starts_too_late_does_not_publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr("kvcr_actors.events.zmq._START_S", 0.1)
    monkeypatch.setattr(ZmqEventSink, "_reserve_first", lambda sink: goes_on.wait(20))
    config = config_at(tmp_path)
    async with open_services() as services:
        sink = ZmqEventSink(config, CONTEXTS)
        with pytest.raises(EventEndpointError, match=r"did not open within 0\.1 s"):
            await sink.open(services)
        goes_on.set()
        await sink.close(10)
        assert sink.describe()["batches"] == 0


async def test_a_sink_that_was_closed_is_not_opened_again(tmp_path: Path) -> None:
    config = config_at(tmp_path)
    async with open_services() as services:
        sink = ZmqEventSink(config, CONTEXTS)
        await sink.open(services)
        await sink.close(10)
        with pytest.raises(EventEndpointError, match="was closed; make another"):
            await sink.open(services)


async def test_an_endpoint_in_use_is_named(tmp_path: Path) -> None:
    del tmp_path
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with open_services() as services:
            sink = ZmqEventSink(EventsConfig(str(port)), CONTEXTS)
            with pytest.raises(EventEndpointError, match=f"endpoint tcp://127.0.0.1:{port}: .*free it"):
                await sink.open(services)
            assert sink.describe()["active"] is False


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
async def test_a_second_publisher_does_not_take_the_firsts_readers(tmp_path: Path, scheme: str) -> None:
    config = config_at(tmp_path) if scheme == "ipc" else EventsConfig(str(free_port()), heartbeat_s=0.1)
    async with publishing(config) as first, open_services() as services:
        with pytest.raises(EventEndpointError, match=r"Address already in use.*; free it"):
            await ZmqEventSink(config, CONTEXTS).open(services)
        first.publish([stored(0, 2)])
        await follow(config, holds(*HASHES[:2]))


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
async def test_an_address_that_is_about_to_be_freed_is_waited_for(tmp_path: Path, scheme: str) -> None:
    """As that of a publisher of this process that was just closed."""
    config = config_at(tmp_path) if scheme == "ipc" else EventsConfig(str(free_port()), heartbeat_s=0.1)
    with zmq.Context.instance().socket(zmq.PUB) as last:
        last.bind(config.events.at(0))
        async with anyio.create_task_group() as tasks:

            async def free() -> None:
                await anyio.sleep(0.1)
                last.close(0)

            tasks.start_soon(free)
            async with publishing(config) as sink:
                sink.publish([stored(0, 2)])
                await follow(config, holds(*HASHES[:2]))


async def test_only_tensor_rank_zero_opens_a_socket(tmp_path: Path) -> None:
    async with publishing(config_at(tmp_path)) as first, publishing(config_at(tmp_path, tensor_rank=1)) as second:
        second.publish([stored(0, 1)])
        assert (first.describe()["active"], second.describe()["active"], second.silent_s) == (True, False, 0.0)


async def test_a_publisher_that_falls_silent_is_reported_and_so_is_its_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flows = threading.Event()
    flows.set()
    send = PublisherSockets.send

    def stall(sockets: PublisherSockets, message: Message) -> None:
        assert flows.wait(20)
        send(sockets, message)

    monkeypatch.setattr(PublisherSockets, "send", stall)
    with structlog.testing.capture_logs() as logs:
        async with publishing(config_at(tmp_path)) as sink:
            flows.clear()
            await heard(logs, "events.silent")
            assert sink.silent_s > 1.0
            flows.set()
            await heard(logs, "events.heard_again")
            assert sink.silent_s < 1.0


async def heard(logs: Sequence[Any], event: str) -> None:
    with anyio.fail_after(10):
        while not any(line["event"] == event for line in logs):  # noqa: ASYNC110 - a log has no event to wait for
            await anyio.sleep(0.02)


async def test_a_sink_that_cannot_end_in_time_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(PublisherSockets, "send", lambda sockets, message: release.wait(20) and None)
    async with open_services() as services:
        sink = ZmqEventSink(config_at(tmp_path), CONTEXTS)
        await sink.open(services)
        sink.publish([stored(0, 3)])
        with pytest.raises(DeadlineError, match=r"were not sent in 0\.2 s"):
            await sink.close(0.2)
        release.set()
        await sink.close(10)


async def test_an_exposed_endpoint_is_warned_of() -> None:
    with structlog.testing.capture_logs() as logs:
        async with publishing(EventsConfig(f"tcp://0.0.0.0:{free_port()}")):
            pass
    assert [line["event"] for line in logs] == ["events.exposed"]
