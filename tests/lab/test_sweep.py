"""LRU in one pass against the reference and the tree; sweeps as functions; whole traces where they are at hand."""

from __future__ import annotations

import random

import pytest

from kvcr_actors.errors import ConfigError, TraceError
from kvcr_actors.lab import POLICIES, lru_curve, simulate, sweep, workload
from kvcr_actors.replay.trace import TraceRequest, find_real_trace, read_trace, shipped_trace
from kvcr_actors.types import Eviction
from tests.replay.lru_reference import hits_at, hits_by_request

TRACES = ("conversation_trace.jsonl", "synthetic_trace.jsonl")
TEN = (50, 247, 500, 1_000, 2_000, 5_859, 10_000, 20_000, 50_000, 100_000)


def trace(name: str) -> list[TraceRequest]:
    path = find_real_trace(name)
    if path is None:
        pytest.skip(f"{name} is not here; set KVCR_ACTORS_TRACES to the folder of the Mooncake traces")
    return read_trace(path)


@pytest.mark.parametrize("name", TRACES)
def test_one_pass_gives_the_sequential_rule_at_ten_capacities_of_a_whole_trace(name: str) -> None:
    requests = trace(name)
    blocks = [request.hash_ids for request in requests]
    curve = lru_curve(workload(requests))
    assert [curve.at(capacity) for capacity in TEN] == [hits_at(blocks, capacity) for capacity in TEN]


@pytest.mark.parametrize("name", TRACES)
def test_no_policy_is_above_the_bound_on_a_real_trace(name: str) -> None:
    found = sweep(trace(name)[:2_000], (400, 2_000, 10_000))
    for row in found.rows:
        if row.policy != "infinite":
            assert row.hits <= found.row("belady", row.capacity_pages).hits <= found.infinite


def test_one_pass_is_exact_at_every_capacity_of_random_trees() -> None:
    chooser = random.Random(2)
    for _ in range(30):
        paths = [[0]]
        for block in range(1, 60):
            paths.append([*chooser.choice(paths), block])
        requests = [TraceRequest(0, 0, 0, tuple(chooser.choice(paths))) for _ in range(80)]
        blocks = [request.hash_ids for request in requests]
        curve = lru_curve(workload(requests))
        assert [curve.at(size) for size in range(62)] == [hits_at(blocks, size) for size in range(62)]
        assert curve.at(curve.enough) == curve.at(1_000) > curve.at(curve.enough - 1)


@pytest.mark.parametrize("capacity", [20, 54, 200, 1_000])
def test_leaves_only_eviction_finds_what_the_rule_finds_request_by_request(capacity: int) -> None:
    requests = read_trace(shipped_trace())
    expected = hits_by_request([request.hash_ids for request in requests], capacity)
    assert simulate(workload(requests).keys, Eviction.LRU, capacity) == expected


def test_processes_find_what_one_finds() -> None:
    requests = read_trace(shipped_trace())
    told: list[tuple[int, int]] = []
    alone = sweep(requests, (100, 500), jobs=1)
    assert sweep(requests, (100, 500), jobs=2, progress=lambda done, total: told.append((done, total))) == alone
    points = 2 * len(POLICIES)
    assert told == [(done, points) for done in range(1, points + 1)]


def test_hits_are_counted_from_a_request_on() -> None:
    requests = read_trace(shipped_trace())
    blocks = [request.hash_ids for request in requests]
    found = sweep(requests, (300,), ("lru", "sieve", "belady"), first=200, jobs=1)
    assert found.row("lru", 300).hits == sum(hits_by_request(blocks, 300)[200:])
    assert found.row("sieve", 300).hits == sum(simulate(workload(requests).keys, Eviction.SIEVE, 300)[200:])
    assert found.row("lru", 300).pages == found.pages == sum(map(len, blocks[200:]))
    assert found.row("lru", 300).hits <= found.row("belady", 300).hits
    with pytest.raises(KeyError, match="lfu at 300 pages was not swept"):
        found.row("lfu", 300)


def test_capacities_go_from_the_largest_request_to_all_that_lru_can_use() -> None:
    found = sweep(read_trace(shipped_trace()), None, ("lru", "infinite"))
    capacities = [row.capacity_pages for row in found.rows if row.policy == "lru"]
    assert len(capacities) == 8
    assert capacities[0] == found.largest
    assert found.row("lru", capacities[-1]).hits == found.infinite
    assert found.cold == found.unique


@pytest.mark.parametrize(
    ("capacities", "policies", "options", "words"),
    [
        ((0,), ("lru",), {}, "capacities: 0"),
        ((), ("lru",), {}, "name one at least"),
        ((5, 5), ("lru",), {}, "none twice"),
        ((5,), ("mru",), {}, "'mru' is not known; use lru, lfu"),
        ((5,), (), {}, "policies: '' must name one"),
        ((5,), ("lru",), {"first": 600}, "first: 600 is not a request"),
        ((5,), ("lru",), {"jobs": 0}, "jobs: 0"),
    ],
)
def test_bad_questions_are_refused_by_name(capacities, policies, options, words) -> None:
    with pytest.raises(ConfigError, match=words):
        sweep(read_trace(shipped_trace()), capacities, policies, **options)


def test_a_trace_without_requests_is_refused() -> None:
    with pytest.raises(TraceError, match="has no requests"):
        sweep([])
