"""The bell: one wake-up for many rings, posted calls in order, failures kept away from the loop, and a clean end."""

from __future__ import annotations

import os
import sys
import threading
import time

import anyio
import pytest

from kvcr_actors.runtime.bell import LoopAccess, LoopBell
from kvcr_actors.runtime.inbox import Inbox
from kvcr_actors.transfers import Operation

pytestmark = [pytest.mark.anyio, pytest.mark.real_clock]

WAIT_S = 30


async def on_thread(call) -> None:
    with anyio.fail_after(WAIT_S):
        await anyio.to_thread.run_sync(call)


@pytest.fixture
async def bell():
    errors: list[Exception] = []
    bell = LoopBell(errors.append)
    yield bell
    bell.close()
    assert errors == []


async def test_a_message_posted_by_a_thread_wakes_the_reader(bell):
    inbox: Inbox[str] = Inbox("test", 10)
    bell.attach(inbox)

    def hand_over() -> None:
        inbox.post("a")
        inbox.post("b")
        bell.ring()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(on_thread, hand_over)
        with anyio.fail_after(WAIT_S):
            assert await inbox.take() == ["a", "b"]


async def test_every_attached_inbox_with_content_is_notified_and_the_others_sleep_on(bell):
    inboxes: list[Inbox[int]] = [Inbox(f"inbox {number}", 10) for number in range(3)]
    taken: list[tuple[int, list[int]]] = []

    async def read(number: int) -> None:
        taken.append((number, await inboxes[number].take()))

    def hand_over() -> None:
        inboxes[0].post(7)
        inboxes[2].post(9)
        bell.ring()

    async with anyio.create_task_group() as tasks:
        for number, inbox in enumerate(inboxes):
            bell.attach(inbox)
            tasks.start_soon(read, number)
        await anyio.wait_all_tasks_blocked()
        await on_thread(hand_over)
        with anyio.fail_after(WAIT_S):
            while len(taken) < 2:
                await anyio.wait_all_tasks_blocked()
        assert sorted(taken) == [(0, [7]), (2, [9])]
        tasks.cancel_scope.cancel()


async def test_calls_run_in_order_of_posting_from_a_thread_and_from_the_loop(bell):
    ran: list[int] = []
    done = anyio.Event()

    def post_all() -> None:
        for number in range(100):
            bell.post(lambda number=number: ran.append(number))

    await on_thread(post_all)
    bell.post(lambda: ran.append(100))
    bell.post(done.set)
    assert 100 not in ran
    with anyio.fail_after(WAIT_S):
        await done.wait()
    assert ran == list(range(101))


async def test_rings_while_the_loop_is_held_cost_one_wake_up(bell):
    class Counter:
        rings = 0

        def notify(self) -> None:
            self.rings += 1

    counter, done = Counter(), anyio.Event()
    bell.attach(counter)

    def ring_often() -> None:
        for _ in range(1_000):
            bell.ring()

    thread = threading.Thread(target=ring_often)
    thread.start()
    thread.join()
    bell.post(done.set)
    with anyio.fail_after(WAIT_S):
        await done.wait()
    assert counter.rings == 1


async def test_a_later_ring_keeps_no_post_waiting_and_still_comes(bell, monkeypatch):
    inbox: Inbox[str] = Inbox("test", 10)
    bell.attach(inbox)
    asleep, go = threading.Event(), threading.Event()
    monkeypatch.setattr(time, "sleep", lambda seconds: (asleep.set(), go.wait(WAIT_S)))

    def ring_later() -> None:
        bell.ring_later()
        bell.ring_later()
        asleep.wait(WAIT_S)

    await on_thread(ring_later)
    posted = anyio.Event()
    await on_thread(lambda: bell.post(posted.set))
    with anyio.fail_after(WAIT_S):
        await posted.wait()
        inbox.post("for the later ring")
        go.set()
        assert await inbox.take() == ["for the later ring"]
    assert bell._doorbell.empty()


async def test_a_bell_that_closes_under_a_later_ring_ends_its_thread():
    bell = LoopBell(lambda error: None)
    await on_thread(bell.ring_later)
    bell.close()
    assert not bell._relay.is_alive()


