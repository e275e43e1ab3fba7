"""Ranks of every axis: where each listens, whom it asks, what its pages are a shard of, and who tells the inventory."""

from __future__ import annotations

from itertools import product

import pytest

from kvcr_actors import ConfigError, EventsConfig, Namespace
from kvcr_actors.testing.store_driver import chain
from kvcr_actors_kvcr import FetchHint, KvcrOptions, KvcrStore, Rank, RankGroup, parse_hint
from tests.conftest import NAMESPACE

GROUP = RankGroup(data=2, pipeline=2, context=2, tensor=2)
RANKS = [
    GROUP.rank(data=data, pipeline=pipeline, context=context, tensor=tensor)
    for data, pipeline, context, tensor in product(range(2), repeat=4)
]


@pytest.mark.parametrize("stride", [1, -1, 3])
def test_every_rank_listens_at_a_port_of_its_own(stride: int):
    group = RankGroup(data=2, context=2, tensor=2, stride=stride)
    ranks = [group.rank(data=d, context=c, tensor=t) for d, c, t in product(range(2), repeat=3)]
    stores = [KvcrStore(KvcrOptions(**rank.control_options(40_000)), 4, NAMESPACE) for rank in ranks]
    assert [store.endpoint for store in stores] == [f"tcp://127.0.0.1:{40_000 + stride * n}" for n in range(8)]


def test_a_hint_leads_each_rank_to_its_counterpart_at_the_source():
    sources = GROUP.sources(50_000, "node-1")
    assert sources == {0: "tcp://node-1:50000", 1: "tcp://node-1:50008"}
    for rank in RANKS:
        for data, source in sources.items():
            options = KvcrOptions(**rank.control_options(40_000))
            hint = FetchHint(source, frozenset({1})).envelope("id")
            found = parse_hint(hint, {"node-1"}, move_hints=False, shard_offset=options.shard_offset)
            assert isinstance(found, FetchHint)
            counterpart = GROUP.rank(data=data, pipeline=rank.pipeline, context=rank.context, tensor=rank.tensor)
            assert found.endpoint == f"tcp://node-1:{50_000 + counterpart.number}"


def test_shards_have_names_of_their_own_and_replicas_share_them():
    def names(rank: Rank, *replicated: str) -> bytes:
        namespace = Namespace("m", "1", "float16", "page", 8, rank.namespace_ranks(replicated))
        return namespace.storage_key(chain("a", 1)[0])

    assert len({names(rank) for rank in RANKS}) == 8, "data-parallel ranks have the same pages"
    assert len({names(rank, "context") for rank in RANKS}) == 4
    assert len({names(rank, "context", "tensor", "pipeline") for rank in RANKS}) == 1


def test_one_rank_tells_the_inventory_of_each_data_parallel_rank():
    configs = [EventsConfig("5557", **rank.event_ranks()) for rank in RANKS]
    telling = [(config.data_parallel_rank, config.data_parallel_size) for config in configs if config.is_active]
    assert telling == [(0, 2), (1, 2)]
    assert [rank.number for rank in RANKS if rank.shard == 0] == [0, 8], "those that hints name"


def test_data_parallel_ranks_on_several_hosts_are_named_each_by_its_own():
    assert RankGroup(data=2, tensor=2).sources(40_000, ["a", "b"]) == {0: "tcp://a:40000", 1: "tcp://b:40002"}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RankGroup(tensor=0), "tensor=0; give 1 or more"),
        (lambda: RankGroup(stride=0), "a control port of its own"),
        (lambda: GROUP.rank(context=2), "context rank 2 of 2 does not exist"),
        (lambda: GROUP.rank(data=-1), "data rank -1 of 2 does not exist"),
        (lambda: GROUP.sources(40_000, ["a"]), "1 hosts for 2 data-parallel ranks"),
        (lambda: GROUP.sources(40_000, ["a", "0.0.0.0"]), "peers cannot dial"),
        (lambda: GROUP.sources(65_530, "a"), "of rank 6 does not exist"),
    ],
)
def test_groups_that_cannot_be_are_refused(make, words: str):
    with pytest.raises(ConfigError, match=words):
        make()
