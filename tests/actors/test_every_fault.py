"""Each fault at the k-th call of each port operation, for every k: right bytes or a counted reason, nothing lost."""

from __future__ import annotations

from functools import partial

import anyio
import pytest

from kvcr_actors.errors import DeadlineError
from kvcr_actors.testing.faults import Fault, FaultPlan
from kvcr_actors.testing.virtual_time import VIRTUAL, BackendName, run_virtual
from tests.actors.rig import LONG_S, Rig, live

DEVICE_KINDS = ("to_host", "to_device", "to_host.kv", "to_host.side", "to_device.kv")
STORE_KINDS = ("lookup", "read", "write")
# What a store reads silently wrong it has to find itself: that is its own contract.
FAULTS = tuple(fault for fault in Fault if fault is not Fault.CORRUPT_SILENTLY)
ENDLESS = (Fault.DROP, Fault.STALL)


async def one_life(kind: str, k: int, fault: Fault) -> bool:
    """Whether there was a k-th call of that kind."""
    plan = FaultPlan({(kind, k): fault})
    on_device = kind in DEVICE_KINDS
    rig = Rig(device_faults=plan if on_device else None, store_faults=None if on_device else plan, store_latency_s=0.01)
    quiet = fault is not Fault.DROP or "." in kind
    async with rig.running():
        with anyio.fail_after(LONG_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_release_later, rig)
                await live(rig)
                await rig.quiet()
                tasks.cancel_scope.cancel()
        rig.device.release()
        assert rig.store is not None
        rig.store.release()
        await rig.ports_quiet()
        rig.check(quiet=quiet)
        assert all(actor["restarts"] == 0 for actor in rig.assembly.describe()["actors"].values())
        happened, plan.schedule = plan.seen[kind] > k, {}
        await _works_again(rig)
    rig.check(quiet=quiet)
    assert rig.failure is None
    return happened


async def _release_later(rig: Rig) -> None:
    """What stalls stalls past every deadline, then begins."""
    while True:
        await anyio.sleep(50)
        rig.device.release()
        assert rig.store is not None
        rig.store.release()


async def _works_again(rig: Rig) -> None:
    """A path that no fault met goes all the way."""
    keys = tuple(bytes([n]) * 32 for n in range(3))
    await rig.stored(keys)
    finished = await rig.restored("afterwards", keys)
    assert finished is not None
    assert finished.pages == 3


def check_end(rig: Rig, fault: Fault) -> None:
    """A port that has closed uses no memory, whatever word of it was lost; one that has not is told of."""
    stalls = fault is Fault.STALL
    rig.check(quiet=not stalls)
    assert isinstance(rig.failure, DeadlineError) if stalls else rig.failure is None


@pytest.mark.parametrize("backend", VIRTUAL)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", [*DEVICE_KINDS, *STORE_KINDS])
def test_a_fault_at_any_call_loses_nothing_and_serves_no_wrong_byte(
    kind: str, fault: Fault, backend: BackendName
) -> None:
    k = 0
    while run_virtual(partial(one_life, kind, k, fault), backend=backend):
        k += 1
    assert k >= 1


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", STORE_KINDS)
def test_a_store_that_is_always_faulty_ends_no_actor_and_no_request_waits_past_its_deadline(
    kind: str, fault: Fault
) -> None:
    async def life() -> None:
        rig = Rig(store_faults=FaultPlan.always(fault, kind))
        async with rig.running():
            await live(rig)
            await rig.quiet()
            if fault not in ENDLESS:
                await rig.ports_quiet()
            assert all(actor["restarts"] == 0 for actor in rig.assembly.describe()["actors"].values())
        check_end(rig, fault)

    run_virtual(life)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", DEVICE_KINDS[:2])
def test_a_device_that_is_always_faulty_acknowledges_every_node(kind: str, fault: Fault) -> None:
    async def life() -> None:
        rig = Rig(device_faults=FaultPlan.always(fault, kind))
        async with rig.running():
            await live(rig)
            await rig.quiet()
            if fault not in ENDLESS:
                await rig.ports_quiet()
        check_end(rig, fault)

    run_virtual(life)
