"""The sequential replay through the real runner has exactly the hits of the sequential rule."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from kvcr_actors import Tier
from kvcr_actors.replay.options import ReplayOptions
from kvcr_actors.replay.session import run_replay
from kvcr_actors.replay.trace import TraceRequest, find_real_trace, read_trace, shipped_trace

ROOT = Path(__file__).parents[3]
hits_at = runpy.run_path(str(ROOT / "tests" / "replay" / "lru_reference.py"))["hits_at"]


def assert_replay_follows_the_rule(requests: list[TraceRequest], sizes: dict[str, int], **values) -> None:
    blocks = [request.hash_ids for request in requests]
    options = ReplayOptions(sequential=True, store="kvcr", page_bytes=256, **sizes, **values)
    options.check_capacities(requests)
    report = run_replay(options, requests, lambda _finished: None)
    assert report.faults() == []
    assert (report.verify.mismatches, report.claims.open, report.claims.quarantined) == (0, 0, 0)
    assert report.store.evicted > 0
    found = 0
    for tier, size in zip((Tier.DEVICE, Tier.HOST, Tier.STORE), sizes.values(), strict=True):
        found += report.hits[tier]
        assert found == hits_at(blocks, size), tier


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_three_tiers_are_three_lrus_on_the_shipped_trace(loop: str):
    sizes = {"device_blocks": 64, "host_blocks": 200, "store_blocks": 700}
    assert_replay_follows_the_rule(read_trace(shipped_trace()), sizes, loop=loop)


def test_three_tiers_are_three_lrus_on_the_conversation_trace():
    path = find_real_trace("conversation_trace.jsonl")
    if path is None:
        pytest.skip("the trace is not here; set KVCR_ACTORS_TRACES to the folder of the Mooncake traces")
    sizes = {"device_blocks": 401, "host_blocks": 1_201, "store_blocks": 20_000}
    assert_replay_follows_the_rule(read_trace(path)[:2_000], sizes)


def test_hybrid_pages_come_back_whole_and_nothing_is_left_claimed():
    requests = read_trace(shipped_trace())
    options = ReplayOptions(
        sequential=True, store="kvcr", page_bytes=768, pools=("kv", "swa", "mamba"),
        device_blocks=64, host_blocks=200, store_blocks=700,
    )  # fmt: skip
    report = run_replay(options, requests, lambda _finished: None)
    assert report.faults() == []
    assert report.verify.pages > report.verify.mismatches == 0
