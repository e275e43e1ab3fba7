"""NVIDIA's KV Cache Runner as a store of kvcr-actors."""

from kvcr_actors_kvcr.endpoints import group_ports, router_metadata
from kvcr_actors_kvcr.hints import FetchHint, HintRefusal, parse_hint
from kvcr_actors_kvcr.metrics import KvcrStoreCollector
from kvcr_actors_kvcr.options import KvcrOptions, options_table
from kvcr_actors_kvcr.rank_group import Rank, RankGroup
from kvcr_actors_kvcr.store import KvcrStore, open_store

__all__ = [
    "FetchHint",
    "HintRefusal",
    "KvcrOptions",
    "KvcrStore",
    "KvcrStoreCollector",
    "Rank",
    "RankGroup",
    "group_ports",
    "open_store",
    "options_table",
    "parse_hint",
    "router_metadata",
]
