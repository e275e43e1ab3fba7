from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvcr_actors.errors import ConfigError
from kvcr_actors.replay.options import ReplayOptions
from kvcr_actors.replay.trace import TraceRequest, shipped_trace
from kvcr_actors.types import WritePolicy


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"limit": 0}, "--limit: 0 is not a whole number of 1 or more"),
        ({"concurrency": 0}, "--concurrency: 0"),
        ({"device_blocks": 0}, "--device-blocks: 0"),
        ({"device_blocks": True}, "--device-blocks: True"),
        ({"host_blocks": -1}, "--host-blocks: -1"),
        ({"store_blocks": -1}, "--store-blocks: -1"),
        ({"page_bytes": 0}, "--page-bytes: 0"),
        ({"page_bytes": 2, "pools": ("kv", "swa", "mamba")}, "--page-bytes: 2 is less than a byte a pool; give 3"),
        ({"seed": -1}, "--seed: -1"),
        ({"pools": ("kv", "nope")}, "--pools: 'nope' is not known"),
        ({"pools": ("swa",)}, "--pools: 'swa' must name kv"),
        ({"pools": ("kv", "kv")}, "--pools: 'kv,kv' must name kv, and no pool twice"),
        ({"write_policy": "never"}, "--write-policy: 'never'"),
        ({"loop": "uvloop"}, "--loop: 'uvloop' is not known; use asyncio, trio"),
        ({"store": "nope"}, "--store: 'nope' is not installed; use none, disk, memory"),
        ({"host_blocks": 0}, "--host-blocks: 0 leaves the store unreachable"),
        ({"store_path": Path("x")}, "--store-path: the store 'memory' keeps no folder"),
        ({"store": "none", "store_path": Path("x")}, "--store-path: the store 'none' keeps no folder"),
        ({"store": "none", "store_option": {"a": "b"}}, "--store-option: there is no store"),
        ({"store": "disk", "store_path": Path(__file__)}, "--store-path: .* is not a folder"),
        ({"plot": Path("hits.txt")}, "--plot: hits.txt has no picture's suffix"),
        ({"plot": Path("a.png"), "json": Path("a.png")}, "--plot: a.png is the --json file too"),
    ],
)
def test_a_refused_value_names_its_option_in_one_line(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        ReplayOptions(**values)
    assert "\n" not in str(caught.value)


def request(blocks: int) -> TraceRequest:
    return TraceRequest(0, blocks * 512, 1, tuple(range(blocks)))


@pytest.mark.parametrize(
    ("sizes", "option"),
    [
        ({"device_blocks": 9}, "--device-blocks: 9 cannot hold the largest request; give 10 or more$"),
        ({"host_blocks": 9}, "--host-blocks: 9 .* give 10 or more, or 0"),
        ({"store_blocks": 9}, "--store-blocks: 9 .* give 10 or more, or 0"),
    ],
)
def test_a_tier_smaller_than_the_largest_request_is_refused(sizes: dict[str, int], option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        ReplayOptions(**sizes).check_capacities([request(3), request(10)])


def test_tiers_that_do_not_exist_need_no_capacity() -> None:
    largest = [request(10)]
    ReplayOptions(device_blocks=10, host_blocks=10, store_blocks=10).check_capacities(largest)
    ReplayOptions(device_blocks=10, host_blocks=0, store="none").check_capacities(largest)
    ReplayOptions(device_blocks=10, host_blocks=10, store_blocks=0).check_capacities(largest)
    ReplayOptions(device_blocks=10, host_blocks=10, store="none", store_blocks=1).check_capacities(largest)
    assert not ReplayOptions(host_blocks=0, store_blocks=0).has_store


@pytest.mark.parametrize("page_bytes", [3, 100, 4096, 16_384])
@pytest.mark.parametrize("pools", [("kv",), ("kv", "mamba"), ("kv", "swa", "mamba")])
def test_the_layout_shares_all_of_a_pages_bytes(page_bytes: int, pools: tuple[str, ...]) -> None:
    layout = ReplayOptions(page_bytes=page_bytes, pools=pools).layout()
    assert layout.page_bytes == page_bytes
    assert tuple(pool.name for pool in layout.pools) == pools


def test_the_effective_configuration_names_each_value_and_its_source() -> None:
    options = ReplayOptions(store="disk", store_option={"sync": "true"}, pools=("kv", "swa"), write_policy="selective")
    effective = options.effective(frozenset({"store", "pools"}))
    assert effective["store"] == ("disk", "command line")
    assert effective["pools"] == ("kv,swa", "command line")
    assert effective["store_option"] == ("sync=true", "default")
    assert effective["write_policy"] == ("selective", "default")
    assert effective["sequential"] == ("no", "default")
    assert effective["trace"] == ("-", "default")


def test_the_json_form_has_every_option_as_a_plain_value() -> None:
    values = {"trace": Path("t.jsonl"), "store": "disk", "store_option": {"fsync": "true"}, "pools": ("kv", "swa")}
    made = ReplayOptions(**values, write_policy="selective", limit=9, store_path=Path("pages")).to_json()
    assert list(made) == [field.name for field in attrs.fields(ReplayOptions)]
    assert made == json.loads(json.dumps(made))
    assert made.items() >= {"trace": "t.jsonl", "limit": 9, "store_path": "pages", "write_policy": "selective"}.items()
    assert (made["pools"], made["store_option"]) == (["kv", "swa"], {"fsync": "true"})
    assert ReplayOptions().to_json()["trace"] == str(shipped_trace())


def test_a_sequential_replay_runs_one_request_at_a_time() -> None:
    assert ReplayOptions(concurrency=8).running_limit == 8
    assert ReplayOptions(sequential=True, concurrency=8).running_limit == 1
    assert ReplayOptions(write_policy="write-back").write_policy is WritePolicy.WRITE_BACK
