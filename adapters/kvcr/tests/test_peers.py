"""What a hint brings from a peer, for plain and for hybrid layouts, and what is claimed for it."""

from __future__ import annotations

import anyio
import pytest

from kvcr_actors.testing.store_driver import chain
from kvcr_actors.types import AllPages, CacheLayout, PoolSpec, Tier, TrailingPages
from kvcr_actors_kvcr import FetchHint
from tests.pairs import side

pytestmark = pytest.mark.anyio

PLAIN = CacheLayout((PoolSpec("kv", 2, 96), PoolSpec("indexer", 1, 40)))
HYBRID = CacheLayout(
    (
        PoolSpec("kv", 2, 96, AllPages()),
        PoolSpec("swa", 1, 64, TrailingPages(2)),
        PoolSpec("mamba", 1, 7, TrailingPages(1)),
    )
)
KV, SWA, MAMBA = 1, 2, 4


async def test_a_peers_pages_are_delivered_for_the_request_of_the_hint_alone():
    async with side(PLAIN) as source, side(PLAIN) as target:
        keys = chain("a", 6)
        await source.write(keys, [3] * 6)
        target.store.begin_request("hinted", source.hint(keys[:4]))
        assert await target.lookup(keys, "hinted") == (3, 3, 3, 3, 0, 0)
        assert await target.lookup(keys, "other") == (0,) * 6
        assert await target.read(keys, [3] * 6, "other") == "m" * 6
        assert await target.read(keys, [3] * 6, "hinted") == "oooomm"
        target.store.end_request("hinted")
        assert await target.lookup(keys, "hinted") == (0,) * 6
        assert await target.read(keys, [3] * 6, "hinted") == "m" * 6
        assert target.store.contents() == frozenset()


async def test_pages_that_the_source_lost_are_misses_beside_those_that_it_has():
    async with side(PLAIN) as source, side(PLAIN) as target:
        keys = chain("a", 4)
        await source.write(keys[:3], [3] * 3)
        target.store.begin_request("request", source.hint(keys))
        assert await target.read(keys, [3] * 4) == "ooom"
        state = target.store.describe()
        assert (state["hinted"], state["delivered"], state["partial_deliveries"]) == (4, 3, 1)


@pytest.mark.parametrize("combined", [True, False])
async def test_local_and_remote_pages_of_one_batch_come_each_from_where_they_are(combined: bool):
    options = {"combine_page_reads": combined, "combine_page_writes": combined}
    async with side(PLAIN, **options) as source, side(PLAIN, **options) as target:
        keys = chain("a", 4)
        await source.write(keys, [3] * 4)
        await target.write(keys[:2], [3] * 2)
        target.store.begin_request("request", source.hint(keys))
        assert await target.lookup(keys) == (3,) * 4
        assert await target.read(keys, [3] * 4) == "oooo"
        assert target.store.describe()["delivered"] == 2


async def test_a_hybrid_boundary_counts_once_the_peer_delivered_its_trailing_pages():
    async with side(HYBRID) as source, side(HYBRID) as target:
        keys = chain("a", 6)
        # Checkpoints end at page 2 and at page 4; the two pages after that have their KV only.
        await source.write(keys, [KV, KV | SWA | MAMBA, KV | SWA, KV | SWA | MAMBA, KV, KV])
        target.store.begin_request("request", source.hint(keys))
        assert await target.lookup(keys) == (KV | SWA | MAMBA,) * 6, "a hint is a promise"
        assert [await target.confirm(keys[:length]) for length in (6, 5, 4)] == [False, False, True]
        assert await target.read(keys[:4], [KV, KV, KV | SWA, KV | SWA | MAMBA]) == "oooo"
        assert target.services.inventory.residents(Tier.STORE) == frozenset(keys[2:4]), "confirmed pages are held here"


async def test_what_the_host_has_already_is_not_asked_of_the_peer():
    async with side(HYBRID) as source, side(HYBRID) as target:
        keys = chain("a", 4)
        await source.write(keys, [KV, KV, KV, KV | SWA | MAMBA])
        target.store.begin_request("request", source.hint(keys))
        await target.lookup(keys[3:])
        assert await target.confirm(keys) is True, "page 2, which the source lacks, was never looked up"


async def test_a_request_without_a_hint_has_nothing_to_confirm():
    async with side(HYBRID) as one:
        assert await one.confirm(chain("a", 2)) is True


