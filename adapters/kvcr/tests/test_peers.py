"""What a hint brings from a peer, for plain and for hybrid layouts, and what is claimed for it."""

from __future__ import annotations

import anyio
import pytest
import structlog

from kvcr_actors import NO_SLOT, AllPages, CacheLayout, ConfigError, Namespace, PoolSpec, Tier, TrailingPages
from kvcr_actors.ports import PageBatch
from kvcr_actors.testing.host_memory import BytesHostMemory
from kvcr_actors.testing.services import open_services
from kvcr_actors.testing.store_driver import chain, letters
from kvcr_actors_kvcr import FetchHint, KvcrOptions, KvcrStore
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
MLA_AND_MAMBA = CacheLayout((PoolSpec("kv", 2, 96), PoolSpec("mamba", 1, 40, TrailingPages(1))))


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
        with structlog.testing.capture_logs() as logs:
            assert await target.read(keys, [3] * 4) == "ooom"
        (lost,) = (line["reason"] for line in logs if line["event"] == "kvcr.not_delivered")
        assert lost == f"{source.store.endpoint} refused 1 of 4 blocks"
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


async def confirmed(source, target):
    """The keys of a page that the source has, which the target has confirmed for `request`."""
    keys = chain("a", 1)
    await source.write(keys, [KV | SWA | MAMBA])
    target.store.begin_request("request", source.hint(keys))
    await target.lookup(keys)
    assert await target.confirm(keys) is True
    return keys


async def test_what_was_confirmed_is_claimed_until_the_request_ends():
    async with side(HYBRID) as source, side(HYBRID, capacity=1, align_storage_prefix=False) as target:
        await confirmed(source, target)
        other = chain("b", 1)
        assert await target.write(other, [SWA | MAMBA]) == "F", "a claimed page is not evicted"
        target.store.end_request("request")
        assert await target.write(other, [SWA | MAMBA]) == "o", "its claim ended with the request"


async def test_a_request_that_begins_twice_leaves_no_claim_of_the_first_time():
    async with side(HYBRID) as source, side(HYBRID, capacity=1, align_storage_prefix=False) as target:
        keys = await confirmed(source, target)
        target.store.begin_request("request", source.hint(keys))
        target.store.end_request("request")
        assert await target.write(chain("b", 1), [SWA | MAMBA]) == "o"


async def test_what_another_request_brought_here_is_claimed_for_this_one_too():
    async with side(HYBRID) as source, side(HYBRID, capacity=1, align_storage_prefix=False) as target:
        keys, other = chain("a", 1), chain("b", 1)
        await source.write(keys, [KV | SWA | MAMBA])
        for request in ("first", "second"):
            target.store.begin_request(request, source.hint(keys))
            await target.lookup(keys, request)
            assert await target.confirm(keys, request) is True
        target.store.end_request("first")
        assert await target.write(other, [SWA | MAMBA]) == "F", "the second request still needs it"
        target.store.end_request("second")
        assert await target.write(other, [SWA | MAMBA]) == "o"
        assert target.store.describe()["confirmed"] == 2, "each block came once"


async def test_a_window_of_more_pages_than_one_call_takes_is_confirmed_in_several():
    wide = CacheLayout((PoolSpec("kv", 2, 96), PoolSpec("swa", 1, 8, TrailingPages(100))))
    options = {"capacity": 128, "slots": 128, "diagnostic_telemetry": True}
    async with side(wide, capacity=128, slots=128) as source, side(wide, **options) as target:
        keys = chain("a", 100)
        await source.write(keys, [3] * 100)
        target.store.begin_request("request", source.hint(keys))
        await target.lookup(keys)
        with structlog.testing.capture_logs() as logs:
            assert await target.confirm(keys) is True
        assert [line["pages"] for line in logs if line["event"] == "kvcr.transfer"] == [64, 36]


def counting(call, named: list[int]):
    """The same call, which notes how many blocks it names."""

    def counted(blocks, *rest, **more):
        named.append(len(blocks))
        return call(blocks, *rest, **more)

    return counted


async def test_no_call_of_the_runner_names_more_than_64_blocks(monkeypatch: pytest.MonkeyPatch):
    options = {"capacity": 80, "slots": 80, "combine_page_writes": False}
    async with side(HYBRID, **options) as source, side(HYBRID, **options) as target:
        named: dict[str, list[int]] = {}
        for one in (source, target):
            kvcr = one.store._runner.kvcr
            for call in (kvcr.deposit, kvcr.fetch, kvcr.deliver, kvcr.align_sequence):
                monkeypatch.setattr(kvcr, call.__name__, counting(call, named.setdefault(call.__name__, [])))
        keys = chain("a", 70)
        assert await source.write(keys, [KV | SWA | MAMBA] * 70) == "o" * 70
        assert await source.write(chain("b", 20), [KV | SWA | MAMBA] * 20) == "o" * 20, "with evictions"
        held = [key for key in keys if key in source.store.contents()]
        assert held == list(keys[:60]), "the tail left first"
        assert await source.read(held, [KV | SWA | MAMBA] * 60) == "o" * 60
        target.store.begin_request("request", source.hint(held))
        await target.lookup(held)
        assert await target.confirm(held) is True
        assert await target.read(held, [KV | SWA | MAMBA] * 60) == "o" * 60
        assert {call: max(counts) <= 64 for call, counts in named.items()} == dict.fromkeys(
            ("deposit", "fetch", "deliver", "align_sequence"), True
        )


