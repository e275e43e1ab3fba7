"""When a prefetch stops waiting, what has arrived is used, and what arrives later is kept or given back."""

from __future__ import annotations

import anyio
import pytest

from kvcr_actors.config import ControllerConfig
from kvcr_actors.errors import ConfigError
from kvcr_actors.ports import StoreTraits
from kvcr_actors.stores.memory import memory_backend
from kvcr_actors.testing.faults import Fault, FaultPlan
from kvcr_actors.testing.store_driver import chain
from kvcr_actors.testing.stores import FaultyStore
from kvcr_actors.types import MissReason, StopPolicy
from tests.actors.cluster import Member, cluster, on_all, single
from tests.actors.rig import virtual

A = chain("a", 8)


def slow_store(
    *, read_s: float = 1.0, traits: StoreTraits | None = None, faults: FaultPlan | None = None
) -> FaultyStore:
    """Two pages a read."""
    return FaultyStore(
        memory_backend(64),
        faults,
        latency=lambda kind, _: read_s if kind == "read" else 0.0,
        traits=traits or StoreTraits(batch_pages=2, read_budget_s=5.0),
    )


async def stop_after(member: Member, seconds: float) -> None:
    await anyio.sleep(seconds)
    member.controller.stop_prefetch("r")


@virtual
async def test_best_effort_uses_what_has_arrived_when_the_engine_asks() -> None:
    async with single(store=slow_store(), prefetch_stop_policy="best-effort") as member:
        await member.store_away(1, A)
        started = anyio.current_time()
        answer, _ = await on_all(member.prefetch("r", A), stop_after(member, 2.5))
        assert answer.pages == 4
        assert anyio.current_time() - started < 2.6
        await member.restore("r", A[:4])
        await anyio.sleep(1)  # the read under way ends


@virtual
async def test_a_read_that_lands_between_the_decision_and_the_stop_is_used() -> None:
    async with single(store=slow_store(), prefetch_stop_policy="best-effort") as member:
        await member.store_away(1, A)
        answer, _ = await on_all(member.prefetch("r", A), stop_after(member, 1.0))
        assert answer.pages in (0, 2)
        member.controller.cancel("r")
        await anyio.sleep(2)
    store = slow_store()
    async with single(store=store, prefetch_stop_policy="best-effort") as member:
        await member.store_away(1, A)
        state = member.controller._assembly._state
        assert state is not None
        assert state.store is not None
        read = state.store.read

        def landing(batch: object, request_id: object) -> object:
            operation = read(batch, request_id)  # type: ignore[arg-type]
            # In one turn of the loop: the bytes are there, and the engine's order to stop is handled.
            operation.when_quiet(lambda: member.controller.stop_prefetch("r"))
            return operation

        state.store.read = landing  # type: ignore[method-assign,assignment]
        answer = await member.prefetch("r", A)
        assert answer.pages >= 2
        member.controller.cancel("r")
        await anyio.sleep(2)


@virtual
async def test_what_arrives_after_the_stop_is_kept_for_the_next_request() -> None:
    store = slow_store()
    async with single(store=store, prefetch_stop_policy="best-effort") as member:
        await member.store_away(1, A)
        answer, _ = await on_all(member.prefetch("r", A), stop_after(member, 0.5))
        assert answer.account is not None
        assert member.controller.claims.quarantined == 1
        await anyio.sleep(1)
        assert member.controller.claims.open == 0
        assert member.controller.host_contents() == frozenset(A[:2])
        reads = store.faults.seen["read"]
        assert (await member.prefetch("again", A[:2])).pages == 2
        assert store.faults.seen["read"] == reads
        await member.restore("again", A[:2])


@virtual
async def test_wait_complete_ignores_the_wish_to_stop_but_not_its_deadline() -> None:
    async with single(store=slow_store(), prefetch_stop_policy="wait-complete", prefetch_deadline_s=3.5) as member:
        await member.store_away(1, A)
        answer, _ = await on_all(member.prefetch("r", A), stop_after(member, 0.5))
        assert answer.pages == 6
        member.controller.cancel("r")
        await anyio.sleep(1)


