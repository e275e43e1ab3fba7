"""Endpoints of the ranks of a group: all are checked on every rank, and what is advertised can be dialled."""

from __future__ import annotations

import pytest

from kvcr_actors import ConfigError
from kvcr_actors_kvcr import KvcrOptions, KvcrStore, RankGroup, group_ports, router_metadata
from tests.conftest import NAMESPACE

TP2_DP2 = RankGroup(tensor=2, data=2).offsets


def store_of(rank: int, base: int, offsets: tuple[int, ...], **options) -> KvcrStore:
    group = ",".join(map(str, offsets))
    return KvcrStore(
        KvcrOptions(control_port=base, control_offset=offsets[rank], group_offsets=group, **options), 4, NAMESPACE
    )


def test_every_rank_of_a_valid_group_gets_an_endpoint_of_its_own():
    assert TP2_DP2 == (0, 1, 2, 3)
    endpoints = [store_of(rank, 40_000, TP2_DP2).endpoint for rank in range(4)]
    assert endpoints == [f"tcp://127.0.0.1:{port}" for port in (40_000, 40_001, 40_002, 40_003)]


def test_negative_offsets_count_down():
    offsets = RankGroup(tensor=2, data=2, stride=-1).offsets
    assert group_ports(40_000, offsets) == (40_000, 39_999, 39_998, 39_997)
    assert store_of(3, 40_000, offsets).endpoint == "tcp://127.0.0.1:39997"


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize(("base", "stride", "culprit"), [(65_533, 1, 3), (3, -1, 3), (65_535, 1, 1)])
def test_an_overflow_on_any_rank_is_refused_on_every_rank(rank: int, base: int, stride: int, culprit: int):
    with pytest.raises(ConfigError, match=f"of rank {culprit} does not exist"):
        store_of(rank, base, RankGroup(tensor=2, data=2, stride=stride).offsets)


def test_two_ranks_do_not_share_a_port():
    with pytest.raises(ConfigError, match="same control port"):
        group_ports(40_000, (0, 1, 1))


def test_a_rank_outside_its_group_is_refused():
    with pytest.raises(ConfigError, match="control_offset 7"):
        KvcrStore(KvcrOptions(control_port=40_000, control_offset=7, group_offsets="0,1"), 4, NAMESPACE)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*", "a b"])
def test_a_host_that_nobody_can_dial_is_never_advertised(host: str):
    with pytest.raises(ConfigError, match="cannot dial"):
        store_of(0, 40_000, TP2_DP2, bind_host="0.0.0.0", advertise_host=host)
    assert store_of(0, 40_000, TP2_DP2, bind_host="0.0.0.0", advertise_host="node-1").endpoint == "tcp://node-1:40000"


def test_a_worker_advertises_its_sources_by_data_parallel_rank_and_the_switch_last():
    sources = RankGroup(tensor=2, data=2).sources(40_000, "127.0.0.1")
    metadata = router_metadata(sources, "decode")
    assert list(metadata.items()) == [
        ("router_hint_source_control_endpoints", '{"0":"tcp://127.0.0.1:40000","1":"tcp://127.0.0.1:40002"}'),
        ("router_hint_worker_type", "decode"),
        ("router_hint", "true"),
    ]
    with pytest.raises(ConfigError, match="data-parallel rank 1"):
        router_metadata({0: sources[0], 1: "tcp://0.0.0.0:1"}, "decode")


@pytest.mark.parametrize("offset", [0, 1])
def test_a_shard_offset_that_leads_out_of_the_group_is_refused(offset: int):
    options = {"control_port": 40_000, "control_offset": offset, "group_offsets": "0,1", "shard_offset": offset}
    assert KvcrStore(KvcrOptions(**options), 4, NAMESPACE).endpoint == f"tcp://127.0.0.1:{40_000 + offset}"
    with pytest.raises(ConfigError, match="leads from port"):
        KvcrStore(KvcrOptions(**{**options, "shard_offset": offset + 1}), 4, NAMESPACE)
