"""The outbox: order, polling, an engine thread that waits, and tasks that wait."""

from __future__ import annotations

import sys
import threading

import anyio
import pytest

from kvcr_actors.runtime.outbox import Outbox

pytestmark = pytest.mark.anyio


def test_completions_come_in_order_and_once():
    outbox: Outbox[int] = Outbox()
    assert outbox.take() == []
    outbox.deliver([1, 2])
    outbox.deliver([])
    outbox.deliver([3])
    assert len(outbox) == 3
    assert outbox.take() == [1, 2, 3]
    assert outbox.take() == []


def test_a_wait_without_a_delivery_ends_at_its_timeout():
    outbox: Outbox[int] = Outbox()
    assert outbox.wait(0.0) is False
    assert outbox.wait(0.01) is False


def test_a_delivery_without_a_waiter_rings_nothing():
    outbox: Outbox[int] = Outbox()
    outbox.deliver([1])
    assert outbox._doorbell.empty()
    assert outbox.wait(30.0) is True
    outbox.take()
    assert outbox.wait(0.0) is False
    outbox.deliver([2])
    assert outbox._doorbell.empty()


def test_no_wake_up_is_lost_between_a_delivering_and_a_waiting_thread():
    outbox: Outbox[int] = Outbox()
    credit = threading.Semaphore(0)
    count = 3_000

    def deliver() -> None:
        for number in range(count):
            credit.acquire()
            outbox.deliver([number])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=deliver)
    thread.start()
    try:
        for number in range(count):
            credit.release()
            assert outbox.wait(30.0) is True
            assert outbox.take() == [number]
    finally:
        sys.setswitchinterval(interval)
        thread.join()


async def test_tasks_wait_for_a_delivery_of_the_same_loop():
    outbox: Outbox[int] = Outbox()
    woken: list[int] = []

    async def wait() -> None:
        await outbox.wait_async()
        woken.append(len(outbox))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        assert woken == []
        outbox.deliver([1])
    assert woken == [1, 1]
    with anyio.fail_after(30):
        await outbox.wait_async()
