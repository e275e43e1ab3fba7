"""The owner thread: order, outcomes, failures, one wake-up for many outcomes, and its end."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import anyio
import pytest

from kvcr_actors.errors import ControllerClosedError, DeadlineError
from kvcr_actors.runtime.bell import LoopBell
from kvcr_actors.runtime.owner_thread import OwnerThread, close_threads

pytestmark = [pytest.mark.anyio, pytest.mark.real_clock]

WAIT_S = 30


class BellServices:
    """Services on a real bell; counts what is posted."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self.posts = 0
        self.bell = LoopBell(self.errors.append)

    def post(self, call: Callable[[], None]) -> None:
        self.posts += 1
        self.bell.post(call)

    def spawn(self, task: object, name: str) -> None:
        raise AssertionError("not used")

    def publish(self, events: object) -> None:
        raise AssertionError("not used")


@pytest.fixture
async def services():
    services = BellServices()
    yield services
    services.bell.close()


def to_text(error: Exception) -> str:
    return f"failed: {error}"


async def test_calls_run_in_order_on_the_one_thread_and_their_outcomes_come_to_the_loop(services):
    owner = OwnerThread("test-owner", services)
    ran: list[int] = []

    def call(number: int) -> str:
        ran.append(number)
        return threading.current_thread().name

    operations = [owner.submit(lambda number=number: call(number), to_text) for number in range(20)]
    owner.post(lambda: ran.append(20))
    with anyio.fail_after(WAIT_S):
        names = {await operation.outcome() for operation in operations}
        await owner.close(WAIT_S)
    assert names == {"test-owner"}
    assert ran == list(range(21))
    assert owner.depth == 0


async def test_an_exception_becomes_the_outcome_that_on_error_gives(services):
    owner = OwnerThread("test-owner", services)

    def fail() -> str:
        raise OSError("disk")

    with anyio.fail_after(WAIT_S):
        assert await owner.submit(fail, to_text).outcome() == "failed: disk"
        assert await owner.submit(lambda: "fine", to_text).outcome() == "fine"
        await owner.close(WAIT_S)
    assert services.errors == []


async def test_an_exception_of_a_posted_call_reaches_the_handler_and_the_thread_goes_on(services):
    owner = OwnerThread("test-owner", services)

    def fail() -> None:
        raise OSError("disk")

    owner.post(fail)
    with anyio.fail_after(WAIT_S):
        assert await owner.submit(lambda: "fine", to_text).outcome() == "fine"
        await owner.close(WAIT_S)
    assert [repr(error) for error in services.errors] == ["OSError('disk')"]


async def test_what_a_call_posts_is_seen_before_its_outcome(services):
    owner = OwnerThread("test-owner", services)
    seen: list[str] = []
    done = threading.Event()

    def call(name: str) -> str:
        services.post(lambda: seen.append(f"{name} posted"))
        return name

    operations = [owner.submit(lambda name=str(i): call(name), to_text) for i in range(50)]
    for name, operation in enumerate(operations):
        operation.when_quiet(lambda name=name: seen.append(f"{name} settled"))
    owner.post(done.set)
    assert done.wait(WAIT_S)
    with anyio.fail_after(WAIT_S):
        await operations[-1].outcome()
        await owner.close(WAIT_S)
    assert seen == [f"{name} {what}" for name in range(50) for what in ("posted", "settled")]


async def test_close_lets_accepted_calls_run_and_ends_the_thread(services):
    before = set(threading.enumerate())
    owner = OwnerThread("test-owner", services)
    gate = threading.Event()
    first = owner.submit(lambda: str(gate.wait(WAIT_S)), to_text)
    second = owner.submit(lambda: "second", to_text)
    assert owner.depth == 2
    gate.set()
    with anyio.fail_after(WAIT_S):
        await owner.close(WAIT_S)
        assert await first.outcome() == "True"
        assert await second.outcome() == "second"
        await owner.close(WAIT_S)
    assert set(threading.enumerate()) <= before


