"""The three hosts: start, stop, failures, deadlines, threads that end, and misuse that is named."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from kvcr_actors.errors import ConfigError, DeadlineError
from kvcr_actors.runtime.bell import LoopAccess, LoopBell
from kvcr_actors.runtime.hosts import TaskHost, ThreadHost
from kvcr_actors.runtime.inbox import Inbox
from kvcr_actors.runtime.inline_host import InlineHost
from kvcr_actors.runtime.outbox import Outbox
from kvcr_actors.runtime.owner_thread import OwnerThread

WAIT_S = 30


class Echo:
    """A program that sends every message back; `use_relay` as the host needs it."""

    def __init__(self, *, use_relay: bool = True) -> None:
        self.inbox: Inbox[Any] = Inbox("echo", 1_000)
        self.outbox: Outbox[Any] = Outbox()
        self.bell: LoopBell
        self.token: object = None
        self.ended = False
        self._use_relay = use_relay

    async def main(self, started: Callable[[], None], stop: anyio.Event) -> None:
        self.token = LoopAccess.of_running_loop().token
        self.bell = LoopBell(_fail, relay=self._use_relay)
        self.bell.attach(self.inbox)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._close_on, stop)
                started()
                while batch := await self.inbox.take():
                    self.outbox.deliver(batch)
        finally:
            self.bell.close()
            self.ended = True

    async def _close_on(self, stop: anyio.Event) -> None:
        await stop.wait()
        self.inbox.close()


def _fail(error: Exception) -> None:
    raise AssertionError(error)


async def never_starts(started: Callable[[], None], stop: anyio.Event) -> None:
    await anyio.sleep_forever()


async def never_stops(started: Callable[[], None], stop: anyio.Event) -> None:
    started()
    await anyio.sleep_forever()


async def fails_to_start(started: Callable[[], None], stop: anyio.Event) -> None:
    raise OSError("no device")


async def ends_early(started: Callable[[], None], stop: anyio.Event) -> None:
    pass


async def fails_later(started: Callable[[], None], stop: anyio.Event) -> None:
    started()
    await anyio.lowlevel.checkpoint()
    raise OSError("device lost")


# On a thread of its own.


def test_a_thread_host_runs_the_program_on_the_loop_asked_for(real_backend):
    echo = Echo()
    host = ThreadHost(echo.main, backend=real_backend)
    host.start(WAIT_S)
    assert host.is_running
    assert type(echo.token).__module__.partition(".")[0] == real_backend
    for number in range(3):
        echo.inbox.post(number)
        echo.bell.ring()
        assert echo.outbox.wait(WAIT_S)
        assert echo.outbox.take() == [number]
    host.stop(WAIT_S)
    host.stop(WAIT_S)
    assert echo.ended
    assert not host.is_running


def test_scenario_54_a_hundred_starts_and_stops_leave_no_thread(real_backend):
    before = set(threading.enumerate())
    for _ in range(100):
        echo = Echo()
        host = ThreadHost(echo.main, backend=real_backend)
        host.start(WAIT_S)
        host.stop(WAIT_S)
    assert set(threading.enumerate()) <= before


def test_a_failed_start_raises_its_error_and_leaves_no_thread(real_backend):
    before = set(threading.enumerate())
    host = ThreadHost(fails_to_start, backend=real_backend)
    with pytest.raises(OSError, match="no device"):
        host.start(WAIT_S)
    host.stop(WAIT_S)
    assert set(threading.enumerate()) <= before


def test_a_program_that_ends_before_it_started_is_an_error(real_backend):
    with pytest.raises(RuntimeError, match="ended before it had started"):
        ThreadHost(ends_early, backend=real_backend).start(WAIT_S)


def test_a_start_over_its_deadline_is_cancelled(real_backend):
    host = ThreadHost(never_starts, backend=real_backend)
    with pytest.raises(DeadlineError, match="did not start within"):
        host.start(0.05)
    assert not host.is_running


def test_a_start_whose_deadline_has_passed_before_the_loop_runs_is_cancelled_too(real_backend):
    host = ThreadHost(never_starts, backend=real_backend)
    with pytest.raises(DeadlineError):
        host.start(0.0)
    assert not host.is_running


def test_a_stop_over_its_deadline_says_so_and_cancels(real_backend):
    host = ThreadHost(never_stops, backend=real_backend, name="slow")
    host.start(WAIT_S)
    with pytest.raises(DeadlineError, match="slow did not end within"):
        host.stop(0.02)
    host.stop(WAIT_S)
    assert not host.is_running


def test_a_failure_after_the_start_is_raised_by_stop_once(real_backend):
    host = ThreadHost(fails_later, backend=real_backend)
    host.start(WAIT_S)
    with pytest.raises(OSError, match="device lost"):
        host.stop(WAIT_S)
    host.stop(WAIT_S)


def test_stopping_a_host_that_was_never_started_does_nothing():
    host = ThreadHost(ends_early)
    host.stop(WAIT_S)
    assert not host.is_running


def test_stopping_from_the_loop_itself_is_refused_rather_than_hung(real_backend):
    refused: list[str] = []

    async def main(started: Callable[[], None], stop: anyio.Event) -> None:
        try:
            host.stop(WAIT_S)
        except RuntimeError as error:
            refused.append(str(error))
        started()

    host = ThreadHost(main, backend=real_backend)
    host.start(WAIT_S)
    host.stop(WAIT_S)
    assert "call it from a thread that does not run the loop" in refused[0]


@pytest.mark.parametrize("use", ["check", "stop"])
def test_use_in_another_process_is_refused(monkeypatch, use):
    echo = Echo()
    host = ThreadHost(echo.main)
    host.start(WAIT_S)
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        with pytest.raises(RuntimeError, match="after a fork"):
            host.check() if use == "check" else host.stop(WAIT_S)
    host.check()
    host.stop(WAIT_S)


# As a task of a running loop.


@pytest.mark.anyio
async def test_a_task_host_runs_on_the_loop_that_starts_it():
    echo = Echo(use_relay=False)
    host = TaskHost(echo.main)
    await host.start(WAIT_S)
    assert echo.token is LoopAccess.of_running_loop().token
    assert host.is_running
    echo.inbox.tell("x")
    with anyio.fail_after(WAIT_S):
        await echo.outbox.wait_async()
    assert echo.outbox.take() == ["x"]
    await host.stop(WAIT_S)
    await host.stop(WAIT_S)
    assert echo.ended
    assert not host.is_running


@pytest.mark.anyio
async def test_a_task_host_may_be_started_in_one_task_and_stopped_in_another():
    # Each cell of a notebook is a task of its own, which ends with the cell.
    echo = Echo(use_relay=False)
    hosts: list[TaskHost] = []

    async def first_cell() -> None:
        hosts.append(TaskHost(echo.main))
        await hosts[0].start(WAIT_S)

    async def second_cell() -> None:
        echo.inbox.tell("x")
        await echo.outbox.wait_async()

    async def third_cell() -> None:
        await hosts[0].stop(WAIT_S)

    for cell in (first_cell, second_cell, third_cell):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cell)
        await anyio.wait_all_tasks_blocked()
    assert echo.ended
    assert echo.outbox.take() == ["x"]


@pytest.mark.anyio
async def test_a_task_host_outlives_the_cancellation_of_the_scope_that_started_it():
    echo = Echo(use_relay=False)
    host = TaskHost(echo.main)
    with anyio.CancelScope() as scope:
        await host.start(WAIT_S)
        scope.cancel()
        await anyio.sleep_forever()
    assert host.is_running
    await host.stop(WAIT_S)


@pytest.mark.anyio
async def test_a_start_that_is_cancelled_leaves_nothing_running():
    host = TaskHost(never_starts)
    with anyio.move_on_after(0.01):
        await host.start(WAIT_S)
    await anyio.wait_all_tasks_blocked()
    assert not host.is_running
    immediately = TaskHost(never_starts)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await immediately.start(WAIT_S)
    await anyio.wait_all_tasks_blocked()
    assert not immediately.is_running


@pytest.mark.anyio
async def test_failures_and_deadlines_of_a_task_host_are_raised():
    with pytest.raises(OSError, match="no device"):
        await TaskHost(fails_to_start).start(WAIT_S)
    with pytest.raises(RuntimeError, match="ended before it had started"):
        await TaskHost(ends_early).start(WAIT_S)
    host = TaskHost(never_starts)
    with pytest.raises(DeadlineError, match="did not start"):
        await host.start(0.01)
    assert not host.is_running
    host = TaskHost(never_stops)
    await host.start(WAIT_S)
    with pytest.raises(DeadlineError, match="did not end"):
        await host.stop(0.01)
    assert not host.is_running
    host = TaskHost(fails_later)
    await host.start(WAIT_S)
    with pytest.raises(OSError, match="device lost"):
        await host.stop(WAIT_S)
    await host.stop(WAIT_S)


@pytest.mark.anyio
async def test_a_task_host_starts_once_and_stops_before_a_start_for_free():
    host = TaskHost(Echo(use_relay=False).main)
    await host.stop(WAIT_S)
    await host.start(WAIT_S)
    with pytest.raises(RuntimeError, match="started or closed already"):
        await host.start(WAIT_S)
    await host.stop(WAIT_S)


def test_a_task_host_of_another_loop_is_refused(real_backend):
    hosts: list[TaskHost] = []

    async def start() -> None:
        hosts.append(TaskHost(never_stops))
        await hosts[0].start(WAIT_S)

    async def stop() -> None:
        with pytest.raises(RuntimeError, match="another loop"):
            await hosts[0].stop(WAIT_S)

    anyio.run(start, backend=real_backend)
    assert not hosts[0].is_running
    anyio.run(stop, backend=real_backend)


# Pumped by its caller.


def test_an_inline_host_moves_only_when_pumped_and_has_no_thread():
    before = set(threading.enumerate())
    echo = Echo(use_relay=False)
    host = InlineHost(echo.main)
    host.start(WAIT_S)
    echo.inbox.post("x")
    echo.bell.ring()
    assert len(echo.outbox) == 0
    while host.pump():
        pass
    assert echo.outbox.take() == ["x"]
    assert set(threading.enumerate()) <= before
    host.stop(WAIT_S)
    host.stop(WAIT_S)
    assert echo.ended
    assert not host.is_running


def test_an_inline_host_sleeps_until_a_thread_or_a_timer_makes_the_condition_true():
    class Services:
        def post(self, call: Callable[[], None]) -> None:
            echo.bell.post(call)

        def spawn(self, task: object, name: str) -> None:
            raise AssertionError("not used")

        def publish(self, events: object) -> None:
            raise AssertionError("not used")

    echo = Echo(use_relay=False)
    host = InlineHost(echo.main)
    host.start(WAIT_S)
    owner: list[OwnerThread] = []
    echo.bell.post(lambda: owner.append(OwnerThread("test-owner", Services())))
    host.pump_until(lambda: bool(owner), WAIT_S)
    release = threading.Event()
    operation = owner[0].submit(lambda: release.wait(WAIT_S), _raise)
    with pytest.raises(DeadlineError, match="did not hold"):
        host.pump_until(lambda: operation.is_settled, 0.02)
    release.set()
    host.pump_until(lambda: operation.is_settled, WAIT_S)
    owner[0]._jobs.put(None)
    owner[0]._thread.join(WAIT_S)
    host.stop(WAIT_S)


def _raise(error: Exception) -> bool:
    raise error


def test_failures_and_deadlines_of_an_inline_host_are_raised():
    with pytest.raises(OSError, match="no device"):
        InlineHost(fails_to_start).start(WAIT_S)
    with pytest.raises(RuntimeError, match="ended before it had started"):
        InlineHost(ends_early).start(WAIT_S)
    with pytest.raises(DeadlineError, match="did not start"):
        InlineHost(never_starts).start(0.01)
    host = InlineHost(never_stops)
    host.start(WAIT_S)
    with pytest.raises(DeadlineError, match="did not end"):
        host.stop(0.01)
    assert not host.is_running
    host = InlineHost(fails_later)
    host.start(WAIT_S)
    with pytest.raises(OSError, match="device lost"):
        host.stop(WAIT_S)
    host.stop(WAIT_S)


def test_an_inline_host_that_never_started_stops_at_once():
    host = InlineHost(ends_early)
    host.stop(WAIT_S)
    assert not host.is_running


def test_an_inline_host_refuses_trio_other_threads_and_a_pump_inside_a_pump():
    with pytest.raises(ConfigError, match="asyncio only"):
        InlineHost(ends_early, backend="trio")
    errors: list[str] = []

    async def main(started: Callable[[], None], stop: anyio.Event) -> None:
        try:
            host.pump()
        except RuntimeError as error:
            errors.append(str(error))
        started()
        await stop.wait()

    def pump() -> None:
        try:
            host.pump()
        except RuntimeError as error:
            errors.append(str(error))

    host = InlineHost(main)
    host.start(WAIT_S)
    thread = threading.Thread(target=pump)
    thread.start()
    thread.join()
    host.stop(WAIT_S)
    assert "pumped already" in errors[0]
    assert "only the thread" in errors[1]


@pytest.mark.asyncio
async def test_an_inline_host_inside_a_running_loop_is_refused_by_name():
    host = InlineHost(ends_early)
    with pytest.raises(RuntimeError, match="use the task host"):
        host.pump()
    host._loop.close()


class Opening:
    """A program that opens something, and is interrupted by a signal to the process before it has started."""

    def __init__(self) -> None:
        self.is_open = False

    async def main(self, started: Callable[[], None], stop: anyio.Event) -> None:
        self.is_open = True
        try:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.05)
            self.is_open = False


@pytest.mark.parametrize("host", [ThreadHost, InlineHost])
def test_a_start_that_is_interrupted_leaves_nothing(host: type[ThreadHost] | type[InlineHost]) -> None:
    opening = Opening()
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        host(opening.main).start(WAIT_S)
    assert not opening.is_open
    assert threading.active_count() <= before


@pytest.mark.anyio
async def test_a_start_that_is_cancelled_leaves_nothing_on_the_loop() -> None:
    is_open = False

    async def main(started: Callable[[], None], stop: anyio.Event) -> None:
        nonlocal is_open
        is_open = True
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.05)
            is_open = False

    host = TaskHost(main)
    with anyio.move_on_after(0.05):
        await host.start(WAIT_S)
    assert not is_open
    assert not host.is_running
