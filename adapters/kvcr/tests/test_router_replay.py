"""A replay over the runner, read by Dynamo's state agent: sampled prompts have the depths that the tiers have."""

from __future__ import annotations

from pathlib import Path

from examples.two_workers.process import free_port
from kvcr_actors import (
    CacheController,
    CpuDevice,
    EventsConfig,
    HostPools,
    InventoryIndex,
    Namespace,
    Ownership,
    Tier,
    ZmqEventSink,
    layout_name,
)
from kvcr_actors.replay.engine import ReplayEngine
from kvcr_actors.replay.events import BLOCK_TOKENS, TraceContexts, block_tokens
from kvcr_actors.replay.options import ReplayOptions
from kvcr_actors.replay.report import ReplayReport
from kvcr_actors.replay.session import request_keys
from kvcr_actors.replay.trace import read_trace, shipped_trace
from kvcr_actors_kvcr import KvcrOptions, KvcrStore
from tests.routers import Router, dynamo_interpreter, wait_for

OPTIONS = ReplayOptions(device_blocks=64, host_blocks=128, store="kvcr", store_blocks=300, page_bytes=512)
REQUESTS = read_trace(shipped_trace(), 120)
KEYS = request_keys(REQUESTS)
SAMPLE = range(0, len(REQUESTS), 6)


def test_the_state_agent_sees_what_the_runner_holds(tmp_path: Path):
    interpreter, layout, port = dynamo_interpreter(), OPTIONS.layout(), free_port()
    names = Namespace("replay", "0", "uint8", layout_name(layout), layout.page_bytes)
    store = KvcrStore(KvcrOptions(control_port=free_port()), OPTIONS.store_blocks, names)
    device = CpuDevice(layout, OPTIONS.device_blocks, HostPools(layout, OPTIONS.host_blocks))
    config = EventsConfig(str(port), sequence_file=tmp_path / "sequence")
    index, sink = InventoryIndex(), ZmqEventSink(config, TraceContexts(REQUESTS, KEYS))
    router = Router(interpreter, port, ["tcp://127.0.0.1:23280"], BLOCK_TOKENS)
    try:
        with CacheController(device=device, store=store, sinks=[index, sink]) as controller:
            engine = ReplayEngine(OPTIONS, controller, device, ReplayReport())
            for part in (KEYS[:60], KEYS[60:]):
                engine.run(part, lambda finished: None)
                controller.wait_quiet(60)
                own = frozenset(index.holding(Tier.HOST, Ownership.STORE))
                assert own == store.contents()
                assert own - controller.host_contents(), "the runner has what host memory let go"
                tiers = (engine.tier.contents(), controller.host_contents() | own)
                expected = [depths(KEYS[number], tiers) for number in SAMPLE]
                assert any(host > device for device, host, _ in expected)
                wait_for(lambda told=expected: [ask(router, number) for number in SAMPLE] == told)
    finally:
        router.close()


def depths(keys, tiers) -> list[int]:
    """A lower tier goes on where the one above it ends; the runner has no disk here."""
    found, depth = [], 0
    for held in tiers:
        while depth < len(keys) and keys[depth] in held:
            depth += 1
        found.append(depth)
    return [*found, depth]


def ask(router: Router, number: int) -> list[int]:
    tokens = [token for block in REQUESTS[number].hash_ids for token in block_tokens(block)]
    return router.depths(tokens).get("1", [0, 0, 0])
