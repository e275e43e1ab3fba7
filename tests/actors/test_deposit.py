"""Deposit: parents before children, bounded retries, and a later insert that tries again."""

from __future__ import annotations

import anyio
import pytest

from kvcr_actors.messages import DepositFailed
from kvcr_actors.metrics import Metrics
from kvcr_actors.ports import BatchOutcome, PageBatch
from kvcr_actors.testing.faults import Fault, FaultPlan
from kvcr_actors.transfers import Operation
from kvcr_actors.types import SkipReason
from tests.actors.rig import Rig, chain, virtual

pytestmark = pytest.mark.anyio


def failures(rig: Rig) -> list[DepositFailed]:
    rig.take()
    return [one for one in rig.completions if isinstance(one, DepositFailed)]


@virtual
async def test_a_batch_that_fails_is_retried_a_bounded_number_of_times_then_the_caller_hears_of_it() -> None:
    rig = Rig(store_faults=FaultPlan.always(Fault.FAIL, "write"), deposit_retries=3)
    keys = chain("a", 2)
    async with rig.running():
        await rig.back_up(rig.node(keys))
        await rig.quiet()
        assert rig.store is not None
        assert rig.store.faults.seen["write"] == 4
        assert failures(rig) == [DepositFailed(keys, SkipReason.STORE_FAILED)]
        assert rig.stats.deposit.skipped == {SkipReason.STORE_FAILED: 2}
        assert rig.assembly.host.contents() == set(keys)
    rig.check()


@virtual
async def test_children_of_a_page_that_failed_for_good_are_not_written_and_a_later_insert_tries_all_again() -> None:
    plan = FaultPlan({("write", n): Fault.FAIL for n in range(2)})
    rig = Rig(store_faults=plan, deposit_retries=1)
    keys = chain("a", 5)
    async with rig.running():
        await rig.back_up(rig.node(keys))
        await rig.quiet()
        assert rig.store is not None
        assert plan.seen["write"] == 2
        assert not rig.store.contents()
        assert dict.fromkeys(one.reason for one in failures(rig)).keys() == {
            SkipReason.STORE_FAILED,
            SkipReason.PARENT_ABSENT,
        }
        # The same node again: nothing is to be copied, and the store gets what it lacks.
        ack = await rig.back_up(rig.node(keys))
        assert ack is not None
        assert not ack.failed
        await rig.quiet()
        assert rig.stats.backup.submits == 1
        assert rig.store.contents() == set(keys)
        rig.forget_host()
        finished = await rig.restored("r", keys)
        assert finished is not None
        assert finished.pages == 5
    rig.check()


@virtual
async def test_a_page_stored_without_its_parent_is_no_reason_to_leave_the_parent_out() -> None:
    # The first page of the batch fails each time, its child is taken.
    rig = Rig(store_faults=FaultPlan({("write", n): Fault.CORRUPT for n in range(2)}), deposit_retries=1)
    keys = chain("a", 3)
    async with rig.running():
        await rig.back_up(rig.node(keys[:2]))
        await rig.quiet()
        assert rig.store is not None
        assert rig.store.contents() == {keys[1]}
        await rig.back_up(rig.node(keys[2:], keys[1]))
        await rig.quiet()
        assert rig.store.contents() == set(keys)
        rig.forget_host()
        finished = await rig.restored("r", keys)
        assert finished is not None
        assert finished.pages == 3
    rig.check()


async def test_a_page_that_the_store_lost_is_written_again_with_its_descendants_insert() -> None:
    rig = Rig()
    keys = chain("a", 3)
    async with rig.running():
        await rig.back_up(rig.node(keys[:2]))
        await rig.quiet()
        assert rig.store is not None
        rig.store._backend.discard(keys[:1])
        assert rig.assembly._state is not None
        rig.assembly._state.observe_store(rig.store._backend.take_events())
        await rig.back_up(rig.node(keys[2:], keys[1]))
        await rig.quiet()
        assert rig.store.contents() == set(keys)
    rig.check()


