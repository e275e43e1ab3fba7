"""What other threads ask the loop: each question is answered once, whenever it was asked."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from kvcr_actors.errors import ControllerClosedError
from kvcr_actors.runtime.bell import LoopBell
from kvcr_actors.runtime.questions import Questions

pytestmark = pytest.mark.anyio

WAIT_S = 30.0


@pytest.mark.real_clock
async def test_a_thread_gets_what_the_loop_answers_or_raises():
    questions, faults = Questions(), list[Exception]()
    bell = LoopBell(faults.append)

    async def answer() -> str:
        await anyio.lowlevel.checkpoint()
        return "task"

    async def fail() -> None:
        raise KeyError("task")

    def fail_at_once() -> None:
        raise KeyError("call")

    def ask() -> None:
        assert questions.ask(lambda: "call").result(WAIT_S) == "call"
        assert questions.run(answer).result(WAIT_S) == "task"
        with pytest.raises(KeyError, match="call"):
            questions.ask(fail_at_once).result(WAIT_S)
        with pytest.raises(KeyError, match="task"):
            questions.run(fail).result(WAIT_S)

    async with anyio.create_task_group() as tasks:
        questions.start(bell, tasks)
        await anyio.to_thread.run_sync(ask)
        tasks.cancel_scope.cancel()
    questions.end()
    bell.close()
    assert faults == []


async def test_without_a_loop_a_question_is_refused_and_its_task_never_runs():
    questions, ran = Questions(), list[str]()

    async def task() -> None:
        ran.append("task")

    for answer in (questions.ask(lambda: ran.append("call")), questions.run(task)):
        with pytest.raises(ControllerClosedError, match="start it first"):
            answer.result(0)
    bell = LoopBell(pytest.fail, relay=False)  # type: ignore[arg-type]
    async with anyio.create_task_group() as tasks:
        questions.start(bell, tasks)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    questions.end()
    bell.close()
    assert ran == []


async def test_questions_that_are_open_at_the_end_are_answered_by_it():
    questions = Questions()
    bell = LoopBell(pytest.fail, relay=False)  # type: ignore[arg-type]
    async with anyio.create_task_group() as tasks:
        questions.start(bell, tasks)
        running = questions.run(anyio.sleep_forever)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    bell.close()
    dropped, waiting = questions.ask(lambda: None), questions.run(anyio.sleep_forever)
    questions.end()
    for answer in (running, dropped, waiting):
        with pytest.raises(ControllerClosedError):
            answer.result(0)


async def test_after_a_failure_tasks_are_refused_with_it_and_calls_are_still_answered():
    questions, failure = Questions(), ValueError("planted")
    bell = LoopBell(pytest.fail, relay=False)  # type: ignore[arg-type]
    async with anyio.create_task_group() as tasks:
        questions.start(bell, tasks)
        questions.fail(failure)
        refused, answer = questions.run(anyio.sleep_forever), questions.ask(lambda: 7)
        with pytest.raises(ControllerClosedError, match="the controller failed: planted") as raised:
            refused.result(0)
        assert raised.value.__cause__ is failure
        await anyio.wait_all_tasks_blocked()
        assert answer.result(0) == 7
        tasks.cancel_scope.cancel()
    questions.end()
    bell.close()
