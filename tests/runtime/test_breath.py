"""Pauses in long loops: their budgets, and that a thread that wants the GIL gets it."""

import sys
import threading
import time
from queue import SimpleQueue

import pytest

from kvcr_actors.runtime.breath import Breath, no_breath


def test_work_between_pauses_is_short_while_the_gil_is_free():
    breath = Breath(work_s=0.1, contended_s=0.5, most_s=2.0)
    assert [breath.budget_after(0.0001) for _ in range(20)] == [0.1] * 20


def test_work_grows_while_the_gil_is_contended_so_that_nobody_starves():
    breath = Breath(work_s=0.1, contended_s=0.5, most_s=2.0)
    budgets = [breath.budget_after(0.005) for _ in range(4 * Breath.PATIENCE)]
    assert budgets == [0.5] * 8 + [1.0] * 8 + [2.0] * 16


def test_one_free_pause_ends_the_growth():
    breath = Breath(work_s=0.1, contended_s=0.5, most_s=2.0)
    for _ in range(Breath.PATIENCE):
        breath.budget_after(0.005)
    assert breath.budget_after(0.0001) == 0.1
    assert breath.budget_after(0.005) == 0.5


@pytest.mark.parametrize(("pause", "runs"), [(Breath(), True), (no_breath, False)], ids=["breath", "without"])
def test_a_thread_that_wants_the_gil_gets_it_only_from_a_loop_that_breathes(pause, runs):
    ran = threading.Event()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(30)
    try:
        go = SimpleQueue()
        thread = threading.Thread(target=lambda: (go.get(), ran.set()))
        thread.start()
        time.sleep(0.05)
        go.put(None)
        end = time.perf_counter() + 0.3
        while time.perf_counter() < end and not ran.is_set():
            pause()
        assert ran.is_set() is runs
    finally:
        sys.setswitchinterval(interval)
    thread.join(10)
