"""An operation tells its outcome and its quiet once each, to calls and to waiters, early and late."""

from __future__ import annotations

import anyio
import pytest

from kvcr_actors.transfers import Operation

pytestmark = pytest.mark.anyio


async def test_waiters_and_calls_hear_of_each_end_when_it_comes() -> None:
    operation: Operation[str] = Operation()
    heard: list[str] = []

    async def wait_for_both() -> None:
        heard.append(f"waiter: {await operation.outcome()}")
        await operation.quiet()
        heard.append("waiter: quiet")

    operation.when_settled(lambda outcome: heard.append(f"call: {outcome}"))
    operation.when_quiet(lambda: heard.append("call: quiet"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait_for_both)
        tasks.start_soon(wait_for_both)
        await anyio.wait_all_tasks_blocked()
        assert (operation.is_settled, operation.is_quiet, operation.settled_outcome()) == (False, False, None)
        operation.settle("done", quiet=False)
        operation.settle("again", quiet=False)
        await anyio.wait_all_tasks_blocked()
        assert (operation.is_settled, operation.is_quiet, operation.settled_outcome()) == (True, False, "done")
        assert heard == ["call: done", "waiter: done", "waiter: done"]
        operation.become_quiet()
    assert operation.is_quiet
    assert heard[3:] == ["call: quiet", "waiter: quiet", "waiter: quiet"]


@pytest.mark.parametrize("made", ["finished", "settled"])
async def test_who_comes_late_hears_at_once(made: str) -> None:
    operation = Operation[int].finished(3) if made == "finished" else Operation[int]()
    operation.settle(3)
    heard: list[int] = []
    operation.when_settled(heard.append)
    operation.when_quiet(lambda: heard.append(4))
    assert heard == [3, 4]
    with anyio.fail_after(1):
        assert await operation.outcome() == 3
        await operation.quiet()


@pytest.mark.parametrize("is_over", [False, True])
async def test_a_waiter_can_be_cancelled_at_either_end_and_changes_neither(is_over: bool) -> None:
    operation: Operation[int] = Operation()
    if is_over:
        operation.settle(3)
    for wait in (operation.outcome, operation.quiet):
        with anyio.CancelScope() as scope:
            scope.cancel()
            await wait()
        assert scope.cancelled_caught
    operation.settle(4)
    assert (await operation.outcome(), operation.is_quiet) == (3 if is_over else 4, True)


async def test_memory_cannot_be_quiet_before_the_outcome_is_known() -> None:
    with pytest.raises(RuntimeError, match="settle the operation before"):
        Operation[int]().become_quiet()
