"""Closing: within its budget everything ends in order; past it what is left is given up, told and accounted for."""

from __future__ import annotations

import anyio
import pytest

from kvcr_actors.errors import DeadlineError
from kvcr_actors.messages import BackupAck, PrefetchCancelled, RestoreFinished
from kvcr_actors.testing.faults import Fault, FaultPlan
from kvcr_actors.testing.virtual_time import VIRTUAL, BackendName, run_virtual
from kvcr_actors.types import MissReason, SkipReason
from tests.actors.rig import Rig, chain, virtual

pytestmark = pytest.mark.anyio


async def test_a_drain_ends_what_is_in_flight_and_deposits_what_was_confirmed() -> None:
    rig = Rig(copy_latency_s=0.01, store_latency_s=0.01)
    stored, new = chain("stored", 4), chain("new", 3)
    async with rig.running():
        await rig.stored(stored)
        await rig.back_up(rig.node(chain("held", 2)))
        await rig.prefetched("ready", chain("held", 2))
        await rig.prefetched("restoring", chain("held", 2))
        ids = rig.give_restore("restoring", 2)
        rig.give_prefetch("searching", stored)
        rig.give_step(rig.node(new))
        await anyio.sleep(0.005)
    rig.check()
    assert rig.failure is None
    assert rig.store is not None
    assert rig.store.contents() >= {*new, *chain("held", 2)}
    rig.assert_bytes(ids, chain("held", 2))
    kinds = {one.request_id: one for one in rig.completions if isinstance(one, PrefetchCancelled | RestoreFinished)}
    assert isinstance(kinds["restoring"], RestoreFinished)
    assert isinstance(kinds["ready"], PrefetchCancelled)
    assert set(kinds["ready"].account.reasons) == {MissReason.STOPPED}
    assert isinstance(kinds["searching"], PrefetchCancelled)
    (ack,) = [one for one in rig.completions if isinstance(one, BackupAck) and one.step == 3]
    assert not ack.failed


async def test_orders_that_were_posted_but_not_begun_are_done_before_the_end() -> None:
    rig = Rig()
    await rig.start()
    for number in range(3):
        rig.give_step(rig.node(chain(f"{number}", 2)))
    rig.give_prefetch("r", chain("x", 2))
    await rig.close()
    rig.check()
    assert rig.store is not None
    assert len(rig.store.contents()) == 6


@pytest.mark.parametrize("backend", VIRTUAL)
@pytest.mark.parametrize("fault", [Fault.STALL, Fault.DROP])
@pytest.mark.parametrize("kind", ["to_host", "to_device", "read", "write", "lookup"])
def test_a_drain_that_must_give_up_ends_in_its_budget_with_only_quarantine_left(
    kind: str, fault: Fault, backend: BackendName
) -> None:
    async def life() -> None:
        faults = FaultPlan.always(fault, kind)
        rig = Rig(copy_deadline_s=1000.0, prefetch_deadline_s=1000.0, claim_lifetime_s=5000.0)
        async with rig.running():
            stored, held = chain("stored", 2), chain("held", 2)
            await rig.stored(stored)
            await rig.back_up(rig.node(held))
            await rig.quiet()
            await rig.prefetched("restoring", held)
            assert rig.store is not None
            rig.device.faults = rig.store.faults = faults
            rig.give_restore("restoring", 2)
            rig.give_prefetch("searching", stored)
            rig.give_step(rig.node(chain("new", 2)))
            await anyio.sleep(0.1)
            began = anyio.current_time()
        assert anyio.current_time() - began < 8 * 5.0
        # Ports that have closed use no memory, whatever word of theirs was lost; one that has not is named.
        rig.check(quiet=fault is Fault.DROP)
        if fault is Fault.DROP:
            assert rig.failure is None
        else:
            port = "device" if kind in ("to_host", "to_device") else "store"
            assert isinstance(rig.failure, DeadlineError)
            assert port in str(rig.failure)

    run_virtual(life, backend=backend)


@virtual
async def test_a_step_that_the_drain_gives_up_is_acknowledged_as_stopped() -> None:
    rig = Rig(device_faults=FaultPlan.always(Fault.STALL, "to_host"), copy_deadline_s=1000.0)
    async with rig.running():
        rig.give_step(rig.node(chain("a", 2)))
        await anyio.sleep(0.1)
    rig.check(quiet=False)
    (ack,) = [one for one in rig.completions if isinstance(one, BackupAck)]
    assert [why for _, why in ack.failed] == [SkipReason.STOPPED]
    assert rig.assembly.ledger.open == rig.assembly.ledger.quarantined == 1


@virtual
async def test_what_becomes_quiet_while_the_ports_close_is_released() -> None:
    rig = Rig(device_faults=FaultPlan.always(Fault.LATE, "to_host"), late_s=7.0, copy_deadline_s=1000.0)
    async with rig.running():
        rig.give_step(rig.node(chain("a", 2)))
        await anyio.sleep(3)
    rig.check()
