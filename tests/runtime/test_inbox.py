"""The inbox on the loop: limits, order, closing, and cancellation that takes nothing."""

from __future__ import annotations

import anyio
import pytest

from kvcr_actors.errors import ConfigError, InboxClosedError, InboxFullError
from kvcr_actors.runtime.inbox import Inbox

pytestmark = pytest.mark.anyio


async def test_a_full_inbox_refuses_by_name_and_keeps_what_it_has():
    inbox: Inbox[int] = Inbox("backup", 2)
    inbox.post(1)
    inbox.post(2)
    with pytest.raises(InboxFullError, match="inbox backup: 2 messages"):
        inbox.post(3)
    assert await inbox.take() == [1, 2]
    inbox.post(4)
    assert len(inbox) == 1


async def test_a_closed_inbox_refuses_posts_and_gives_what_it_had_then_nothing():
    inbox: Inbox[int] = Inbox("backup", 2)
    inbox.post(1)
    inbox.close()
    with pytest.raises(InboxClosedError, match="inbox backup"):
        inbox.post(2)
    assert await inbox.take() == [1]
    assert await inbox.take() == []


async def test_closing_wakes_a_reader_that_waits():
    inbox: Inbox[int] = Inbox("backup", 2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.lowlevel.checkpoint)
        tasks.start_soon(_close_when_blocked, inbox)
        with anyio.fail_after(30):
            assert await inbox.take() == []


async def _close_when_blocked(inbox: Inbox[int]) -> None:
    await anyio.wait_all_tasks_blocked()
    inbox.close()


async def test_tell_wakes_a_reader_that_waits_and_post_alone_does_not():
    inbox: Inbox[int] = Inbox("backup", 10)
    taken: list[int] = []

    async def read() -> None:
        taken.extend(await inbox.take())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        inbox.post(1)
        await anyio.wait_all_tasks_blocked()
        assert taken == []
        inbox.tell(2)
    assert taken == [1, 2]


async def test_a_cancelled_take_took_nothing():
    inbox: Inbox[int] = Inbox("backup", 10)
    with anyio.CancelScope() as scope:
        scope.cancel()
        inbox.post(1)
        await inbox.take()
    assert scope.cancelled_caught
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(inbox.take)
            await anyio.wait_all_tasks_blocked()
            inbox.post(2)
            scope.cancel()
    assert await inbox.take() in ([2], [1, 2])


async def test_a_busy_reader_lets_other_tasks_run():
    inbox: Inbox[int] = Inbox("backup", 10)
    seen: list[str] = []

    async def read() -> None:
        for _ in range(3):
            inbox.post(1)
            await inbox.take()
            seen.append("reader")

    async def other() -> None:
        seen.append("other")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        tasks.start_soon(other)
    assert seen[-1] == "reader"


def test_a_limit_below_one_is_refused():
    with pytest.raises(ConfigError, match="inbox backup"):
        Inbox("backup", 0)
