"""An actor's life: batches, failures, restarts, escalation, and no message lost on any way out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import anyio
import pytest

from kvcr_actors.errors import ActorEscalatedError, ControllerClosedError
from kvcr_actors.runtime.runtime import Runtime
from kvcr_actors.runtime.supervisor import ActorSpec, RestartPolicy, sole_cause
from tests.runtime.workers import Diary, Worker, worker_spec

pytestmark = pytest.mark.anyio


async def fail_on_bad(worker: Worker, batch: Sequence[Any]) -> None:
    if "bad" in batch:
        raise ValueError("bad message")


async def settle(runtime: Runtime) -> None:
    with anyio.fail_after(30):
        await runtime.wait_quiet()


async def settle_in_vain(runtime: Runtime) -> None:
    with pytest.raises(ControllerClosedError):
        await settle(runtime)


async def test_a_batch_is_everything_that_waits_in_order(running):
    diary = Diary()
    batches: list[list[int]] = []

    async def act(worker: Worker, batch: Sequence[Any]) -> None:
        batches.append(list(batch))

    spec = worker_spec("a", diary, act=act)
    async with running(spec) as runtime:
        for message in range(5):
            spec.inbox.tell(message)
        await settle(runtime)
        spec.inbox.tell(5)
        await settle(runtime)
    assert batches == [[0, 1, 2, 3, 4], [5]]


async def test_a_failed_batch_is_abandoned_with_its_error_and_the_rebuilt_actor_takes_the_next(running):
    diary = Diary()
    spec = worker_spec("a", diary, act=fail_on_bad)
    async with running(spec) as runtime:
        spec.inbox.tell("bad")
        spec.inbox.tell("worse luck")
        await settle(runtime)
        spec.inbox.tell("good")
        await settle(runtime)
        description = runtime.describe()["a"]
    assert diary.made == 2
    assert [(message, str(error)) for message, error in diary.abandoned] == [
        ("bad", "bad message"),
        ("worse luck", "bad message"),
    ]
    assert diary.handled == ["good"]
    assert description["restarts"] == 1
    assert "bad message" in description["last_error"]
    assert description["batches"] == 1


async def test_children_have_cleaned_up_before_the_batch_is_abandoned_and_the_actor_rebuilt(running):
    diary = Diary()

    async def child() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.05)
            diary.write("child cleaned up")

    async def act(worker: Worker, batch: Sequence[Any]) -> None:
        worker.children.start_soon(child)
        await anyio.sleep(0.01)
        raise ValueError("no")

    spec = worker_spec("a", diary, act=act)
    async with running(spec) as runtime:
        spec.inbox.tell("x")
        await settle(runtime)
        assert diary.lines == ["a made", "child cleaned up", "a abandons 1"]
        await anyio.sleep(0.5)
        assert diary.lines[3:] == ["a made"]


async def test_a_child_that_fails_ends_the_incarnation_and_abandons_the_batch_in_hand(running):
    diary = Diary()

    async def child() -> None:
        await anyio.sleep(0.01)
        raise ValueError("child")

    async def act(worker: Worker, batch: Sequence[Any]) -> None:
        worker.children.start_soon(child)
        await anyio.sleep(1000)

    spec = worker_spec("a", diary, act=act)
    async with running(spec) as runtime:
        spec.inbox.tell("x")
        await settle(runtime)
        await anyio.sleep(0.5)
    assert [(message, repr(error)) for message, error in diary.abandoned] == [("x", "ValueError('child')")]
    assert diary.made == 2


async def test_what_a_failed_incarnation_still_counted_as_busy_is_forgotten(running):
    async def act(worker: Worker, batch: Sequence[Any]) -> None:
        worker.busy = 3
        raise ValueError("no")

    spec = worker_spec("a", Diary(), act=act, restart=RestartPolicy(backoff_s=100))
    async with running(spec) as runtime:
        spec.inbox.tell("x")
        await settle(runtime)
        assert runtime.describe()["a"]["state"] == "backing_off"
        runtime._supervisors[0].cancel()


async def test_the_back_off_doubles_within_the_window_and_starts_again_after_it(running, anyio_backend):
    diary = Diary()
    failed_at: list[float] = []
    virtual = anyio_backend[1] != {}

    async def act(worker: Worker, batch: Sequence[Any]) -> None:
        failed_at.append(anyio.current_time())
        raise ValueError("no")

    spec = worker_spec("a", diary, act=act, restart=RestartPolicy(limit=4, window_s=0.5, backoff_s=0.02))
    async with running(spec) as runtime:
        for _ in range(4):
            spec.inbox.tell("x")
            await settle(runtime)
        await anyio.sleep(1.0)
        for _ in range(2):
            spec.inbox.tell("x")
            await settle(runtime)
    first, second, third, pause, again = (later - earlier for earlier, later in pairwise(failed_at))
    assert first > 0.0199
    assert second > 0.0399
    assert third > 0.0799
    assert pause > 0.9
    assert again > 0.0199
    assert not virtual or again == pytest.approx(0.02)


async def test_more_failures_than_the_policy_allows_escalate_and_stop_the_others(running, log):
    diary = Diary()
    spec = worker_spec("a", diary, act=fail_on_bad, restart=RestartPolicy(limit=2, window_s=60, backoff_s=0.01))
    other = worker_spec("b", diary)

    async def fail_three_times() -> None:
        async with running(spec, other) as runtime:
            for _ in range(2):
                spec.inbox.tell("bad")
                await settle(runtime)
            spec.inbox.tell("bad")
            await settle_in_vain(runtime)

    with pytest.raises(ActorEscalatedError, match="actor a failed 3 times in 60 s") as caught:
        await fail_three_times()
    assert isinstance(caught.value.__cause__, ValueError)
    assert [message for message, _ in diary.abandoned] == ["bad", "bad", "bad"]
    assert log.events().count("actor.failed") == 2
    assert other.inbox.is_closed


async def test_messages_queued_behind_an_escalation_are_abandoned_as_stopped(running):
    diary = Diary()

    async def act(worker: Worker, batch: Sequence[Any]) -> None:
        spec.inbox.tell("behind")
        acted.set()
        raise ValueError("no")

    acted = anyio.Event()
    spec = worker_spec("a", diary, act=act, restart=RestartPolicy(limit=0))
    with pytest.raises(ActorEscalatedError):  # noqa: PT012
        async with running(spec):
            spec.inbox.tell("first")
            await acted.wait()  # a stop may not come before the failure
    assert [(message, type(error)) for message, error in diary.abandoned] == [
        ("first", ValueError),
        ("behind", ControllerClosedError),
    ]


async def test_a_cancelled_batch_is_abandoned_as_stopped(log):
    diary = Diary()

    async def act(worker: Worker, batch: Sequence[Any]) -> None:
        await anyio.sleep(1000)

    spec = worker_spec("a", diary, act=act)
    runtime = Runtime([spec], log.logger)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(runtime.run, lambda: None, anyio.Event())
        await anyio.sleep(0.01)
        spec.inbox.tell("in hand")
        await anyio.sleep(0.01)
        spec.inbox.tell("queued")
        tasks.cancel_scope.cancel()
    assert [message for message, _ in diary.abandoned] == ["in hand", "queued"]
    assert all(isinstance(error, ControllerClosedError) for _, error in diary.abandoned)
    assert all("stopped" in str(error) for _, error in diary.abandoned)
    assert runtime.is_quiet()


async def test_an_abandon_that_raises_escalates(running):
    diary = Diary()
    spec = worker_spec("a", diary, act=fail_on_bad)

    def make(children: Any) -> Any:
        worker: Any = spec.make(children)

        def abandon(batch: object, error: object) -> None:
            raise KeyError("lost")

        worker.abandon = abandon
        return worker

    broken = ActorSpec("a", make, spec.inbox)

    async def fail() -> None:
        async with running(broken) as runtime:
            broken.inbox.tell("bad")
            await settle_in_vain(runtime)

    with pytest.raises(ActorEscalatedError, match="failed to abandon 1 messages"):
        await fail()


async def test_a_rebuild_that_fails_counts_as_a_failure(running):
    diary = Diary()
    good = worker_spec("a", diary, act=fail_on_bad)
    made_three_times = anyio.Event()

    def make(children: Any) -> Any:
        worker = good.make(children)
        if diary.made == 2:
            raise OSError("second make")
        if diary.made == 3:
            made_three_times.set()
        return worker

    spec = ActorSpec("a", make, good.inbox)
    async with running(spec) as runtime:
        spec.inbox.tell("bad")
        with anyio.fail_after(30):
            await made_three_times.wait()
        spec.inbox.tell("good")
        await settle(runtime)
        assert runtime.describe()["a"]["restarts"] == 2
    assert diary.made == 3
    assert diary.handled == ["good"]


async def test_an_actor_that_cannot_be_built_at_first_fails_the_start(log):
    diary = Diary()

    def make(children: object) -> Any:
        raise OSError("no device")

    specs = [worker_spec("a", diary), ActorSpec("b", make, worker_spec("b", diary).inbox)]
    started: list[bool] = []
    with pytest.raises(OSError, match="no device"):
        await Runtime(specs, log.logger).run(lambda: started.append(True), anyio.Event())
    assert started == []


def test_the_sole_cause_is_found_in_nested_groups_and_a_real_group_is_kept():
    error = ValueError("x")
    assert sole_cause(ExceptionGroup("a", [ExceptionGroup("b", [error])])) is error
    group = ExceptionGroup("c", [error, KeyError("y")])
    assert sole_cause(ExceptionGroup("d", [group])) is group
