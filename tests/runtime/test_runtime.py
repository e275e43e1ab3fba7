"""All actors together: the drain in order and within budgets, quiet detection, and the description."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from kvcr_actors.errors import ActorEscalatedError, ConfigError, ControllerClosedError, InboxClosedError
from kvcr_actors.runtime.runtime import Runtime
from kvcr_actors.runtime.supervisor import ActorSpec, RestartPolicy
from tests.runtime.workers import Diary, Worker, worker_spec

pytestmark = pytest.mark.anyio


async def test_actors_drain_one_after_the_other_in_the_order_given(running):
    diary = Diary()

    async def end(worker: Worker) -> None:
        await anyio.sleep(0.02)

    async with running(*(worker_spec(name, diary, end=end) for name in "abc")):
        diary.lines.clear()
    assert diary.lines == ["a drains", "a drained", "b drains", "b drained", "c drains", "c drained"]


async def test_what_a_draining_actor_tells_a_later_one_is_handled(running):
    diary = Diary()

    async def pass_on(worker: Worker, batch: Sequence[Any]) -> None:
        await anyio.sleep(0.01)
        last.inbox.tell(("passed on", *batch))

    async def last_words(worker: Worker) -> None:
        last.inbox.tell("last words")

    last = worker_spec("b", diary)
    first = worker_spec("a", diary, act=pass_on, end=last_words)
    async with running(first, last):
        first.inbox.tell(1)
        first.inbox.tell(2)
    assert diary.handled == [1, 2, ("passed on", 1, 2), "last words"]
    assert diary.abandoned == []


async def test_an_actor_over_its_budget_is_given_up_and_said_so_and_the_next_still_drains(running, log):
    diary = Diary()

    async def stuck(worker: Worker, batch: Sequence[Any]) -> None:
        worker.busy = 2
        await anyio.sleep(1000)

    async def tell_next(worker: Worker) -> None:
        diary.write("b is told")

    slow = worker_spec("a", diary, act=stuck, drain_budget_s=0.05)
    async with running(slow, worker_spec("b", diary, end=tell_next)):
        slow.inbox.tell("in hand")
        await anyio.sleep(0.01)
        slow.inbox.tell("queued")
    assert [message for message, _ in diary.abandoned] == ["in hand", "queued"]
    assert diary.lines[-3:] == ["b drains", "b is told", "b drained"]
    given_up = log.one("actor.given_up")
    assert (given_up["actor"], given_up["queued"], given_up["in_hand"], given_up["busy"]) == ("a", 1, 1, 2)


async def test_the_clean_up_of_an_actor_given_up_may_still_tell_the_next(running):
    diary = Diary()

    async def stuck(worker: Worker, batch: Sequence[Any]) -> None:
        try:
            await anyio.sleep(1000)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.01)
            later.inbox.tell("clean-up")

    later = worker_spec("b", diary)
    slow = worker_spec("a", diary, act=stuck, drain_budget_s=0.2)
    async with running(slow, later):
        slow.inbox.tell("x")
    assert diary.handled == ["clean-up"]


async def test_an_actor_that_ignores_its_cancellation_does_not_keep_the_others_from_draining(running, log):
    diary = Diary()
    let_go = anyio.Event()

    async def stubborn(worker: Worker, batch: Sequence[Any]) -> None:
        with anyio.CancelScope(shield=True):
            await let_go.wait()

    async def release(worker: Worker) -> None:
        let_go.set()

    slow = worker_spec("a", diary, act=stubborn, drain_budget_s=0.05)
    async with running(slow, worker_spec("b", diary, end=release)):
        slow.inbox.tell("x")
    assert log.events() == ["actor.given_up", "actor.does_not_end"]
    assert "b drained" in diary.lines


async def test_children_that_never_end_by_themselves_are_cancelled_after_the_drain(running, log):
    diary = Diary()

    async def act(worker: Worker, batch: Sequence[Any]) -> None:
        worker.children.start_soon(anyio.sleep_forever)

    spec = worker_spec("a", diary, act=act, drain_budget_s=0.2)
    async with running(spec):
        spec.inbox.tell("x")
    assert diary.lines[-1] == "a drained"
    assert log.events() == []


async def test_a_stopped_actor_takes_no_messages(running):
    spec = worker_spec("a", Diary())
    async with running(spec):
        pass
    with pytest.raises(InboxClosedError, match="inbox a"):
        spec.inbox.tell("late")


async def test_quiet_means_nothing_queued_in_hand_or_in_flight(running):
    diary = Diary()
    go_on = {"handle": anyio.Event(), "child": anyio.Event()}

    async def child(worker: Worker) -> None:
        await go_on["child"].wait()
        worker.busy -= 1
        runtime.poke()
        # A turn that goes on after the poke is not quiet yet.
        other.inbox.tell("from the child")

    async def act(worker: Worker, batch: Sequence[Any]) -> None:
        await go_on["handle"].wait()
        worker.busy += 1
        worker.children.start_soon(child, worker)

    spec, other = worker_spec("a", diary, act=act), worker_spec("b", diary)
    async with running(spec, other) as runtime:
        assert runtime.is_quiet()
        spec.inbox.tell("x")
        assert not runtime.is_quiet()
        await anyio.wait_all_tasks_blocked()
        assert len(spec.inbox) == 0
        assert not runtime.is_quiet()
        go_on["handle"].set()
        await anyio.wait_all_tasks_blocked()
        assert runtime.describe()["a"]["in_hand"] == 0
        assert not runtime.is_quiet()
        go_on["child"].set()
        await runtime.wait_quiet()
        assert diary.handled == ["x", "from the child"]


async def test_a_message_posted_without_a_ring_is_not_quiet(running):
    spec = worker_spec("a", Diary())
    async with running(spec) as runtime:
        spec.inbox.post("silent")
        await anyio.wait_all_tasks_blocked()
        assert not runtime.is_quiet()


async def test_many_waiters_are_told_of_one_quiet_moment(running):
    diary = Diary()

    async def act(worker: Worker, batch: Sequence[Any]) -> None:
        await anyio.sleep(0.01)

    spec = worker_spec("a", diary, act=act)
    told: list[str] = []
    async with running(spec) as runtime:

        async def wait(name: str) -> None:
            await runtime.wait_quiet()
            told.append(name)

        spec.inbox.tell("x")
        async with anyio.create_task_group() as tasks:
            for name in ("first", "second"):
                tasks.start_soon(wait, name)
        assert sorted(told) == ["first", "second"]
        await wait("at once")
        assert told[-1] == "at once"


async def stuck(worker: Worker, batch: Sequence[Any]) -> None:
    await anyio.sleep(1000)


async def test_actors_that_were_cancelled_are_not_quiet_to_whoever_waits_or_asks_later(log):
    spec = worker_spec("a", Diary(), act=stuck)
    runtime = Runtime([spec], log.logger)

    async def wait() -> None:
        with pytest.raises(ControllerClosedError, match="cancelled before all was quiet"):
            await runtime.wait_quiet()

    async with anyio.create_task_group() as outer:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(runtime.run, lambda: None, anyio.Event())
            await anyio.wait_all_tasks_blocked()
            spec.inbox.tell("x")
            outer.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        await wait()


async def test_an_actor_that_fails_is_named_to_whoever_waits_for_quiet_or_asks_later(running):
    go_on = anyio.Event()

    async def fail(worker: Worker, batch: Sequence[Any]) -> None:
        await go_on.wait()
        raise ValueError("planted")

    async def wait(runtime: Runtime) -> None:
        with pytest.raises(ControllerClosedError, match=r"actor a failed before all was quiet: .*planted"):
            await runtime.wait_quiet()

    spec = worker_spec("a", Diary(), act=fail, restart=RestartPolicy(limit=0))

    async def run() -> None:
        async with running(spec, worker_spec("b", Diary())) as runtime:
            spec.inbox.tell("x")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait, runtime)
                await anyio.wait_all_tasks_blocked()
                go_on.set()
            await wait(runtime)

    with pytest.raises(ActorEscalatedError):
        await run()


async def test_after_an_orderly_end_all_is_quiet(running):
    spec = worker_spec("a", Diary())
    async with running(spec) as runtime:
        spec.inbox.tell("x")
    await runtime.wait_quiet()


async def test_the_description_names_state_limits_and_counters(running):
    spec = worker_spec("a", Diary(), limit=7)
    async with running(spec) as runtime:
        spec.inbox.tell(1)
        spec.inbox.tell(2)
        await runtime.wait_quiet()
        assert runtime.describe() == {
            "a": {
                "state": "running",
                "inbox": 0,
                "inbox_limit": 7,
                "in_hand": 0,
                "busy": 0,
                "restarts": 0,
                "last_error": None,
                "batches": 1,
                "messages": 2,
                "actor": {"handled": 2},
            }
        }
    assert runtime.describe()["a"]["state"] == "stopped"


async def test_two_actors_of_one_name_are_refused(log):
    spec = worker_spec("a", Diary())
    with pytest.raises(ConfigError, match="only once"):
        Runtime([spec, ActorSpec("a", spec.make, spec.inbox)], log.logger)
