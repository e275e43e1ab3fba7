"""Endings tell the truth: a close that returns has left nothing running, and a failure is the last word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from kvcr_actors.aio import AsyncController
from kvcr_actors.config import ControllerConfig
from kvcr_actors.controller import CacheController
from kvcr_actors.core.inventory import InventoryEvent
from kvcr_actors.devices.cpu import CpuDevice, CpuFence
from kvcr_actors.devices.host_memory import HostPools
from kvcr_actors.errors import (
    ActorEscalatedError,
    ControllerClosedError,
    DeadlineError,
    ForeignExitError,
    KvcrActorsError,
)
from kvcr_actors.messages import BackupAck, Completion, ControllerFailed, PrefetchReady, RestoreFinished
from kvcr_actors.testing.faults import Fault, FaultPlan
from kvcr_actors.testing.store_driver import chain
from kvcr_actors.testing.virtual_time import VIRTUAL, BackendName, run_virtual
from kvcr_actors.types import BackupNode, CacheLayout, PoolSpec, PrefetchRequest, RestoreOrder
from tests.actors.rig import Rig
from tests.doors import Ports
from tests.test_controller import DOORS

WAIT_S = 30.0
EXITS = (SystemExit, KeyboardInterrupt, GeneratorExit)


def raising(kind: type[BaseException]) -> Callable[..., Any]:
    def call(*args: object) -> Any:
        raise kind("planted")

    return call


class ExitingSink:
    """A sink that leaves the process, or tries to."""

    def __init__(self, kind: type[BaseException]) -> None:
        self._kind = kind

    def publish(self, events: list[InventoryEvent]) -> None:
        raise self._kind("planted")


def plant(ports: Ports, place: str, kind: type[BaseException]) -> dict[str, Any]:
    """Ports whose foreign code raises, and what it is that a controller gets."""
    arguments = ports.arguments
    target: Any = {"device": ports.device, "lookup": ports.store, "write": ports.store}.get(place)
    if place == "sink":
        arguments["sinks"] = (ExitingSink(kind),)
    elif place in ("task", "post"):
        opening, submit = ports.device.open, ports.device.submit

        async def exit_soon() -> None:
            raise kind("planted")

        def begin(plan: Any, fence: object) -> Any:
            if place == "task":
                begun[0].spawn(exit_soon, "planted")
            else:
                begun[0].post(raising(kind))
            return submit(plan, fence)

        async def open_port(services: Any) -> None:
            begun.append(services)
            await opening(services)

        begun: list[Any] = []
        ports.device.open, ports.device.submit = open_port, begin  # type: ignore[method-assign]
    else:
        setattr(target, "submit" if place == "device" else place, raising(kind))
    return arguments


PLACES = ("device", "lookup", "write", "sink", "task", "post")


@pytest.mark.parametrize("kind", EXITS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_what_is_no_exception_fails_a_controller_like_any_other(
    door: dict[str, Any], place: str, kind: type[BaseException]
) -> None:
    ports = Ports()
    controller = CacheController(**door, **plant(ports, place, kind)).start(WAIT_S)
    controller.write(ports.node(chain("a", 1)), flush=False)
    controller.prefetch(PrefetchRequest("r", chain("b", 1)))
    controller.flush_pending_backups()
    seen: list[Completion] = []
    while not seen or not isinstance(seen[-1], ControllerFailed):
        assert controller.wait(WAIT_S), seen
        seen += controller.take()
    assert kind.__name__ in seen[-1].error
    with pytest.raises(KvcrActorsError, match=kind.__name__) as raised:
        controller.close(WAIT_S)
    assert isinstance(raised.value, ActorEscalatedError | ForeignExitError)
    assert len([one for one in seen if isinstance(one, ControllerFailed)]) == 1
    assert controller.claims.open == 0
    # The same memory serves the next controller.
    with CacheController(device=Ports().device, **door):
        pass


@pytest.mark.anyio
@pytest.mark.parametrize("kind", EXITS)
@pytest.mark.parametrize("place", PLACES)
async def test_what_is_no_exception_fails_the_asynchronous_controller_and_not_its_loop(
    place: str, kind: type[BaseException]
) -> None:
    ports = Ports()
    controller = await AsyncController(**plant(ports, place, kind)).start()

    async def work() -> None:
        while True:
            await controller.backup([ports.node(chain("a", 1))])
            await controller.prefetch(PrefetchRequest("r", chain("b", 1)))
            controller.cancel("r")
            await controller.wait_quiet()

    with pytest.raises(KvcrActorsError), anyio.fail_after(WAIT_S):
        await work()
    with pytest.raises(KvcrActorsError, match=kind.__name__):
        await controller.close()


async def fail_under_a_restore(*, is_set: bool) -> tuple[Rig, int]:
    """A controller that fails while a restore waits for its fence, which is set later, or never."""
    rig = Rig(restarts=0, store_pages=None)
    keys = chain("a", 3)
    async with rig.running():
        await rig.back_up(rig.node(keys))
        await rig.prefetched("r", keys)
        fence = anyio.Event()
        ids = rig.give_restore("r", 3, fence=fence)
        await anyio.sleep(0.01)
        await rig.back_up(rig.node(chain("b", 1)))
        rig.device.submit = raising(RuntimeError)  # type: ignore[method-assign]
        rig.give_step(rig.node(chain("c", 1)))
        await anyio.sleep(2.0)
        assert not [one for one in rig.take() if isinstance(one, RestoreFinished | ControllerFailed)]
        before = len(rig.completions)
        if is_set:
            fence.set()
            await anyio.sleep(0.1)
            rig.take()
            rig.device.poison(0, ids)
            await anyio.sleep(5.0)
            assert rig.device.gather(0, ids) == b"\xdb" * 24 * 3
    return rig, before


@pytest.mark.parametrize("backend", VIRTUAL)
def test_a_failure_is_told_last_once_the_memory_is_quiet(backend: BackendName) -> None:
    async def life() -> None:
        rig, before = await fail_under_a_restore(is_set=True)
        last = rig.completions[before:]
        assert [type(one) for one in last] == [RestoreFinished, ControllerFailed]
        assert "planted" in str(last[-1])
        rig.check()

    run_virtual(life, backend=backend)


def taken_until(controller: CacheController, kind: type[Completion]) -> list[Completion]:
    """What completes up to the first of a kind, and whatever else is there by then."""
    seen: list[Completion] = []
    while not any(isinstance(one, kind) for one in seen):
        assert controller.wait(WAIT_S), seen
        seen += controller.take()
    return seen


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_a_failure_under_a_copy_is_the_last_word_of_both_hosts(door: dict[str, Any]) -> None:
    layout = CacheLayout((PoolSpec("kv", 1, 8),))
    device, keys, fence = CpuDevice(layout, 64, HostPools(layout, slots=8)), chain("a", 2), CpuFence()
    controller = CacheController(ControllerConfig(restarts=0), **door, device=device).start(WAIT_S)
    controller.write_back([BackupNode(1, keys, ((1, 2),))])
    controller.prefetch(PrefetchRequest("r", keys))
    controller.flush_pending_backups()
    taken_until(controller, PrefetchReady)
    controller.restore(RestoreOrder("r", 0, ((8, 9),)))
    controller.flush_pending_backups(fence)
    controller.wait_restores_submitted(WAIT_S)
    device.submit = raising(RuntimeError)  # type: ignore[method-assign]
    controller.write(BackupNode(2, chain("b", 1), ((3,),)))
    # The failure is known here, and every turn of the loop that follows it is over when all has been described.
    early = taken_until(controller, BackupAck)
    with pytest.raises(ControllerClosedError, match="planted"):
        controller.wait_quiet(WAIT_S)
    early += controller.take()
    assert [type(one) for one in early] == [BackupAck]
    fence.set()
    late = taken_until(controller, ControllerFailed)
    assert [type(one) for one in late] == [RestoreFinished, ControllerFailed]
    with pytest.raises(ActorEscalatedError, match="planted"):
        controller.close(WAIT_S)
    assert not controller.take()


@pytest.mark.parametrize("backend", VIRTUAL)
def test_a_failure_names_what_does_not_become_quiet_in_time(backend: BackendName) -> None:
    async def life() -> None:
        rig, before = await fail_under_a_restore(is_set=False)
        (last,) = rig.completions[before:]
        assert isinstance(last, ControllerFailed)
        assert "copies still ran" in last.error
        assert "in use for prefetch of 'r'" in last.error

    run_virtual(life, backend=backend)


def test_a_close_that_runs_out_of_its_own_time_names_what_runs(real_backend: Any) -> None:
    ports = Ports()
    ports.device.faults = FaultPlan.always(Fault.STALL)
    controller = CacheController(loop=real_backend, **ports.arguments).start()
    controller.write(ports.node(chain("a", 1)))
    with pytest.raises(DeadlineError, match=r"did not end within 0.2 s.*in use for backup of 1|confirmation runs"):
        controller.close(0.2)


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_a_restore_under_a_close_is_answered_or_named(door: dict[str, Any]) -> None:
    ports, keys = Ports(), chain("a", 2)
    controller = CacheController(ControllerConfig(drain_budget_s=0.1), **door, **ports.arguments).start()
    controller.write_back([ports.node(keys)])
    controller.prefetch(PrefetchRequest("r", keys))
    controller.flush_pending_backups()
    while not any(isinstance(one, PrefetchReady) for one in controller.take()):
        assert controller.wait(WAIT_S)
    ports.device.faults = FaultPlan.always(Fault.STALL)
    controller.restore(ports.restore("r", 2))
    controller.flush_pending_backups()
    controller.wait_restores_submitted(WAIT_S)
    with pytest.raises(DeadlineError, match=r"copies still ran.*in use for prefetch of 'r'"):
        controller.close()
    assert not [one for one in controller.take() if isinstance(one, RestoreFinished)]
