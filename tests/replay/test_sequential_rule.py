"""The sequential replay through the real actors gives exactly the hits of one LRU a tier."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcr_actors.replay.options import ReplayOptions
from kvcr_actors.replay.report import ReplayReport
from kvcr_actors.replay.session import run_replay
from kvcr_actors.replay.trace import TraceRequest, find_real_trace, read_trace, shipped_trace
from kvcr_actors.types import Tier
from tests.replay.lru_reference import hits_at

CONVERSATION = "conversation_trace.jsonl"
SYNTHETIC = "synthetic_trace.jsonl"


def requests_of(name: str) -> list[TraceRequest]:
    path = find_real_trace(name)
    if path is None:
        pytest.skip(f"{name} is not here; set KVCR_ACTORS_TRACES to the folder of the Mooncake traces")
    return read_trace(path)


def replay(requests: list[TraceRequest], **values) -> ReplayReport:
    options = ReplayOptions(sequential=True, page_bytes=64, **values)
    options.check_capacities(requests)
    report = run_replay(options, requests, lambda _finished: None)
    assert report.faults() == []
    return report


def assert_each_tier_is_an_lru(report: ReplayReport, requests: list[TraceRequest], capacities: dict[Tier, int]) -> None:
    blocks = [request.hash_ids for request in requests]
    found = 0
    for tier, capacity in capacities.items():
        found += report.hits[tier]
        assert found == hits_at(blocks, capacity), tier


@pytest.mark.parametrize(
    ("name", "capacity"),
    [
        (CONVERSATION, 500),
        (CONVERSATION, 5_859),
        (CONVERSATION, 20_000),
        (CONVERSATION, 247),
        (SYNTHETIC, 500),
        (SYNTHETIC, 5_859),
        (SYNTHETIC, 43_924),
    ],
)
def test_device_hits_alone_are_those_of_one_lru(name: str, capacity: int) -> None:
    requests = requests_of(name)
    report = replay(requests, store="none", host_blocks=0, device_blocks=capacity)
    assert_each_tier_is_an_lru(report, requests, {Tier.DEVICE: capacity})


@pytest.mark.parametrize(("device", "host", "store"), [(54, 54, 54), (64, 200, 700), (500, 1_000, 5_000)])
@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_three_tiers_are_three_lrus_on_the_shipped_trace(loop: str, device: int, host: int, store: int) -> None:
    requests = read_trace(shipped_trace())
    report = replay(requests, device_blocks=device, host_blocks=host, store_blocks=store, loop=loop)
    assert_each_tier_is_an_lru(report, requests, {Tier.DEVICE: device, Tier.HOST: host, Tier.STORE: store})
    assert report.backup.submits == report.backup.steps > 0


@pytest.mark.parametrize("name", [CONVERSATION, SYNTHETIC])
def test_three_tiers_are_three_lrus_on_a_real_trace(name: str) -> None:
    requests = requests_of(name)[:3_000]
    report = replay(requests, device_blocks=500, host_blocks=2_000, store_blocks=8_000)
    assert_each_tier_is_an_lru(report, requests, {Tier.DEVICE: 500, Tier.HOST: 2_000, Tier.STORE: 8_000})
    assert report.backup.submits == report.backup.steps


def test_a_restart_on_a_warm_disk_continues_the_stores_lru(tmp_path: Path) -> None:
    requests = read_trace(shipped_trace())
    halves = requests[: len(requests) // 2], requests[len(requests) // 2 :]
    sizes = {"device_blocks": 64, "host_blocks": 200, "store_blocks": 700}
    blocks = [[request.hash_ids for request in half] for half in halves]
    first, second = (replay(half, store="disk", store_path=tmp_path / "store", **sizes) for half in halves)
    assert sum(first.hits.values()) == hits_at(blocks[0], 700)
    assert sum(first.hits.values()) + sum(second.hits.values()) == hits_at(blocks[0] + blocks[1], 700)
    assert second.hits[Tier.DEVICE] == hits_at(blocks[1], 64)
