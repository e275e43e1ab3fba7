"""Malformed orders and layouts are refused where they are made, by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcr_actors.errors import ConfigError, InvalidNodeError
from kvcr_actors.types import (
    NO_SLOT,
    AllPages,
    BackupNode,
    BlockGroups,
    CacheLayout,
    PoolSpec,
    PrefetchRequest,
    RestoreOrder,
    TrailingPages,
)

KEYS = (b"a" * 32, b"b" * 32)


def test_bytes_of_a_page_are_those_of_its_planes_and_pools() -> None:
    layout = CacheLayout((PoolSpec("kv", 4, 100), PoolSpec("mamba", 1, 7, TrailingPages(1))), page_tokens=16)
    assert [pool.page_bytes for pool in layout.pools] == [400, 7]
    assert layout.page_bytes == 407
    assert layout.pools[0].policy == AllPages()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: PoolSpec("a b", 1, 1), "pool name 'a b'"),
        (lambda: PoolSpec("kv", 0, 1), "pool kv: planes"),
        (lambda: PoolSpec("kv", 1, 0), "pool kv: planes"),
        (lambda: CacheLayout(()), "at least one pool"),
        (lambda: CacheLayout((PoolSpec("kv", 1, 1), PoolSpec("kv", 1, 2))), "each only once"),
        (lambda: CacheLayout((PoolSpec("kv", 1, 1),), page_tokens=0), "page_tokens must be 1 or more"),
    ],
)
def test_a_layout_that_makes_no_sense_is_a_configuration_error(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize("policy", [TrailingPages, BlockGroups])
def test_hit_policies_count_from_one(policy: Callable[[int], object]) -> None:
    with pytest.raises(ValueError, match=">= 1"):
        policy(0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: BackupNode(1, (), ([],)), "node 1: it has no pages"),
        (lambda: BackupNode(1, KEYS, ([1, 2], [1])), "node 1: pool 1 lists 1 pages for 2 keys"),
        (lambda: PrefetchRequest("r", KEYS, 3), "request r: device_pages 3 of 2"),
        (lambda: PrefetchRequest("r", KEYS, -1), "request r: device_pages -1 of 2"),
        (lambda: RestoreOrder("r", 0, ([1, 2], [1])), "restore of r: pool 1"),
        (lambda: RestoreOrder("r", 3, ([1, 2],), device_pages=2), "first 3 is beyond the 2 pages"),
    ],
)
def test_a_malformed_order_names_itself(make: Callable[[], object], words: str) -> None:
    with pytest.raises(InvalidNodeError, match=words):
        make()


def test_well_formed_orders_are_taken() -> None:
    assert BackupNode(1, KEYS, ([1, 2], [3, 4])).parent is None
    assert PrefetchRequest("r", KEYS, 2).device_pages == 2
    assert RestoreOrder("r", 0, ([1, 2], [3, 4])).count == 2


def test_keys_of_a_wrong_length_are_refused_and_named() -> None:
    for make in (
        lambda: BackupNode(7, (bytes(32), b"short"), ((0, 1),)),
        lambda: PrefetchRequest("r", (bytes(32), b"short")),
    ):
        with pytest.raises(InvalidNodeError, match="key b'short' has 5 bytes, not 32"):
            make()


def test_a_page_of_which_no_pool_keeps_anything_is_refused() -> None:
    keys = (bytes(32), bytes([1]) * 32)
    BackupNode(7, keys, ((0, NO_SLOT), (NO_SLOT, 3)))
    with pytest.raises(InvalidNodeError, match="node 7: no pool keeps anything for its page 1"):
        BackupNode(7, keys, ((0, NO_SLOT), (2, NO_SLOT)))
