"""A replay over the real controller, read by Dynamo's indexer and selection service: their answer is ours."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TypeAlias

import pytest

from kvcr_actors.controller import CacheController
from kvcr_actors.core.inventory import TierCleared
from kvcr_actors.core.keys import Namespace, layout_name
from kvcr_actors.devices.cpu import CpuDevice
from kvcr_actors.devices.host_memory import HostPools
from kvcr_actors.events.config import EventsConfig
from kvcr_actors.events.sockets import PublisherSockets
from kvcr_actors.events.stream import Message
from kvcr_actors.events.zmq import ZmqEventSink
from kvcr_actors.replay.engine import ReplayEngine
from kvcr_actors.replay.events import BLOCK_TOKENS, TraceContexts, block_tokens
from kvcr_actors.replay.options import ReplayOptions
from kvcr_actors.replay.report import ReplayReport
from kvcr_actors.replay.session import request_keys
from kvcr_actors.replay.trace import TraceRequest, read_trace, shipped_trace
from kvcr_actors.stores.registry import open_store
from kvcr_actors.types import PageKey, Tier
from tests.events.dynamo.interpreter import dynamo_interpreter
from tests.events.dynamo.readers import Child, Depths, Indexer, Worker, free_ports, wait_until

OPTIONS = ReplayOptions(device_blocks=64, host_blocks=128, store="disk", store_blocks=400, page_bytes=64)
REQUESTS = read_trace(shipped_trace(), 160)
KEYS = request_keys(REQUESTS)
Consumer: TypeAlias = Indexer | Child


class Cache:
    """The controller, its engine and its publisher; a second one over the same folder is the first after a restart."""

    def __init__(self, folder: Path, worker: Worker) -> None:
        layout = OPTIONS.layout()
        device = CpuDevice(layout, OPTIONS.device_blocks, HostPools(layout, OPTIONS.host_blocks))
        names = Namespace("replay", "0", "uint8", layout_name(layout), layout.page_bytes)
        self.store = open_store("disk", {}, OPTIONS.store_blocks, folder / "store", names)
        config = EventsConfig(worker.events, worker.replay, sequence_file=folder / "sequence")
        self.sink = ZmqEventSink(config, TraceContexts(REQUESTS, KEYS))
        self.controller = CacheController(device=device, store=self.store, sinks=[self.sink]).start()
        self.engine = ReplayEngine(OPTIONS, self.controller, device, ReplayReport())
        self.device_is_cleared = False

    def run(self, keys: Sequence[tuple[PageKey, ...]]) -> None:
        self.engine.run(keys, lambda finished: None)
        self.controller.wait_quiet(60)

    def clear_device(self) -> None:
        self.controller.publish([TierCleared(Tier.DEVICE)])
        self.controller.flush_pending_backups()
        self.controller.wait_quiet(60)
        self.device_is_cleared = True

    def depths(self, keys: Sequence[PageKey]) -> Depths:
        """Dynamo's rule: a lower tier goes on where the one above it ends."""
        device = frozenset[PageKey]() if self.device_is_cleared else self.engine.tier.contents()
        found: list[int] = []
        depth = 0
        for held in (device, self.controller.host_contents(), self.store.contents()):
            while depth < len(keys) and keys[depth] in held:
                depth += 1
            found.append(depth)
        return found[0], found[1], found[2]


@pytest.fixture(params=["indexer", "selection"])
def consumer(request: pytest.FixtureRequest, worker: Worker) -> Generator[Consumer, None, None]:
    interpreter = dynamo_interpreter()
    if request.param == "indexer":
        reader: Consumer = Indexer(interpreter, [worker], BLOCK_TOKENS)
    else:
        reader = Child("selection", interpreter, [worker], BLOCK_TOKENS)
    yield reader
    reader.close()


@pytest.fixture
def worker() -> Worker:
    events, replay = free_ports(2)
    return Worker(1, f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}")


def tokens_of(request: TraceRequest) -> list[int]:
    return [token for block in request.hash_ids for token in block_tokens(block)]


def agree(consumer: Consumer, cache: Cache, *, tiers_seen: tuple[bool, bool, bool]) -> None:
    """Every sampled prompt has the same depths on both sides, and the tiers named really continue some of them."""
    sample = range(0, len(REQUESTS), 5)
    expected = {index: cache.depths(KEYS[index]) for index in sample}
    steps = [(depths[0] > 0, depths[1] > depths[0], depths[2] > depths[1]) for depths in expected.values()]
    assert tuple(any(column) for column in zip(*steps, strict=True)) == tiers_seen
    answers: dict[int, Depths] = {}

    def same() -> bool:
        for index in sample:
            answers[index] = consumer.depths(tokens_of(REQUESTS[index])).get(1, (0, 0, 0))
        return answers == expected

    try:
        wait_until(same, "the consumer to agree", 15)
    except AssertionError:
        assert answers == expected
        raise


@pytest.mark.timeout(240)
def test_a_consumer_sees_what_the_tiers_hold_whatever_happens(
    tmp_path: Path, worker: Worker, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path, worker)
    try:
        cache.run(KEYS[:60])
        agree(consumer, cache, tiers_seen=(True, True, True))

        cache.run(KEYS[60:120])  # evicts from every tier
        assert cache.controller.stats.host_evicted
        assert cache.controller.stats.store_evicted
        agree(consumer, cache, tiers_seen=(True, True, True))

        with monkeypatch.context() as patch:
            lost = lose_batches(patch, every=3)
            cache.run(KEYS[120:140])
        assert lost
        agree(consumer, cache, tiers_seen=(True, True, True))

        cache.clear_device()
        agree(consumer, cache, tiers_seen=(False, True, True))
    finally:
        cache.controller.close()

    cache = Cache(tmp_path, worker)
    try:
        agree(consumer, cache, tiers_seen=(False, False, True))
        cache.run(KEYS[140:])
        agree(consumer, cache, tiers_seen=(True, True, True))
    finally:
        cache.controller.close()


def lose_batches(patch: pytest.MonkeyPatch, every: int) -> list[Message]:
    """Of the batches sent from now on, lose some on the way to every reader."""
    lost: list[Message] = []
    sent = 0
    send = PublisherSockets.send

    def lossy(sockets: PublisherSockets, message: Message) -> None:
        nonlocal sent
        sent += 1
        if sent % every:
            send(sockets, message)
        else:
            lost.append(message)

    patch.setattr(PublisherSockets, "send", lossy)
    return lost
