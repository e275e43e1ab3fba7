"""The sink and the reader over real sockets: nothing blocks, nothing is lost for good, silence is noticed."""

from __future__ import annotations

import socket
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
import structlog
import zmq

from kvcr_actors.core.inventory import BlocksRemoved, BlocksStored
from kvcr_actors.core.keys import chain_seed, page_keys, router_key
from kvcr_actors.errors import DeadlineError, EventEndpointError
from kvcr_actors.events.config import EventsConfig
from kvcr_actors.events.contexts import ContextTable
from kvcr_actors.events.follower import StreamFollower
from kvcr_actors.events.reader import EventReader
from kvcr_actors.events.sockets import PublisherSockets
from kvcr_actors.events.stream import Message, StreamLimits
from kvcr_actors.events.wire import END_OF_REPLAY, encode_sequence
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


@asynccontextmanager
async def publishing(config: EventsConfig) -> AsyncGenerator[ZmqEventSink]:
    async with open_services() as services:
        sink = ZmqEventSink(config, CONTEXTS)
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
            count = 0
            while dealer.poll(5_000) and dealer.recv_multipart()[-2] != END_OF_REPLAY:
                count += 1
            return count

        with anyio.fail_after(20):
            assert await anyio.to_thread.run_sync(read_all) > 4_000
        dealer.close(0)


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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with structlog.testing.capture_logs() as logs:
        async with publishing(EventsConfig(f"tcp://0.0.0.0:{port}")):
            pass
    assert [line["event"] for line in logs] == ["events.exposed"]
