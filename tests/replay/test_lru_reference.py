"""The reference itself is held against the published numbers and against a still simpler one."""

from __future__ import annotations

import random

import pytest

from kvcr_actors.replay.trace import find_real_trace, read_trace
from tests.replay.lru_reference import hits_at


def real_requests(name: str) -> list[tuple[int, ...]]:
    path = find_real_trace(name)
    if path is None:
        pytest.skip(f"{name} is not here; set KVCR_ACTORS_TRACES to the folder of the Mooncake traces")
    return [request.hash_ids for request in read_trace(path)]


@pytest.mark.parametrize(
    ("name", "capacity", "hits"),
    [
        ("conversation_trace.jsonl", 500, 12_168),
        ("conversation_trace.jsonl", 5_859, 39_258),
        ("conversation_trace.jsonl", 20_000, 83_035),
        ("conversation_trace.jsonl", 1_000_000, 105_710),
        ("synthetic_trace.jsonl", 500, 5_501),
        ("synthetic_trace.jsonl", 5_859, 37_703),
        ("synthetic_trace.jsonl", 1_000_000, 77_953),
    ],
)
def test_the_reference_gives_the_published_hits(name: str, capacity: int, hits: int) -> None:
    assert hits_at(real_requests(name), capacity) == hits


def test_a_prefix_head_is_the_last_to_leave() -> None:
    assert hits_at([[1, 2, 3], [1, 2, 4], [1, 2, 3]], capacity=3) == 4
    assert hits_at([[1, 2, 3], [1, 2, 3]], capacity=2) == 2


def test_the_reference_agrees_with_a_plain_list() -> None:
    chooser = random.Random(5)
    for _ in range(20):
        paths = [[0, *(branch * 100 + depth for depth in range(chooser.randint(1, 9)))] for branch in range(1, 12)]
        requests = [chooser.choice(paths) for _ in range(60)]
        capacity = chooser.randint(10, 60)
        newest_last: list[int] = []
        hits = 0
        for blocks in requests:
            missing = [index for index, block in enumerate(blocks) if block not in newest_last]
            hits += missing[0] if missing else len(blocks)
            newest_last = [block for block in newest_last if block not in blocks] + blocks[::-1]
            newest_last = newest_last[-capacity:]
        assert hits_at(requests, capacity) == hits