async def test_a_side_page_that_is_evicted_while_the_rest_arrives_makes_the_page_a_miss():
    async with side(HYBRID) as source, side(HYBRID, capacity=1, align_storage_prefix=False) as target:
        keys = await confirmed(source, target)
        target.store.end_request("request")  # its side pages stay, without a claim
        target.store.begin_request("late", source.hint(keys))
        read = target.store.read(target.batch(keys, [KV | SWA | MAMBA]), "late")
        other = PageBatch(chain("b", 1), ((NO_SLOT,), (5,), (5,)), (None,))
        write = target.store.write(other)
        assert letters((await target.outcome(write)).pages) == "o", "it evicts what the read counts on"
        assert letters((await target.outcome(read)).pages) == "m"


async def test_a_page_that_goes_between_the_reads_of_its_pools_is_a_miss(monkeypatch: pytest.MonkeyPatch):
    async with side(PLAIN, combine_page_reads=False) as one:
        keys = chain("a", 2)
        await one.write(keys, [3] * 2)
        transfers = one.store._mover._transfers
        real = transfers.fetch

        def fetch(batch: PageBatch, pieces):
            good = yield from real(batch, pieces)
            one.store._index.drop(keys[0])
            return good

        monkeypatch.setattr(transfers, "fetch", fetch)
        assert await one.read(keys, [3] * 2) == "mo"


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


async def test_an_owner_that_is_not_asked_now_is_not_taken_to_have_lost_its_pages():
    async with side(PLAIN) as owner:
        shared = {"share_replicated_mla": True, "owner_endpoint": owner.store.endpoint}
        async with side(PLAIN, **shared) as other:
            keys = chain("a", 2)
            for one in (owner, other):
                await one.write(keys, [3] * 2)
            peers = other.store._peers
            peers.pause(owner.store.endpoint)
            assert await other.lookup(keys) == (0, 0), "nothing is promised that would not be asked for"
            assert await other.read(keys, [3] * 2) == "mm"
            peers._paused.clear()
            assert await other.lookup(keys) == (3, 3)
            assert await other.read(keys, [3] * 2) == "oo"


async def test_each_rank_writes_its_shards_of_a_pool_where_the_other_pools_are_replicated():
    options = {"share_replicated_mla": True, "sharded_pools": "mamba"}
    async with (
        side(MLA_AND_MAMBA, tensor=0, **options) as owner,
        side(MLA_AND_MAMBA, tensor=1, owner_endpoint=owner.store.endpoint, **options) as other,
    ):
        keys = chain("a", 3)
        await owner.write(keys, [1, 3, 3])
        assert await other.write(keys, [1, 3, 1]) == "ooo"
        assert await other.lookup(keys) == (1, 3, 1), "KV is the owner's, the state its own"
        assert other.store.contents() == {keys[1]}
        assert await other.read(keys, [1, 3, 1]) == "ooo", "with the bytes of its own shard"
        hinted = other.store.describe()["hinted"]
        assert await other.read(keys, [1, 3, 3]) == "oom", "the owner's shard is another's"
        assert other.store.describe()["hinted"] == hinted + 2, "and is not asked for"
        other.store.begin_request("astray", owner.hint(keys))
        assert await other.read(keys, [1, 3, 3], "astray") == "oom", "nor taken where a hint leads to it"
        assert await owner.read(keys, [1, 3, 3]) == "ooo"


async def test_shards_that_the_layout_or_the_namespace_lacks_are_refused():
    for tensor, pools, words in ((0, "draft", "names 'draft'"), (None, "mamba", "must name this rank's tensor axis")):
        async with open_services() as services:
            with pytest.raises(ConfigError, match=words):
                await store_of(tensor, pools).open(services, BytesHostMemory(MLA_AND_MAMBA, 4))


def store_of(tensor: int | None, pools: str) -> KvcrStore:
    ranks = () if tensor is None else (("tensor", tensor, 2),)
    names = Namespace("test-model", "1", "float16", "page", MLA_AND_MAMBA.page_bytes, ranks)
    return KvcrStore(KvcrOptions(share_replicated_mla=True, sharded_pools=pools), 4, names)


async def test_a_move_is_never_silently_a_copy():
    async with side(PLAIN) as source, side(PLAIN, move_hints=True) as target:
        keys = chain("a", 2)
        await source.write(keys, [3] * 2)
        hint = source.hint(keys)
        hint["actions"][0]["payload"]["mode"] = "move"
        target.store.begin_request("request", hint)
        assert await target.read(keys, [3] * 2) == "mm"
        assert target.store.describe()["hints_refused"] == {"move_unsupported": 1}
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