async def test_a_full_store_is_not_asked_again_at_once() -> None:
    rig = Rig(store_pages=1)
    async with rig.running():
        await rig.back_up(rig.node(chain("a", 2)))
        await rig.quiet()
        assert rig.store is not None
        assert rig.store.faults.seen["write"] == 1
        assert rig.stats.deposit.skipped == {SkipReason.STORE_FULL: 1}
    rig.check()


@virtual
async def test_scenario_28_a_write_that_never_ends_keeps_its_pages_until_it_is_quiet_and_blocks_no_other() -> None:
    rig = Rig(store_faults=FaultPlan({("write", 0): Fault.STALL}), host_slots=8)
    a, b = chain("a", 2), chain("b", 2)
    async with rig.running():
        await rig.back_up(rig.node(a))
        await rig.back_up(rig.node(b))
        await rig.quiet()
        assert rig.store is not None
        assert rig.store.contents() == set(b)
        ledger = rig.assembly.ledger
        assert (ledger.open, ledger.quarantined, ledger.quarantined_bytes) == (1, 1, 2 * 29)
        rig.forget_host()
        assert rig.assembly.host.contents() == set(a)  # a write may still read them
        await rig.quiet()
        rig.check(quiet=False)
        rig.store.release()
        await rig.ports_quiet()
        rig.check()
        rig.forget_host()
        assert not rig.assembly.host.contents()
    rig.check()


async def test_scenario_30_beyond_the_queues_bound_deposits_are_shed_and_offered_again() -> None:
    rig = Rig(store_latency_s=0.05, deposit_queue_pages=3)
    async with rig.running():
        for name in "abcd":
            await rig.back_up(rig.node(chain(name, 2)))
        await rig.quiet()
        assert (shed := rig.stats.deposit.shed) >= 2
        assert f"kvcr_actors_deposit_shed_pages_total {shed}.0" in Metrics(lambda: rig.stats).render().decode()
        assert rig.store is not None
        assert len(rig.store.contents()) == 8
        assert not [one for one in rig.completions if isinstance(one, DepositFailed)]
    rig.check()


async def test_a_shed_page_that_leaves_the_host_before_there_is_room_is_named() -> None:
    rig = Rig(store_faults=FaultPlan({("write", 0): Fault.STALL}), deposit_queue_pages=2)
    async with rig.running():
        for name in "ab":
            await rig.back_up(rig.node(chain(name, 2)))
        await anyio.sleep(0.1)
        rig.forget_host()
        (told,) = [one for one in rig.take() if isinstance(one, DepositFailed)]
        assert set(told.keys) == set(chain("b", 2))
        assert told.reason is SkipReason.QUEUE_FULL
        assert rig.store is not None
        rig.store.release()
        await rig.quiet()
        assert rig.stats.deposit.skipped == {SkipReason.QUEUE_FULL: 2}
        assert rig.store.contents() == set(chain("a", 2))
    rig.check()


@virtual
async def test_what_is_owed_at_the_end_is_named() -> None:
    rig = Rig(store_faults=FaultPlan.always(Fault.STALL, "write"), deposit_queue_pages=2)
    async with rig.running():
        for name in "ab":
            await rig.back_up(rig.node(chain(name, 2)))
    told = [one for one in rig.completions if isinstance(one, DepositFailed)]
    assert {key for one in told for key in one.keys} == {*chain("a", 2), *chain("b", 2)}


async def test_what_is_owed_outlives_the_actor() -> None:
    rig = Rig(store_faults=FaultPlan({("write", 0): Fault.STALL}), deposit_queue_pages=2)
    async with rig.running():
        for name in "ab":
            await rig.back_up(rig.node(chain(name, 2)))
        await anyio.sleep(0.1)
        await rig.crash("deposit")
        await rig.quiet()
        assert rig.store is not None
        assert rig.store.contents() == set(chain("b", 2))
        rig.store.release()
        await rig.ports_quiet()
        told = [one for one in rig.completions if isinstance(one, DepositFailed)]
        assert told == [DepositFailed(chain("a", 2), SkipReason.STOPPED)]
    rig.check()


