"""The lock-free hand-offs under every single preemption, and proof that these tests see a lost wake-up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from kvcr_actors.errors import InboxClosedError
from kvcr_actors.runtime.bell import LoopBell
from kvcr_actors.runtime.inbox import Inbox
from kvcr_actors.runtime.outbox import Outbox
from tests.runtime.interleaving import CutIn, each_cut


def on_another_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


# The bell: a poster cut by the loop, and the loop cut by a poster.


class ClearsTooLate(LoopBell):
    """Looks for content first and disarms second: a ring in between is lost."""

    def _on_ring(self) -> None:
        self._run_calls()
        self._armed = False


class StoppedLoop:
    """An asyncio loop that turns only when told, with a bell on it."""

    def __init__(self, bell_type: type[LoopBell]) -> None:
        self.loop = asyncio.new_event_loop()
        self.errors: list[Exception] = []
        self.bell = self.loop.run_until_complete(self._make(bell_type))
        self.ran: list[str] = []

    async def _make(self, bell_type: type[LoopBell]) -> LoopBell:
        return bell_type(self.errors.append, relay=False)

    def turn(self) -> None:
        self.loop.stop()
        self.loop.run_forever()

    def post(self, name: str) -> None:
        self.bell.post(lambda: self.ran.append(name))

    def end(self) -> list[str]:
        for _ in range(3):
            self.turn()
        self.loop.close()
        return self.ran


def loop_cuts_poster(bell_type: type[LoopBell], step: int) -> tuple[CutIn, list[str]]:
    stopped = StoppedLoop(bell_type)
    cut = CutIn(step, stopped.turn)
    stopped.post("before")
    on_another_thread(lambda: cut.during(lambda: stopped.post("cut")))
    return cut, stopped.end()


def poster_cuts_loop(bell_type: type[LoopBell], step: int) -> tuple[CutIn, list[str]]:
    stopped = StoppedLoop(bell_type)
    cut = CutIn(step, lambda: on_another_thread(lambda: stopped.post("cut")))
    stopped.post("before")
    cut.during(stopped.turn)
    cut.now()
    return cut, stopped.end()


def test_a_post_that_the_loop_cuts_anywhere_runs_once_and_in_order():
    def scene(step: int) -> CutIn:
        cut, ran = loop_cuts_poster(LoopBell, step)
        assert ran == ["before", "cut"]
        return cut

    assert each_cut(scene) > 10


def test_a_loop_turn_that_a_post_cuts_anywhere_leaves_the_post_a_wake_up():
    for step in range(120):
        _, ran = poster_cuts_loop(LoopBell, step)
        assert ran == ["before", "cut"]


def test_these_tests_see_a_bell_that_disarms_too_late():
    results = [poster_cuts_loop(ClearsTooLate, step)[1] for step in range(120)]
    assert ["before"] in results


# The inbox: a writer cut by the reader, and the reader cut by a writer.


class CopiesAndClears(Inbox[str]):
    """What another thread appends between the copy and the clear is lost."""

    def _pop_all(self) -> list[str]:
        batch = list(self._messages)
        self._messages.clear()
        return batch


def writer_cuts_reader(inbox_type: type[Inbox[str]], step: int) -> tuple[CutIn, list[str]]:
    inbox = inbox_type("test", 10)
    inbox.post("before")
    taken: list[str] = []
    cut = CutIn(step, lambda: inbox.post("cut"))
    cut.during(lambda: taken.extend(inbox.take_now()))
    return cut, taken + inbox.take_now()


def test_a_take_that_a_post_cuts_anywhere_loses_nothing():
    def scene(step: int) -> CutIn:
        cut, taken = writer_cuts_reader(Inbox, step)
        assert taken == ["before", "cut"][: 1 + cut.reached]
        return cut

    assert each_cut(scene) > 10


def test_these_tests_see_an_inbox_that_copies_and_clears():
    assert ["before"] in [writer_cuts_reader(CopiesAndClears, step)[1] for step in range(30)]


def test_a_post_that_a_close_cuts_anywhere_is_either_taken_or_refused():
    outcomes: set[str] = set()

    def scene(step: int) -> CutIn:
        inbox: Inbox[str] = Inbox("test", 10)
        taken: list[str] = []

        def close_and_end() -> None:
            inbox.close()
            taken.extend(inbox.take_now())

        def post() -> None:
            try:
                inbox.post("cut")
            except InboxClosedError:
                outcomes.add("refused")
                assert taken == []
            else:
                outcomes.add("taken")
                cut.now()
                assert taken == ["cut"]

        cut = CutIn(step, close_and_end)
        cut.during(post)
        assert len(inbox) == 0
        return cut

    assert each_cut(scene) > 10
    assert outcomes == {"refused", "taken"}


# The outbox: a waiter cut by a delivery, and a delivery cut by a waiter.


class WouldBlock(BaseException):
    """The waiter blocks here; it goes on when it is woken."""


class Doorbell:
    """A queue whose `get` delivers first if nobody did, and then must find a token."""

    def __init__(self, before_blocking: Callable[[], None]) -> None:
        self.tokens: SimpleQueue[None] = SimpleQueue()
        self._before_blocking = before_blocking

    def put(self, token: None) -> None:
        self.tokens.put(token)

    def get(self, timeout: float) -> None:
        self._before_blocking()
        try:
            return self.tokens.get_nowait()
        except Empty:
            raise WouldBlock from None


class LooksFirst(Outbox[str]):
    """Looks for content first and announces itself second: a delivery in between wakes nobody."""

    def wait(self, timeout_s: float) -> bool:
        if not self._messages:
            self._waited_for = True
            self._doorbell.get(timeout=timeout_s)
            self._waited_for = False
        return bool(self._messages)


def delivery_cuts_waiter(outbox_type: type[Outbox[str]], step: int) -> tuple[CutIn, str]:
    outbox: Any = outbox_type()
    outbox._doorbell = Doorbell(lambda: cut.now())
    cut = CutIn(step, lambda: outbox.deliver(["cut"]))
    try:
        cut.during(lambda: outbox.wait(60.0))
    except WouldBlock:
        return cut, "blocked for ever"
    return cut, "woken"


def test_a_wait_that_a_delivery_cuts_anywhere_is_woken():
    for step in range(80):
        assert delivery_cuts_waiter(Outbox, step)[1] == "woken"


def test_these_tests_see_a_waiter_that_looks_first():
    assert "blocked for ever" in {delivery_cuts_waiter(LooksFirst, step)[1] for step in range(80)}


def test_a_delivery_that_a_waiter_cuts_anywhere_wakes_it():
    states: set[str] = set()

    def scene(step: int) -> CutIn:
        outbox: Any = Outbox()
        outbox._doorbell = Doorbell(lambda: None)
        waiter = {"state": "not yet"}

        def wait() -> None:
            try:
                assert outbox.wait(60.0)
                waiter["state"] = "woken"
            except WouldBlock:
                waiter["state"] = "blocked"

        cut = CutIn(step, wait)
        cut.during(lambda: outbox.deliver(["cut"]))
        states.add(waiter["state"])
        assert waiter["state"] != "blocked" or outbox._doorbell.tokens.qsize() == 1
        return cut

    assert each_cut(scene) > 5
    assert {"blocked", "woken"} <= states


def test_a_stale_token_neither_ends_a_wait_nor_hides_a_delivery():
    outbox: Any = Outbox()
    outbox._doorbell.put(None)
    assert outbox.wait(0.01) is False
    outbox._doorbell.put(None)
    thread = threading.Timer(0.01, lambda: outbox.deliver(["late"]))
    thread.start()
    assert outbox.wait(30.0) is True
    thread.join()


def test_the_cut_is_made_at_every_step_once():
    cuts: list[int] = []

    def scene(step: int) -> CutIn:
        cut = CutIn(step, lambda: cuts.append(step))
        cut.during(lambda: sum((1, 2)))
        return cut

    assert each_cut(scene) == len(cuts) > 2
