"""Only pages that are proven whole are used, told and kept, whatever is missing and whoever works beside."""

from __future__ import annotations

from functools import partial

import anyio
import pytest

from kvcr_actors.messages import PrefetchReady, RestoreFinished
from kvcr_actors.testing.faults import Fault, FaultPlan
from kvcr_actors.testing.virtual_time import VIRTUAL, BackendName, run_virtual
from kvcr_actors.types import MissReason, Tier
from tests.actors.rig import TRAITS, Rig, chain

on_both_loops = pytest.mark.parametrize("backend", VIRTUAL)

A = chain("a", 5)


async def only_k_can_be_had(k: int, why: str) -> None:
    limit = {"prefetch_in_flight_pages": k} if why == "the limit" else {}
    rig = Rig(host_slots=6, store_latency_s=1.0, **limit)
    async with rig.running():
        await rig.stored(A)
        rig.give_prefetch("r", A)
        await anyio.sleep(0.5)
        assert rig.store is not None
        if why == "the store":
            rig.store._backend.discard(A[k : k + 1])
        answer = await rig.reply("r")
        assert isinstance(answer, PrefetchReady)
        if not k:
            assert answer.account is not None
            assert answer.account.reasons == {MissReason.READ_FAILED: len(A)}
        else:
            assert answer.pages == k
            ids = rig.give_restore("r", k)
            assert isinstance(await rig.reply("r"), RestoreFinished)
            rig.assert_bytes(ids, A[:k])
        await rig.quiet()
        assert rig.assembly.host.contents() == set(A[:k])
        assert rig.assembly.host.free_pages == 6 - k
        rig.check()
    rig.check()


@on_both_loops
@pytest.mark.parametrize(
    ("why", "k"), [*(("the store", k) for k in range(5)), *(("the limit", k) for k in range(1, 5))]
)
def test_scenario_04_of_n_pages_of_which_k_can_be_had_k_are_used_and_the_rest_is_free_again(
    k: int, why: str, backend: BackendName
) -> None:
    run_virtual(partial(only_k_can_be_had, k, why), backend=backend)


async def one_loads_while_another_stores(delay_s: float) -> None:
    """Nodes of 5 to 8 pages, reads of 2 pages, deposits of 3."""
    rig = Rig(host_slots=24, store_latency_s=0.02, copy_latency_s=0.01, deposit_batch_pages=3)
    loading, storing = (*A, *chain("one", 2)), (*A, *chain("two", 3))
    async with rig.running():
        await rig.stored(loading)
        rig.give_prefetch("loading", loading)
        await anyio.sleep(delay_s)
        step = rig.give_step(rig.node(storing))
        answer = await rig.reply("loading")
        assert isinstance(answer, PrefetchReady)
        assert answer.pages == len(loading)
        ids = rig.give_restore("loading", len(loading))
        assert isinstance(await rig.reply("loading"), RestoreFinished)
        rig.assert_bytes(ids, loading)
        ack = await rig.ack(step)
        assert ack is not None
        assert not ack.failed
        await rig.quiet()
        rig.forget_host()
        for keys in (storing, loading):
            finished = await rig.restored(len(keys), keys)
            assert finished is not None
            assert finished.pages == len(keys)
        await rig.quiet()
    rig.check()
    assert TRAITS.batch_pages == 2


@on_both_loops
def test_scenario_05_requests_that_share_a_prefix_get_the_right_bytes_while_one_loads_and_the_other_stores(
    backend: BackendName,
) -> None:
    for turn in range(12):
        run_virtual(partial(one_loads_while_another_stores, turn * 0.01), backend=backend)


async def refill_and_partial_batches() -> None:
    rig = Rig()
    async with rig.running():
        await rig.stored(A)
        await rig.quiet()
        assert rig.index.keys(Tier.HOST) == frozenset()
        assert (await rig.prefetched("r", A)).pages == len(A)
        await rig.quiet()
        assert rig.index.keys(Tier.HOST) == set(A), "a refill is told like any other copy"
        assert [rig.index.parent(Tier.HOST, key) for key in A] == [None, *A[:-1]]
        rig.give_cancel("r")
        await rig.reply("r")
        rig.forget_host()
        await rig.quiet()
        assert rig.store is not None
        rig.store.faults = FaultPlan.always(Fault.TRUNCATE, "read")
        await rig.prefetched("half", A)
        await rig.quiet()
        assert rig.index.keys(Tier.HOST) == rig.assembly.host.contents() < set(A)
        rig.give_cancel("half")
        rig.device.faults = FaultPlan.always(Fault.FAIL, "to_host.side")
        ack = await rig.back_up(rig.node(partial_path := chain("partial", 3)))
        assert ack is not None
        assert ack.failed
        await rig.quiet()
        assert not rig.index.keys(Tier.HOST) & set(partial_path)
        assert not rig.index.keys(Tier.STORE) & set(partial_path)
        rig.check()
    rig.check()


@on_both_loops
def test_scenario_35_a_refill_is_published_like_any_copy_and_what_came_in_part_is_not(backend: BackendName) -> None:
    run_virtual(refill_and_partial_batches, backend=backend)