async def test_a_submit_after_close_ends_at_once_as_closed(services):
    owner = OwnerThread("test-owner", services)
    seen: list[Exception] = []
    await owner.close(WAIT_S)
    operation = owner.submit(lambda: "x", lambda error: seen.append(error) or "closed")
    owner.post(lambda: seen.append(AssertionError("ran")))
    assert operation.is_settled
    assert operation.is_quiet
    assert isinstance(seen[0], ControllerClosedError)
    assert len(seen) == 1


async def test_a_call_that_hangs_past_the_deadline_is_named_and_what_waits_behind_it_ends(services):
    owner = OwnerThread("test-owner", services)
    entered, gate = threading.Event(), threading.Event()

    def hang() -> str:
        entered.set()
        return str(gate.wait(WAIT_S))

    hanging = owner.submit(hang, to_text)
    behind = owner.submit(lambda: "never", to_text)
    assert entered.wait(WAIT_S)
    with pytest.raises(DeadlineError, match="test-owner: a call did not end"):
        await owner.close(0.02)
    assert not hanging.is_settled
    assert not hanging.is_quiet
    with anyio.fail_after(WAIT_S):
        assert "did not end" in await behind.outcome()
    assert owner.depth == 1
    gate.set()
    with anyio.fail_after(WAIT_S):
        await owner.close(WAIT_S)
        assert await hanging.outcome() == "True"


async def test_what_was_posted_behind_a_call_that_hangs_past_the_deadline_still_runs(services):
    owner = OwnerThread("test-owner", services)
    gate, ran = threading.Event(), []
    owner.submit(lambda: str(gate.wait(WAIT_S)), to_text)
    owner.post(lambda: ran.append(1))
    behind = owner.submit(lambda: "never", to_text)
    owner.post(lambda: ran.append(2))
    for _ in range(2):
        with pytest.raises(DeadlineError):
            await owner.close(0.02)
    assert behind.is_settled
    gate.set()
    with anyio.fail_after(WAIT_S):
        await owner.close(WAIT_S)
    assert ran == [1, 2]
    assert owner.depth == 0


async def test_threads_that_close_together_each_have_the_whole_time_and_only_the_late_are_named(services):
    gate = threading.Event()
    owners = [OwnerThread(f"test-owner-{number}", services) for number in range(3)]
    for number in (0, 2):
        owners[number].submit(lambda: str(gate.wait(WAIT_S)), to_text)
    with pytest.raises(DeadlineError) as late:
        await close_threads(owners, 0.2)
    named = [name for name in ("test-owner-0", "test-owner-1", "test-owner-2") if name in str(late.value)]
    assert named == ["test-owner-0", "test-owner-2"]
    gate.set()
    with anyio.fail_after(WAIT_S):
        await close_threads(owners, WAIT_S)
        await close_threads(owners, 0)  # all are over: no time is needed


async def test_threads_close_at_once_so_that_one_may_wait_for_another(services):
    owners = [OwnerThread(f"test-owner-{number}", services) for number in range(2)]
    (last,) = (thread for thread in threading.enumerate() if thread.name == "test-owner-1")
    operation = owners[0].submit(lambda: last.join(2) or str(last.is_alive()), to_text)
    await close_threads(owners, WAIT_S)
    assert await operation.outcome() == "False"


async def test_an_idle_thread_keeps_nothing_of_its_last_call(services):
    class Buffer:
        pass

    owner = OwnerThread("test-owner", services)
    buffer, freed = Buffer(), threading.Event()
    reference = weakref.ref(buffer, lambda _: freed.set())

    def use(buffer: Buffer = buffer) -> str:
        return type(buffer).__name__

    with anyio.fail_after(WAIT_S):
        await owner.submit(use, to_text).outcome()
    del use, buffer
    gc.collect()
    assert freed.wait(10)
    assert reference() is None
    await owner.close(WAIT_S)
