"""A controller that fails, or does not come to start: nobody waits in vain, and nothing is left locked or running."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from kvcr_actors.aio import AsyncController
from kvcr_actors.config import ControllerConfig
from kvcr_actors.controller import CacheController
from kvcr_actors.core.keys import Namespace
from kvcr_actors.errors import ActorEscalatedError, ControllerClosedError, DeadlineError
from kvcr_actors.messages import ControllerFailed
from kvcr_actors.stores.disk import DiskMedium, open_store
from kvcr_actors.stores.memory import memory_backend
from kvcr_actors.testing.store_driver import chain
from kvcr_actors.testing.stores import FaultyStore
from tests.doors import Ports

WAIT_S = 30.0


class HeldStore(FaultyStore):
    """A store whose close takes until it is let go."""

    def __init__(self) -> None:
        super().__init__(memory_backend(8))
        self.let_go = threading.Event()

    async def close(self, deadline_s: float) -> None:
        await anyio.to_thread.run_sync(self.let_go.wait, WAIT_S)
        await super().close(deadline_s)


def planted(*args: object) -> Any:
    raise RuntimeError("planted")


def failing(loop: str, store: FaultyStore) -> tuple[CacheController, Ports]:
    """A controller whose next backup ends it."""
    ports = Ports()
    ports.store = store
    controller = CacheController(ControllerConfig(restarts=0), loop=loop, **ports.arguments).start()  # type: ignore[arg-type]
    ports.device.submit = planted  # type: ignore[method-assign]
    return controller, ports


def test_a_failed_controller_whose_ports_still_close_answers_at_once(real_backend: str) -> None:
    store = HeldStore()
    controller, ports = failing(real_backend, store)
    controller.write(ports.node(chain("a", 1)))
    while not any(isinstance(one, ControllerFailed) for one in controller.take()):
        assert controller.wait(WAIT_S)
    with pytest.raises(ControllerClosedError, match="planted"):
        controller.wait_quiet(WAIT_S)
    with pytest.raises(ControllerClosedError, match="planted"):
        controller.checkpoint("late")
    assert controller.describe()["actors"]["backup"]["state"] == "failed"
    store.let_go.set()
    with pytest.raises(ActorEscalatedError):
        controller.close(WAIT_S)


def test_a_controller_that_fails_is_not_quiet_to_whoever_waits(real_backend: str) -> None:
    controller, ports = failing(real_backend, FaultyStore(memory_backend(8)))
    controller.write(ports.node(chain("a", 1)))
    with pytest.raises(ControllerClosedError, match="failed"):
        controller.wait_quiet(WAIT_S)
    with pytest.raises(ActorEscalatedError):
        controller.close(WAIT_S)


@pytest.mark.anyio
async def test_the_asynchronous_controller_that_fails_is_not_quiet_either() -> None:
    ports = Ports()
    controller = await AsyncController(ControllerConfig(restarts=0), **ports.arguments).start()
    ports.device.submit = planted  # type: ignore[method-assign]

    async def wait(told: anyio.Event) -> None:
        with pytest.raises(ControllerClosedError, match="failed"):
            await controller.wait_quiet(WAIT_S)
        told.set()

    told = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(controller.backup, [ports.node(chain("a", 1))])
        tasks.start_soon(wait, told)
        await told.wait()
        tasks.cancel_scope.cancel()
    with pytest.raises(ActorEscalatedError):
        await controller.close(WAIT_S)


def test_a_port_that_cannot_describe_itself_does_not_hide_the_rest(real_backend: str) -> None:
    ports = Ports()
    assert ports.store is not None
    ports.store.describe = planted  # type: ignore[method-assign]
    with CacheController(loop=real_backend, **ports.arguments) as controller:  # type: ignore[arg-type]
        described = controller.describe(WAIT_S)
        assert described["store"] == {"error": "RuntimeError('planted')"}
        assert described["actors"]["backup"]["state"] == "running"
        assert described["ranks"] == {"rank": 0, "size": 1}


def test_an_exception_in_a_question_is_raised_where_it_was_asked(real_backend: str) -> None:
    ports = Ports()
    with CacheController(loop=real_backend, **ports.arguments) as controller:  # type: ignore[arg-type]
        controller._assembly.host.contents = planted  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="planted"):
            controller.host_contents(WAIT_S)


def test_a_start_that_runs_out_of_time_leaves_no_lock_and_no_thread(
    real_backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    reconcile: Callable[..., Any] = DiskMedium._reconcile

    def slow(medium: DiskMedium, *args: Any) -> Any:
        assert go_on.wait(WAIT_S)
        return reconcile(medium, *args)

    def disk_controller() -> CacheController:
        ports = Ports()
        store = open_store({}, 64, tmp_path / "store", Namespace("m", "w", "u8", "l", 1))
        return CacheController(loop=real_backend, **(ports.arguments | {"store": store}))  # type: ignore[arg-type]

    (tmp_path / "store").mkdir(mode=0o700)
    before = set(threading.enumerate())
    with monkeypatch.context() as patch:
        patch.setattr(DiskMedium, "_reconcile", slow)
        threading.Timer(0.1, go_on.set).start()
        with pytest.raises(DeadlineError, match="did not start"):
            disk_controller().start(0.02)
    with disk_controller():
        pass
    for thread in set(threading.enumerate()) - before:
        thread.join(WAIT_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("port", ["device", "store"])
def test_a_port_whose_open_fails_is_closed(real_backend: str, port: str) -> None:
    ports = Ports()
    closed: list[str] = []
    target: Any = getattr(ports, port)
    open_port, close = target.open, target.close

    async def failing_open(*args: Any) -> None:
        await open_port(*args)
        raise OSError("planted")

    async def noted_close(deadline_s: float) -> None:
        closed.append(port)
        await close(deadline_s)

    target.open, target.close = failing_open, noted_close
    with pytest.raises(OSError, match="planted"):
        CacheController(loop=real_backend, **ports.arguments).start(WAIT_S)  # type: ignore[arg-type]
    assert closed == [port]


def test_a_close_without_a_timeout_takes_the_budgets_of_the_configuration() -> None:
    controller = CacheController(**Ports().arguments)
    seen: list[float] = []
    controller._host.stop = seen.append  # type: ignore[method-assign]
    controller.close()
    controller.close(7)
    assert seen == [controller._assembly.close_budget_s, 7]


def test_the_default_time_to_close_is_as_long_as_all_budgets_together() -> None:
    ports = Ports()
    short, long = (
        CacheController(ControllerConfig(drain_budget_s=seconds), **ports.arguments)._assembly.close_budget_s
        for seconds in (1.0, 10.0)
    )
    # 6 actors, device and ranks twice each, the plain sink too, the store, and the wait for quiet memory.
    assert long - short == pytest.approx(9.0 * (2 * (6 + 3) + 3 + 1))
