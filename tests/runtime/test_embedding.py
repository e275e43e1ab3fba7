"""Inside a plain asyncio program, run by pytest-asyncio and not by anyio."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import structlog

from kvcr_actors.runtime.bell import LoopBell
from kvcr_actors.runtime.hosts import TaskHost
from kvcr_actors.runtime.runtime import Runtime
from kvcr_actors.testing.virtual_time import VirtualClockLoop
from tests.runtime.workers import Diary, Worker, worker_spec

pytestmark = pytest.mark.asyncio

WAIT_S = 30


async def test_actors_run_in_a_plain_asyncio_program_and_are_fed_from_its_threads():
    diary = Diary()

    async def act(worker: Worker, batch: Any) -> None:
        await asyncio.sleep(0.001)

    spec = worker_spec("a", diary, act=act)
    runtime = Runtime([spec], structlog.get_logger())
    host = TaskHost(runtime.run)
    await host.start(WAIT_S)
    bell = LoopBell(lambda error: None)
    bell.attach(spec.inbox)

    def feed() -> None:
        for number in range(10):
            spec.inbox.post(number)
            bell.ring()

    assert not isinstance(asyncio.get_running_loop(), VirtualClockLoop)
    await asyncio.to_thread(feed)
    await asyncio.wait_for(runtime.wait_quiet(), WAIT_S)
    await asyncio.create_task(host.stop(WAIT_S))
    bell.close()
    assert diary.handled == list(range(10))
    assert diary.lines == ["a made", "a drains", "a drained"]


async def test_cancelling_the_waiting_task_does_not_cancel_the_actors():
    diary = Diary()
    host = TaskHost(Runtime([worker_spec("a", diary)], structlog.get_logger()).run)
    await asyncio.create_task(host.start(WAIT_S))
    waiting = asyncio.create_task(asyncio.sleep(WAIT_S))
    waiting.cancel()
    await asyncio.wait([waiting])
    assert host.is_running
    await host.stop(WAIT_S)
    assert diary.lines[-1] == "a drained"