async def test_a_call_that_raises_goes_to_the_handler_and_the_next_one_runs():
    errors: list[Exception] = []
    bell = LoopBell(errors.append)
    done = anyio.Event()

    def fail() -> None:
        raise ValueError("call")

    def post_both() -> None:
        bell.post(fail)
        bell.post(done.set)

    await on_thread(post_both)
    with anyio.fail_after(WAIT_S):
        await done.wait()
    assert [repr(error) for error in errors] == ["ValueError('call')"]
    bell.close()


async def test_a_posted_call_may_make_and_settle_operations(bell):
    outcomes: list[Operation[int]] = []
    done = anyio.Event()

    def call() -> None:
        outcomes.append(Operation.finished(3))
        done.set()

    await on_thread(lambda: bell.post(call))
    with anyio.fail_after(WAIT_S):
        await done.wait()
        assert await outcomes[0].outcome() == 3


async def test_close_runs_what_was_posted_drops_what_follows_and_ends_the_thread():
    before = set(threading.enumerate())
    bell = LoopBell(lambda error: None, name="test-bell")
    assert {thread.name for thread in set(threading.enumerate()) - before} == {"test-bell"}
    ran: list[str] = []
    bell.post(lambda: ran.append("before"))
    bell.close()
    bell.close()
    bell.post(lambda: ran.append("after"))
    await on_thread(bell.ring)
    assert bell._doorbell.empty()
    assert ran == ["before"]
    assert "test-bell" not in {thread.name for thread in threading.enumerate()}


async def test_the_relay_thread_does_not_push_the_ringer_aside(bell):
    inbox: Inbox[str] = Inbox("test", 10)
    bell.attach(inbox)
    inbox.post("carried")
    await on_thread(bell.ring)
    with anyio.fail_after(WAIT_S):
        await inbox.take()
    assert os.sched_getscheduler(bell._relay.native_id) == os.SCHED_BATCH
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


async def test_a_ring_after_close_reaches_nobody():
    bell = LoopBell(lambda error: None)
    bell.close()
    await on_thread(bell.ring)
    assert bell._doorbell.empty()


async def test_without_a_relay_another_thread_wakes_the_loop_itself():
    before = set(threading.enumerate())
    bell = LoopBell(lambda error: None, relay=False)
    assert set(threading.enumerate()) <= before
    done = anyio.Event()
    await on_thread(lambda: bell.post(done.set))
    with anyio.fail_after(WAIT_S):
        await done.wait()
    bell.close()


def test_a_bell_whose_loop_is_gone_drops_rings_quietly(real_backend):
    bells: list[LoopBell] = []

    async def leave_it_open() -> None:
        bells.append(LoopBell(lambda error: None))

    anyio.run(leave_it_open, backend=real_backend)
    (bell,) = bells
    ran: list[str] = []
    bell.post(lambda: ran.append("lost"))
    bell._thread = 0
    bell._armed = False
    bell.ring()
    bell._relay.join(WAIT_S)
    assert not bell._relay.is_alive()
    bell.ring()
    assert ran == []


async def test_a_bell_needs_a_running_loop():
    failure: list[Exception] = []

    def make() -> None:
        try:
            LoopBell(failure.append)
        except RuntimeError as error:
            failure.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert len(failure) == 1


@pytest.mark.parametrize("ring", [LoopBell.ring, LoopBell.ring_later])
async def test_no_message_is_lost_or_reordered_between_two_threads_and_the_loop(bell, ring):
    # A tiny switch interval moves the threads against each other far more often than real life does.
    inbox: Inbox[tuple[int, int]] = Inbox("test", 100_000)
    bell.attach(inbox)
    each = 3_000
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def write(writer: int) -> None:
        for number in range(each):
            inbox.post((writer, number))
            ring(bell)

    try:
        taken: list[tuple[int, int]] = []
        async with anyio.create_task_group() as tasks:
            for writer in range(2):
                tasks.start_soon(on_thread, lambda writer=writer: write(writer))
            with anyio.fail_after(WAIT_S):
                while len(taken) < 2 * each:
                    taken += await inbox.take()
    finally:
        sys.setswitchinterval(interval)
    for writer in range(2):
        assert [number for who, number in taken if who == writer] == list(range(each))


async def test_the_running_loop_is_known_by_its_own_token(anyio_backend_name):
    token = LoopAccess.of_running_loop().token
    module = type(token).__module__.partition(".")[0]
    assert module == anyio_backend_name
