"""An index built from events alone equals what the tiers hold, and counts what a correct stream never has."""

from __future__ import annotations

import pytest

from kvcr_actors.core.inventory import BlocksRemoved, BlocksStored, InventoryIndex, Ownership, TierCleared
from kvcr_actors.errors import InvalidNodeError
from kvcr_actors.types import Tier

STORE = Ownership.STORE


def test_tiers_are_apart() -> None:
    index = InventoryIndex()
    index.publish([BlocksStored(Tier.HOST, (b"a", b"b"), (None, b"a")), BlocksStored(Tier.STORE, (b"a",), (None,))])
    index.publish([BlocksRemoved(Tier.HOST, (b"b",))])
    assert index.keys(Tier.HOST) == {b"a"}
    assert index.keys(Tier.STORE) == {b"a"}
    assert index.keys(Tier.DEVICE) == frozenset()
    assert (index.applied, index.anomalies) == (3, 0)


def test_a_clear_empties_one_tier() -> None:
    index = InventoryIndex()
    index.publish([BlocksStored(tier, (b"a",), (None,)) for tier in Tier])
    index.apply(TierCleared(Tier.HOST))
    assert [len(index.keys(tier)) for tier in Tier] == [1, 0, 1]


def test_every_stored_key_has_a_parent() -> None:
    with pytest.raises(InvalidNodeError, match="2 keys were stored with 1 parents"):
        BlocksStored(Tier.HOST, (b"a", b"b"), (None,))


def test_parents_are_kept_as_they_were_stored() -> None:
    index = InventoryIndex()
    index.apply(BlocksStored(Tier.HOST, (b"a", b"b"), (None, b"a")))
    assert index.parent(Tier.HOST, b"b") == b"a"
    assert index.parent(Tier.HOST, b"a") is None
    with pytest.raises(KeyError):
        index.parent(Tier.STORE, b"a")


def test_what_a_correct_stream_never_has_is_counted() -> None:
    index = InventoryIndex()
    index.apply(BlocksRemoved(Tier.HOST, (b"a",)))
    index.apply(BlocksStored(Tier.HOST, (b"a",), (None,)))
    index.apply(BlocksStored(Tier.HOST, (b"a",), (None,)))
    assert index.anomalies == 2


def test_a_stores_own_copies_are_the_stores_wherever_they_lie() -> None:
    index = InventoryIndex()
    index.publish(
        [
            BlocksStored(Tier.HOST, (b"a",), (None,)),
            BlocksStored(Tier.HOST, (b"b",), (b"a",), Ownership.STORE),
            BlocksStored(Tier.STORE, (b"c",), (b"b",), Ownership.STORE),
        ]
    )
    assert index.residents(Tier.HOST) == {b"a"}
    assert index.residents(Tier.STORE) == {b"b", b"c"}
    assert index.keys(Tier.HOST) == {b"a", b"b"}


def test_a_stores_own_copies_are_apart_within_a_tier() -> None:
    index = InventoryIndex()
    index.publish(
        [BlocksStored(Tier.HOST, (b"a",), (None,)), BlocksStored(Tier.HOST, (b"a", b"b"), (b"p", b"a"), STORE)]
    )
    assert index.keys(Tier.HOST) == {b"a", b"b"}
    index.apply(TierCleared(Tier.HOST))
    assert index.keys(Tier.HOST) == {b"a", b"b"}
    assert (index.parent(Tier.HOST, b"a"), index.parent(Tier.HOST, b"b")) == (b"p", b"a")
    assert list(index.holding(Tier.HOST, STORE)) == [b"a", b"b"]
    assert (len(index), index.anomalies) == (2, 0)