async def test_an_order_larger_than_the_queue_is_written_when_nothing_else_waits() -> None:
    rig = Rig(host_slots=8)
    async with rig.running():
        await rig.back_up(rig.node(chain("a", 8)))
        await rig.quiet()
        assert rig.stats.deposit.deposited == 8
    rig.check()


async def test_pages_on_their_way_to_the_store_are_not_queued_twice() -> None:
    rig = Rig(store_latency_s=0.05, deposit_queue_pages=3)
    keys = chain("a", 2)
    async with rig.running():
        for _ in range(5):
            await rig.back_up(rig.node(keys))
        await rig.quiet()
        assert not rig.stats.deposit.skipped
        assert rig.store is not None
        assert rig.store.faults.seen["write"] == 1
    rig.check()


@virtual
async def test_scenario_32_a_store_call_that_raises_is_counted_and_ends_nobody() -> None:
    rig = Rig()
    assert rig.store is not None
    keys = chain("a", 3)

    def raising(*args: object) -> object:
        raise OSError("planted")

    async with rig.running():
        await rig.stored(keys)
        real = {name: getattr(rig.store, name) for name in ("lookup", "read", "write", "align")}
        for number, name in enumerate(real):
            setattr(rig.store, name, raising)
            answer = await rig.restored(f"r{number}", keys)
            assert (answer is None) == (name in ("lookup", "read"))
            ack = await rig.back_up(rig.node(chain(f"{number}", 2)))
            assert ack is not None
            assert not ack.failed
            await rig.quiet()
            rig.forget_host()
            await anyio.sleep(5)  # the pause after a failed read
            setattr(rig.store, name, real[name])
            rig.check()
        assert rig.stats.store_faults >= 4
        assert all(actor["restarts"] == 0 for actor in rig.assembly.describe()["actors"].values())
    rig.check()
    assert rig.failure is None


@virtual
async def test_the_next_batch_of_an_order_waits_until_the_store_has_let_go_of_the_one_before() -> None:
    rig = Rig()
    keys = chain("a", 4)
    async with rig.running():
        assert rig.store is not None
        real, opened = rig.store.write, list[Operation[BatchOutcome]]()

        def slow_to_let_go(batch: PageBatch) -> Operation[BatchOutcome]:
            inner, outer = real(batch), Operation[BatchOutcome]()
            opened.append(outer)
            inner.when_quiet(lambda: outer.settle(inner._outcome, quiet=False))  # type: ignore[arg-type]
            return outer

        rig.store.write = slow_to_let_go  # type: ignore[method-assign]
        await rig.back_up(rig.node(keys))
        await anyio.sleep(1)
        assert len(opened) == 1
        opened[0].become_quiet()
        await rig.quiet()
        assert len(opened) == 2
        assert rig.stats.deposit.deposited == 4
        assert rig.assembly.ledger.quarantined_bytes == 2 * 29  # the second batch
        rig.check(quiet=False)
        opened[1].become_quiet()
        rig.check()
    rig.check()


@virtual
async def test_each_page_that_the_stop_leaves_out_is_counted_once() -> None:
    rig = Rig(store_faults=FaultPlan({("write", 0): Fault.FAIL, ("write", 1): Fault.STALL}), deposit_retries=0)
    async with rig.running():
        await rig.back_up(rig.node(chain("a", 2)), rig.node(chain("b", 2)))
        await anyio.sleep(1)
        rig.supervisor("deposit").cancel()
        await anyio.sleep(0.1)
        assert rig.store is not None
        rig.store.release()
        await rig.ports_quiet()
    rig.check()
    assert rig.stats.deposit.skipped == {SkipReason.STORE_FAILED: 2, SkipReason.STOPPED: 2}
