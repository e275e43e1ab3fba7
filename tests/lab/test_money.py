"""Splits of a budget, and replicas behind a router, against plain counts of the reference."""

from __future__ import annotations

import pytest

from kvcr_actors.errors import ConfigError
from kvcr_actors.lab import Costs, best, lru_curve, next_gib, page_bytes, place, split, splits, tier_hits, workload
from kvcr_actors.replay.trace import read_trace, shipped_trace
from kvcr_actors.types import Eviction
from tests.replay.lru_reference import hits_at

MIB = 1 << 20
REQUESTS = read_trace(shipped_trace())
BLOCKS = [request.hash_ids for request in REQUESTS]
CURVE = lru_curve(workload(REQUESTS))


def test_tiers_that_share_recency_find_what_three_lrus_find() -> None:
    device, host, store = tier_hits(CURVE, (64, 200, 700))
    assert device == hits_at(BLOCKS, 64)
    assert device + host == hits_at(BLOCKS, 200)
    assert device + host + store == hits_at(BLOCKS, 700)
    assert tier_hits(CURVE, (200, 64)) == [hits_at(BLOCKS, 200), 0]


def test_a_hit_saves_its_prefill_less_its_transfers() -> None:
    costs = Costs(MIB, page_tokens=100, prefill_tokens_s=1_000, host_gb_s=MIB / 1e9 * 100, disk_gb_s=MIB / 1e9 * 50)
    assert costs.saved_s(1, 0) == pytest.approx(0.1 - 0.01)
    assert costs.saved_s(0, 1) == pytest.approx(0.1 - 0.01 - 0.02)
    slow = Costs(MIB, page_tokens=100, prefill_tokens_s=1_000, host_gb_s=25, disk_gb_s=MIB / 1e9)
    assert slow.saved_s(0, 5) == 0


def test_a_split_finds_in_the_host_what_fits_it_and_on_disk_the_rest() -> None:
    costs = Costs(MIB)
    both = split(CURVE, costs, 0.25, 1)
    assert both.host_hits == hits_at(BLOCKS, 256)
    assert both.host_hits + both.disk_hits == hits_at(BLOCKS, 1_024)
    assert split(CURVE, costs, 1, 0.25).disk_hits == 0
    assert split(CURVE, costs, 0, 1).disk_hits == 0


def test_the_best_split_is_host_memory_at_one_price_and_disk_where_it_is_cheap() -> None:
    dear, cheap = Costs(4 * MIB), Costs(4 * MIB, disk_price=0.05)
    assert best(splits(CURVE, dear, 2)).host_gib == 2
    chosen = best(splits(CURVE, cheap, 2))
    assert chosen.disk_gib > chosen.host_gib
    assert chosen.saved_s > best(splits(CURVE, dear, 2)).saved_s
    assert all(option.host_gib + option.disk_gib * 0.05 == pytest.approx(2) for option in splits(CURVE, cheap, 2))


def test_the_next_gib_is_worth_the_hits_that_it_adds() -> None:
    costs = Costs(4 * MIB)
    host, disk = next_gib(CURVE, costs, split(CURVE, costs, 1, 0))
    assert host == pytest.approx(costs.saved_s(hits_at(BLOCKS, 512) - hits_at(BLOCKS, 256), 0))
    assert disk == 0


def test_a_models_page_has_the_bytes_of_its_shape() -> None:
    assert page_bytes("llama-3.1-8b", 1) == page_bytes("32x8x128", 1) == 131_072
    assert page_bytes("deepseek-v3") == 61 * 576 * 2 * 512
    for wrong in ("gpt", "0x8x128"):
        with pytest.raises(ConfigError, match="is not known; use llama"):
            page_bytes(wrong)


@pytest.mark.parametrize("field", ["page_bytes", "prefill_tokens_s", "disk_price"])
def test_costs_are_above_nothing(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}: 0 is not"):
        Costs(**{"page_bytes": 1, field: 0})
    with pytest.raises(ConfigError, match="budget: 0"):
        splits(CURVE, Costs(1), 0)


def test_replicas_behind_round_robin_each_serve_their_share() -> None:
    work = workload(REQUESTS)
    placed = place(work, 3, 400, "round-robin", Eviction.LRU)
    assert placed.hits == sum(hits_at(BLOCKS[number::3], 400) for number in range(3))
    assert placed.pages == work.pages
    assert place(work, 1, 400, "aware", Eviction.LRU).hits == hits_at(BLOCKS, 400)
    with pytest.raises(ConfigError, match="replicas: 0"):
        place(work, 0, 400, "aware", Eviction.LRU)


def test_a_router_that_knows_the_caches_finds_more_and_overloads_nobody() -> None:
    work = workload(REQUESTS)
    spread, aware = (place(work, 4, 200, router, Eviction.LRU) for router in ("round-robin", "aware"))
    assert aware.hits > spread.hits
    assert aware.busiest < 1.3