@virtual
async def test_timeout_waits_as_long_as_the_store_declares_for_so_many_pages() -> None:
    for declared, pages in ((0.25, 4), (2.0, 8)):
        traits = StoreTraits(batch_pages=2, read_budget_s=0.6, read_budget_page_s=declared)
        async with single(store=slow_store(traits=traits)) as member:
            await member.store_away(1, A)
            answer = await member.prefetch("r", A, stop=StopPolicy.TIMEOUT)
            assert answer.pages == pages
            member.controller.cancel("r")
            await anyio.sleep(2)


@virtual
async def test_a_stop_on_one_rank_shortens_the_prefix_on_all() -> None:
    stores = [slow_store(), slow_store()]
    by_rank = {rank: {"store": store} for rank, store in enumerate(stores)}
    async with cluster(by_rank=by_rank, prefetch_stop_policy="best-effort") as members:
        await on_all(*(one.store_away(1, A) for one in members))
        first, second, _ = await on_all(*(one.prefetch("r", A) for one in members), stop_after(members[0], 2.5))
        assert first.pages == second.pages == 4
        await on_all(*(one.restore("r", A[:4]) for one in members))
        await anyio.sleep(1)


@virtual
async def test_scenario_27_a_failing_key_is_read_twice_at_most_and_then_not_at_all_for_a_while() -> None:
    store = slow_store(read_s=0.01, faults=FaultPlan.always(Fault.FAIL, "read"))
    async with single(store=store, failed_read_pause_s=30.0) as member:
        await member.store_away(1, A)
        for n in range(5):
            answer = await member.prefetch(f"r{n}", A)
            assert answer.account is not None
            assert MissReason.READ_FAILED in answer.account.reasons
        assert store.faults.seen["read"] == 2
        await anyio.sleep(31)
        await member.prefetch("later", A)
        assert store.faults.seen["read"] == 4


@virtual
async def test_scenario_29_fifty_prompts_and_memory_for_five_leave_backups_their_share_and_lose_nothing_unread() -> (
    None
):
    async with single(host_slots=40, host_reserve_fraction=0.2, store=1024, read_s=0.05) as member:
        paths = [chain(f"path {n}", 6) for n in range(50)]
        for n, keys in enumerate(paths):
            await member.store_away(n, keys)
        refused = 0
        ready: dict[int, int] = {}

        async def ask(n: int) -> None:
            nonlocal refused
            answer = await member.prefetch(f"r{n}", paths[n])
            if answer.account is None:
                ready[n] = answer.pages
            else:
                refused += MissReason.NO_HOST_MEMORY in answer.account.reasons

        async with anyio.create_task_group() as tasks:
            for n in range(50):
                tasks.start_soon(ask, n)
        # Five whole ones, and one cut to the 2 pages that are left of 32.
        assert sorted(ready.values()) == [2, 6, 6, 6, 6, 6]
        assert refused == 44
        ack = await member.back_up(member.node(100, chain("backup", 8)))
        assert not ack.failed, "the reserve is the backups'"
        for n, pages in ready.items():
            await member.restore(f"r{n}", paths[n][:pages])
        await member.controller.wait_quiet(60)
        assert (await member.prefetch("after", paths[next(iter(ready))])).pages == 6
        member.controller.cancel("after")


@virtual
async def test_scenario_30_reads_go_before_deposits() -> None:
    order: list[str] = []

    def latency(kind: str, pages: int) -> float:
        del pages
        order.append(kind)
        return 0.2 if kind != "lookup" else 0.0

    store = FaultyStore(memory_backend(64), latency=latency, traits=StoreTraits(batch_pages=1, read_budget_s=9.0))
    async with single(store=store, deposit_batch_pages=1, deposit_yield_s=30.0) as member:
        await member.store_away(1, A[:4])
        order.clear()
        await on_all(member.back_up(member.node(2, chain("other", 4))), member.prefetch("r", A[:4]))
        await member.controller.wait_quiet(60)
        operations = [kind for kind in order if kind != "lookup"]
        assert operations.index("read") <= 1
        assert operations[operations.index("read") :][:4] == ["read"] * 4
        assert operations.count("write") == 4
        member.controller.cancel("r")


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="prefetch_stop_policy: 'soon' is not a policy; choose one of best-effort"):
        ControllerConfig.from_mapping({"prefetch_stop_policy": "soon"})


@pytest.mark.parametrize("field", ["prefetch_deadline_s", "deposit_yield_s", "failed_read_pause_s"])
def test_a_negative_budget_is_refused_by_name(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        ControllerConfig.from_mapping({field: -1.0})