async def test_what_was_confirmed_is_claimed_until_the_request_ends():
    async with side(HYBRID) as source, side(HYBRID, capacity=1, align_storage_prefix=False) as target:
        keys = chain("a", 1)
        await source.write(keys, [KV | SWA | MAMBA])
        target.store.begin_request("request", source.hint(keys))
        await target.lookup(keys)
        assert await target.confirm(keys) is True
        other = chain("b", 1)
        assert await target.write(other, [SWA | MAMBA]) == "F", "a claimed page is not evicted"
        target.store.end_request("request")
        assert await target.write(other, [SWA | MAMBA]) == "o", "its claim ended with the request"


async def test_a_claim_that_comes_after_the_request_ended_is_released_on_arrival():
    async with side(HYBRID) as source, side(HYBRID, capacity=1, align_storage_prefix=False) as target:
        keys = chain("a", 1)
        await source.write(keys, [KV | SWA | MAMBA])
        target.store.begin_request("request", source.hint(keys))
        await target.lookup(keys)
        confirmation = target.store.confirm(keys, "request")
        await anyio.sleep(0.001)
        target.store.end_request("request")
        with anyio.fail_after(20):
            await confirmation.outcome()
        assert await target.write(chain("b", 1), [SWA | MAMBA]) == "o"


async def test_replicated_pages_are_written_by_their_owner_and_read_from_it():
    async with side(PLAIN) as owner:
        shared = {"share_replicated_mla": True, "owner_endpoint": owner.store.endpoint}
        async with side(PLAIN, **shared) as other:
            keys = chain("a", 3)
            assert await other.lookup(keys) == (0, 0, 0)
            assert await other.write(keys, [3] * 3) == "ooo"
            assert other.store.contents() == frozenset(), "one writer"
            await owner.write(keys[:2], [3] * 2)
            assert await other.lookup(keys) == (3, 3, 3)
            assert await other.read(keys, [3] * 3) == "oom", "its own copy, else the owner's, else a miss"
            assert await other.lookup(keys) == (3, 3, 0), "a page that the owner lost is not promised again"


async def test_a_move_is_never_silently_a_copy():
    async with side(PLAIN) as source, side(PLAIN, move_hints=True) as target:
        keys = chain("a", 2)
        await source.write(keys, [3] * 2)
        hint = source.hint(keys)
        hint["actions"][0]["payload"]["mode"] = "move"
        target.store.begin_request("request", hint)
        assert await target.read(keys, [3] * 2) == "mm"
        assert target.store.describe()["hints_refused"] == {"move": 1}
        assert await source.read(keys, [3] * 2) == "oo"


async def test_a_source_whose_digest_differs_is_a_miss():
    async with side(PLAIN, verify_transfer_bytes=True) as source, side(PLAIN, verify_transfer_bytes=True) as target:
        keys = chain("a", 2)
        await source.write(keys, [3] * 2)
        instance = source.store._instance
        pool = instance._pools["kv"]
        pool._mapping[5] ^= 1
        target.store.begin_request("request", source.hint(keys))
        assert sorted(await target.read(keys, [3] * 2)) == ["m", "o"]
        assert target.store.describe()["damaged"] == 1
        assert sorted(await source.read(keys, [3] * 2)) == ["m", "o"], "the owner sees it too"
        assert len(source.store.contents()) == 1, "and holds the page no longer"
        assert await source.write(keys, [3] * 2) == "oo"
        assert await source.read(keys, [3] * 2) == "oo", "a page written again is read again"


async def test_what_is_read_in_parts_is_verified_as_a_whole():
    async with side(PLAIN, verify_transfer_bytes=True, combine_page_reads=False) as one:
        keys = chain("a", 2)
        await one.write(keys, [3] * 2)
        assert await one.read(keys, [1] * 2) == "oo"
        one.store._instance._pools["indexer"]._mapping[5] ^= 1
        assert sorted(await one.read(keys, [1] * 2)) == ["m", "o"]


async def test_hints_name_their_source_in_the_runners_only_shape():
    envelope = FetchHint("tcp://127.0.0.1:5000", frozenset({2, 1})).envelope("id")
    assert envelope["actions"][0]["payload"] == {
        "source_control_endpoint": "tcp://127.0.0.1:5000",
        "block_hashes": [1, 2],
        "mode": "copy",
    }
