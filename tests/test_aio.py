"""The asynchronous front door, on both loops and inside a plain asyncio program."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from kvcr_actors.aio import AsyncController, open_controller
from kvcr_actors.config import ControllerConfig
from kvcr_actors.core.inventory import BlocksStored
from kvcr_actors.errors import ActorEscalatedError, ControllerClosedError, DeadlineError, InvalidNodeError
from kvcr_actors.messages import BackupAck, PrefetchCancelled, RestoreFinished
from kvcr_actors.testing.cancellation import cancelled_at
from kvcr_actors.testing.faults import Fault, FaultPlan
from kvcr_actors.testing.invariants import check_claims, check_events, check_host
from kvcr_actors.testing.store_driver import chain
from kvcr_actors.testing.virtual_time import VIRTUAL, BackendName, VirtualClockLoop, run_virtual
from kvcr_actors.types import BackupNode, MissReason, PrefetchRequest, SkipReason, Tier
from tests.doors import Ports

on_each_loop = pytest.mark.anyio
plain_asyncio = pytest.mark.asyncio


def check(controller: AsyncController, ports: Ports) -> None:
    check_claims(controller._assembly)
    check_host(controller._assembly)
    check_events(controller._assembly, ports.index)


def forget_host(controller: AsyncController) -> None:
    state = controller._assembly._state
    assert state is not None
    state.host.clear()
    state.publish_changes()


async def a_life(controller: AsyncController, ports: Ports, name: str = "a") -> None:
    keys = chain(name, 4)
    ack = await controller.backup([ports.node(keys[:2]), ports.node(keys[2:], keys[1])])
    assert len(ack.node_ids) == 2
    await controller.wait_quiet()
    forget_host(controller)
    ready = await controller.prefetch(PrefetchRequest(name, keys))
    assert (ready.pages, ready.account) == (4, None)
    order = ports.restore(name, 4)
    finished = await controller.restore(order)
    assert isinstance(finished, RestoreFinished)
    assert finished.pages == 4
    ports.assert_bytes(order, keys)


@on_each_loop
async def test_a_node_goes_through_all_tiers_and_comes_back() -> None:
    ports = Ports()
    async with open_controller(**ports.arguments) as controller:
        await a_life(controller, ports)
        assert controller.describe()["claims"]["open"] == []
        assert controller.host_contents() == set(chain("a", 4))
        assert controller.stats.prefetch.used == 1
    check(controller, ports)
    assert controller.claims.taken == controller.claims.released > 0


@plain_asyncio
async def test_it_works_in_a_plain_asyncio_program_started_in_one_task_and_closed_in_another() -> None:
    assert not isinstance(asyncio.get_running_loop(), VirtualClockLoop)
    ports = Ports()
    controller = AsyncController(**ports.arguments)
    assert await asyncio.create_task(controller.start()) is controller
    await asyncio.gather(*(a_life(controller, ports, name) for name in "abc"))
    await asyncio.create_task(controller.close())
    await controller.close()
    check(controller, ports)


@plain_asyncio
async def test_native_cancellation_of_a_caller_cancels_its_prefetch_and_nothing_else() -> None:
    ports = Ports()
    async with open_controller(**ports.arguments) as controller:
        await controller.backup([ports.node(chain("a", 2))])
        await controller.wait_quiet()
        forget_host(controller)
        assert ports.store is not None
        ports.store.faults = FaultPlan.always(Fault.STALL, "read")
        waiting = asyncio.create_task(controller.prefetch(PrefetchRequest("r", chain("a", 2))))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await controller.wait_quiet()
        assert controller.stats.prefetch.cancelled == 1
        ports.store.release()
        assert (await controller.backup([ports.node(chain("b", 1))])).failed == ()
    check(controller, ports)


@on_each_loop
async def test_tasks_that_share_a_controller_get_their_own_answers() -> None:
    ports = Ports(host_slots=64)
    async with open_controller(**ports.arguments) as controller, anyio.create_task_group() as tasks:
        for number in range(8):
            tasks.start_soon(_back_up_and_fetch, controller, ports, number)
    check(controller, ports)


async def _back_up_and_fetch(controller: AsyncController, ports: Ports, number: int) -> None:
    keys = chain(f"{number}", 1 + number % 3)
    node = ports.node(keys)
    assert node.node_id in (await controller.backup([node])).node_ids
    ready = await controller.prefetch(PrefetchRequest(number, keys))
    assert ready.pages == len(keys)
    order = ports.restore(number, len(keys))
    assert isinstance(await controller.restore(order), RestoreFinished)
    ports.assert_bytes(order, keys)


@pytest.mark.parametrize("backend", VIRTUAL)
@pytest.mark.parametrize("call", ["backup", "prefetch", "restore", "wait_quiet"])
def test_a_caller_that_is_cancelled_at_any_await_leaves_nothing_behind(call: str, backend: BackendName) -> None:
    async def life() -> None:
        k = 1
        while await _cancelled(call, k):
            k += 1
        assert k > 1

    run_virtual(life, backend=backend)


async def _cancelled(call: str, k: int) -> bool:
    ports, keys = Ports(), chain("a", 3)
    async with open_controller(**ports.arguments) as controller:
        await controller.backup([ports.node(keys)])
        await controller.wait_quiet()
        if call == "restore":
            await controller.prefetch(PrefetchRequest("r", keys))
        else:
            forget_host(controller)
        calls = {
            "backup": lambda: controller.backup([ports.node(chain("b", 2))]),
            "prefetch": lambda: controller.prefetch(PrefetchRequest("r", keys)),
            "restore": lambda: controller.restore(ports.restore("r", 3)),
            "wait_quiet": controller.wait_quiet,
        }
        reached = await cancelled_at(k, calls[call])
        if not reached and call == "prefetch":
            controller.cancel("r")
        await anyio.sleep(10)  # a read that comes too late for its request is kept for others
        await controller.wait_quiet()
        check(controller, ports)
    check(controller, ports)
    return reached


@on_each_loop
async def test_wrong_pools_leave_nothing_queued() -> None:
    ports = Ports()
    async with open_controller(**ports.arguments) as controller:
        with pytest.raises(InvalidNodeError, match="node 9 lists 1 pools"):
            await controller.backup([ports.node(chain("a", 1)), BackupNode(9, chain("b", 1), ((0,),))])
        ack = await controller.backup([node := ports.node(chain("c", 1))])
        assert ack.node_ids == (node.node_id,)
        assert controller.host_contents() == set(chain("c", 1))
    check(controller, ports)


@on_each_loop
async def test_an_empty_backup_is_answered_without_a_step() -> None:
    ports = Ports()
    async with open_controller(**ports.arguments) as controller:
        assert await controller.backup([]) == BackupAck(0, ())
    assert ports.device.submits == 0


@on_each_loop
async def test_a_request_id_stands_for_one_request_at_a_time() -> None:
    ports, keys = Ports(), chain("a", 2)
    request = PrefetchRequest("r", keys)
    async with open_controller(**ports.arguments) as controller:
        await controller.backup([ports.node(keys)])
        await controller.prefetch(request)
        with pytest.raises(InvalidNodeError, match="stands ready; use another request id"):
            await controller.prefetch(request)
        await controller.restore(ports.restore("r", 2))
        for request_id in ("r", "never seen"):
            with pytest.raises(InvalidNodeError, match="holds nothing; await its prefetch first"):
                await controller.restore(ports.restore(request_id, 2))
        controller.cancel("never seen")
        # An id that is free may be used again.
        assert (await controller.prefetch(request)).account is None
        controller.cancel("r")
        await controller.wait_quiet()
    check(controller, ports)


@pytest.mark.parametrize("backend", VIRTUAL)
def test_a_restore_that_comes_after_the_claims_life_time_hears_how_it_ended(backend: BackendName) -> None:
    async def life() -> None:
        ports, keys = Ports(), chain("a", 2)
        async with open_controller(**ports.arguments) as controller:
            await controller.backup([ports.node(keys)])
            await controller.prefetch(PrefetchRequest("r", keys))
            await anyio.sleep(controller.config.claim_lifetime_s + 1)
            ended = await controller.restore(ports.restore("r", 2))
            assert isinstance(ended, PrefetchCancelled)
            assert ended.account.reasons == {MissReason.NOT_RESTORED: 2}
        check(controller, ports)

    run_virtual(life, backend=backend)


@pytest.mark.parametrize("backend", VIRTUAL)
def test_every_await_has_a_deadline_that_names_what_did_not_come(backend: BackendName) -> None:
    async def life() -> None:
        ports = Ports()
        config = ControllerConfig(copy_deadline_s=10.0)
        async with open_controller(config, **ports.arguments) as controller:
            await controller.backup([ports.node(chain("a", 1))])
            await controller.wait_quiet()
            forget_host(controller)
            assert ports.store is not None
            ports.device.faults = ports.store.faults = FaultPlan.always(Fault.STALL)
            with pytest.raises(DeadlineError, match="the ack of step 2"):
                await controller.backup([ports.node(chain("b", 1))], timeout_s=1)
            with pytest.raises(DeadlineError, match="the prefetch of r"):
                await controller.prefetch(PrefetchRequest("r", chain("a", 1)), timeout_s=0.1)
            with pytest.raises(DeadlineError, match="to be quiet"):
                await controller.wait_quiet(timeout_s=0.1)
            await controller.wait_quiet()
            ports.device.release()
            ports.store.release()
            await anyio.sleep(1)
        check(controller, ports)

    run_virtual(life, backend=backend)


@on_each_loop
async def test_an_actor_that_escalates_answers_everybody_and_refuses_what_follows() -> None:
    ports, keys = Ports(), chain("a", 2)
    controller = await AsyncController(ControllerConfig(restarts=0), **ports.arguments).start()
    await controller.backup([ports.node(keys)])
    await controller.prefetch(PrefetchRequest("held", keys))

    def raising(*args: object) -> Any:
        raise RuntimeError("planted")

    ports.device.submit = raising  # type: ignore[method-assign]
    node = ports.node(chain("b", 1))
    ack = await controller.backup([node])
    assert ack.failed == ((node.node_id, SkipReason.STOPPED),)
    with anyio.move_on_after(5):
        while controller._host.is_running:  # noqa: ASYNC110
            await anyio.sleep(0.01)
    for call in (
        lambda: controller.backup([node]),
        lambda: controller.prefetch(PrefetchRequest("x", keys)),
        lambda: controller.restore(ports.restore("held", 2)),
        controller.wait_quiet,
    ):
        with pytest.raises(ControllerClosedError, match="planted"):
            await call()
    with pytest.raises(ActorEscalatedError, match="planted"):
        await controller.close()
    await controller.close()
    check(controller, ports)


@on_each_loop
async def test_who_waits_when_the_controller_closes_is_answered() -> None:
    ports, keys = Ports(), chain("a", 2)
    controller = await AsyncController(ControllerConfig(drain_budget_s=0.2), **ports.arguments).start()
    await controller.backup([ports.node(keys)])
    await controller.wait_quiet()
    forget_host(controller)
    assert ports.store is not None
    ports.store.faults = FaultPlan.always(Fault.STALL, "read")
    answers: list[Any] = []

    async def wait() -> None:
        answers.append(await controller.prefetch(PrefetchRequest("r", keys)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.sleep(0.01)
        with pytest.raises(DeadlineError, match=r"store.*memory is in use for read of 'r'"):
            await controller.close()
    (answer,) = answers
    assert answer.account.reasons == {MissReason.STOPPED: 2}
    with pytest.raises(ControllerClosedError, match="it was closed"):
        await controller.backup([ports.node(keys)])


@on_each_loop
async def test_a_controller_that_was_not_started_says_so() -> None:
    controller = AsyncController(**Ports().arguments)
    with pytest.raises(ControllerClosedError, match="start it first"):
        await controller.backup([])
    await controller.close()


@on_each_loop
async def test_an_error_in_the_block_closes_the_controller_and_passes() -> None:
    ports = Ports()
    seen: list[AsyncController] = []

    async def break_off() -> None:
        async with open_controller(**ports.arguments) as controller:
            seen.append(controller)
            await controller.backup([ports.node(chain("a", 1))])
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        await break_off()
    check(seen[0], ports)


@on_each_loop
async def test_failed_deposits_and_the_engines_events_are_there_for_the_caller() -> None:
    ports, keys = Ports(store_pages=1), chain("a", 2)
    async with open_controller(**ports.arguments) as controller:
        await controller.backup([ports.node(keys)])
        controller.publish([BlocksStored(Tier.DEVICE, keys, (None, keys[0]))])
        await controller.wait_quiet()
        await anyio.sleep(0.01)
        assert [one.reason for one in controller.failed_deposits] == [SkipReason.STORE_FULL]
        assert ports.index.keys(Tier.DEVICE) == set(keys)


@on_each_loop
async def test_a_prefetch_asked_again_after_its_caller_was_cancelled_gets_its_own_answer() -> None:
    ports = Ports()
    async with open_controller(**ports.arguments) as controller:
        keys = chain("a", 2)
        await controller.backup([ports.node(keys)])
        await controller.wait_quiet()
        forget_host(controller)
        assert ports.store is not None
        ports.store.faults = FaultPlan({("read", 0): Fault.STALL})
        async with anyio.create_task_group() as first:
            first.start_soon(controller.prefetch, PrefetchRequest("r", keys))
            await anyio.wait_all_tasks_blocked()
            first.cancel_scope.cancel()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_ask_again, controller, ports, keys)
            await anyio.wait_all_tasks_blocked()
            ports.store.release()
        # One that stands ready is cancelled and asked for again, with no turn in between.
        assert (await controller.prefetch(PrefetchRequest("s", keys))).account is None
        controller.cancel("s")
        assert (await controller.prefetch(PrefetchRequest("s", keys))).account is None
        controller.cancel("s")
        await controller.wait_quiet()
    check(controller, ports)


async def _ask_again(controller: AsyncController, ports: Ports, keys: tuple[bytes, ...]) -> None:
    answer = await controller.prefetch(PrefetchRequest("r", keys))
    assert (answer.pages, answer.account) == (2, None)
    order = ports.restore("r", 2)
    assert isinstance(await controller.restore(order), RestoreFinished)
    ports.assert_bytes(order, keys)


@on_each_loop
async def test_the_ack_of_a_backup_whose_caller_has_gone_is_kept() -> None:
    ports = Ports()
    async with open_controller(**ports.arguments) as controller:
        node = ports.node(chain("a", 2))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(controller.backup, [node])
            while not controller._waiters:
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        await controller.wait_quiet()
        await anyio.wait_all_tasks_blocked()
        assert [ack.node_ids for ack in controller.unclaimed_acks] == [(node.node_id,)]
    check(controller, ports)
