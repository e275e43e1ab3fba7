"""An engine that launches a step over pages that are being restored first waits until the device knows of them."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import anyio
import pytest

from kvcr_actors.actors.restore import RestoreActor
from kvcr_actors.aio import open_controller
from kvcr_actors.core.copy_plan import CopyPlan, Direction
from kvcr_actors.errors import ControllerClosedError, DeadlineError
from kvcr_actors.messages import PrefetchReady, RestoreFinished, RestoreStep
from kvcr_actors.testing.store_driver import chain
from kvcr_actors.types import PrefetchRequest
from tests.doors import Ports
from tests.test_controller import DOORS, WAIT_S, Engine

KEYS = chain("a", 4)


@pytest.fixture(params=DOORS.values(), ids=DOORS.keys())
def door(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


def holding(engine: Engine) -> Engine:
    """Bring a prefix to stand ready."""
    engine.back_up(engine.ports.node(KEYS))
    assert isinstance(engine.prefetch("r", KEYS), PrefetchReady)
    return engine


def hold_up_the_loop(engine: Engine, seconds: float) -> None:
    state = engine.controller._assembly._state
    assert state is not None
    state.services.post(partial(time.sleep, seconds))


def give_restore(engine: Engine) -> None:
    engine.controller.restore(engine.ports.restore("r", 4))
    engine.controller.flush_pending_backups()


def test_a_flushed_restore_is_with_the_device_after_the_wait_and_need_not_be_before(door: dict[str, Any]) -> None:
    engine = Engine(door)
    with engine.controller as controller:
        controller.wait_restores_submitted(0.0)  # nothing was given
        holding(engine)
        hold_up_the_loop(engine, 0.2)
        give_restore(engine)
        assert controller.stats.restore_submits == 0
        controller.wait_restores_submitted(WAIT_S)
        assert controller.stats.restore_submits == 1
        engine.await_one(lambda one: isinstance(one, RestoreFinished))
        controller.wait_restores_submitted(0.0)
    engine.check()


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_a_loop_that_takes_too_long_is_a_deadline_error_and_may_be_waited_for_again(loop: str) -> None:
    engine = Engine({"host": "thread", "loop": loop})
    with engine.controller as controller:
        holding(engine)
        hold_up_the_loop(engine, 0.4)
        give_restore(engine)
        with pytest.raises(DeadlineError, match="steps with restores that the device knows of: 0 of 1"):
            controller.wait_restores_submitted(0.02)
        controller.wait_restores_submitted(WAIT_S)
        engine.await_one(lambda one: isinstance(one, RestoreFinished))
    engine.check()


def test_a_restore_that_comes_to_nothing_is_not_waited_for(door: dict[str, Any]) -> None:
    engine = Engine(door)
    submit = engine.ports.device.submit

    def refuse(plan: CopyPlan, fence: object | None) -> Any:
        if plan.direction is Direction.TO_DEVICE:
            raise RuntimeError("planted")
        return submit(plan, fence)

    engine.ports.device.submit = refuse  # type: ignore[method-assign]
    with engine.controller as controller:
        holding(engine)
        give_restore(engine)
        controller.wait_restores_submitted(WAIT_S)
        finished = engine.await_one(lambda one: isinstance(one, RestoreFinished))
        assert isinstance(finished, RestoreFinished)
        assert finished.pages == 0
        controller.restore(engine.ports.restore("never ordered", 1))
        controller.flush_pending_backups()
        controller.wait_restores_submitted(WAIT_S)


def test_once_the_controller_has_ended_nobody_waits(door: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async def lose(self: RestoreActor, batch: list[RestoreStep]) -> None:
        await anyio.sleep_forever()

    engine = Engine(door)
    with engine.controller as controller:
        holding(engine)
        monkeypatch.setattr(RestoreActor, "handle", lose)
        monkeypatch.setattr(RestoreActor, "abandon", lambda *args: None)
        give_restore(engine)
        with pytest.raises(DeadlineError):
            controller.wait_restores_submitted(0.05)
        controller.cancel("r")
        with pytest.raises(DeadlineError):  # the actor hangs, and is cancelled
            controller.close(0.5)
        with pytest.raises(ControllerClosedError, match="0 of 1 are done, and the controller has ended"):
            controller.wait_restores_submitted(WAIT_S)


@pytest.mark.anyio
async def test_tasks_wait_likewise() -> None:
    ports = Ports()
    async with open_controller(**ports.arguments) as controller:
        await controller.wait_restores_submitted(0.0)
        await controller.backup([ports.node(KEYS)])
        await controller.prefetch(PrefetchRequest("r", KEYS))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(controller.restore, ports.restore("r", 4))
            while not controller._desk.restore_steps:
                await anyio.lowlevel.checkpoint()
            assert controller.stats.restore_submits == 0
            await controller.wait_restores_submitted()
            assert controller.stats.restore_submits == 1
