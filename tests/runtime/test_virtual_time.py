"""The testing kit's loops: which library runs, what the clock says, and that runs repeat."""

from __future__ import annotations

import asyncio
import threading

import anyio
import pytest
import trio

from kvcr_actors.runtime.bell import LoopAccess
from kvcr_actors.testing.virtual_time import VIRTUAL, VirtualClockLoop, run_virtual

DAY_S = 86_400.0


@pytest.mark.anyio
async def test_the_library_that_runs_is_the_one_that_was_asked_for(anyio_backend, request):
    token = LoopAccess.of_running_loop().token
    name = request.node.callspec.params["anyio_backend"]
    if name == "trio-virtual":
        assert isinstance(token, trio.lowlevel.TrioToken)
        assert isinstance(trio.lowlevel.current_clock(), trio.testing.MockClock)
    else:
        assert token is asyncio.get_running_loop()
        assert isinstance(token, VirtualClockLoop) == (name == "asyncio-virtual")
    assert name in ("asyncio-virtual", "asyncio", "trio-virtual")


@pytest.mark.anyio
@pytest.mark.real_clock
async def test_the_library_on_the_real_clock_is_the_one_that_was_asked_for(request):
    token = LoopAccess.of_running_loop().token
    if request.node.callspec.params["anyio_backend"] == "trio":
        assert isinstance(token, trio.lowlevel.TrioToken)
        assert not isinstance(trio.lowlevel.current_clock(), trio.testing.MockClock)
    else:
        assert token is asyncio.get_running_loop()
        assert not isinstance(token, VirtualClockLoop)


@pytest.mark.parametrize("backend", VIRTUAL)
def test_time_jumps_to_the_next_timer_and_timers_fire_in_order(backend):
    fired: list[tuple[str, float]] = []

    async def sleep(name: str, seconds: float) -> None:
        start = anyio.current_time()
        await anyio.sleep(seconds)
        fired.append((name, round(anyio.current_time() - start, 6)))

    async def program() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sleep, "day", DAY_S)
            tasks.start_soon(sleep, "minute", 60.0)
            tasks.start_soon(sleep, "hour", 3600.0)
        with anyio.move_on_after(10 * DAY_S):
            await anyio.sleep_forever()
        fired.append(("end", round(anyio.current_time(), 6)))

    run_virtual(program, backend=backend)
    assert fired == [("minute", 60.0), ("hour", 3600.0), ("day", DAY_S), ("end", 11 * DAY_S)]


def test_the_clock_stands_still_while_something_can_run():
    async def program() -> float:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep, DAY_S)
            for _ in range(100):
                await anyio.lowlevel.checkpoint()
            now = anyio.current_time()
            tasks.cancel_scope.cancel()
        return now

    assert run_virtual(program) == 0.0


@pytest.mark.parametrize("backend", VIRTUAL)
def test_runs_of_one_seed_repeat(backend):
    async def program() -> list[int]:
        order: list[int] = []

        async def turn(number: int) -> None:
            for _ in range(5):
                await anyio.lowlevel.checkpoint()
                order.append(number)

        async with anyio.create_task_group() as tasks:
            for number in range(6):
                tasks.start_soon(turn, number)
        return order

    runs = [run_virtual(program, backend=backend, seed=7) for _ in range(4)]
    assert runs.count(runs[0]) == 4


def test_seeds_give_trio_different_orders():
    async def program() -> list[int]:
        order: list[int] = []

        async def turn(number: int) -> None:
            for _ in range(5):
                await anyio.lowlevel.checkpoint()
                order.append(number)

        async with anyio.create_task_group() as tasks:
            for number in range(6):
                tasks.start_soon(turn, number)
        return order

    assert len({tuple(run_virtual(program, backend="trio-virtual", seed=seed)) for seed in range(5)}) > 1


def test_a_deadlock_on_virtual_time_says_so(monkeypatch):
    monkeypatch.setattr("kvcr_actors.testing.virtual_time._DEADLOCK_S", 0.01)
    with pytest.raises(RuntimeError, match="virtual time: all tasks wait"):
        run_virtual(anyio.sleep_forever)


def test_another_thread_can_still_wake_a_loop_without_timers():
    async def program() -> str:
        woken = anyio.Event()
        thread = threading.Timer(0.01, LoopAccess.of_running_loop().wake, [woken.set])
        thread.start()
        await woken.wait()
        thread.join()
        return "woken"

    assert run_virtual(program) == "woken"
