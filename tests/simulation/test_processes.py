"""Seeds in several processes: results in order, and no process left, whatever ends the work."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import closing, suppress
from functools import partial
from multiprocessing import active_children

import pytest

from kvcr_actors.simulation.processes import WorkerLostError, in_processes

FOREVER_S = 10_000


def slow_at_first(item: int) -> int:
    time.sleep(0.0 if item else 0.5)
    return item


def stuck_from(first: int, item: int) -> int:
    time.sleep(FOREVER_S if item >= first else 0.0)
    return item


def test_results_come_in_the_order_of_the_items_whoever_is_done_first() -> None:
    assert list(in_processes(slow_at_first, range(7, -1, -1), 3)) == list(range(7, -1, -1))
    assert list(in_processes(slow_at_first, range(2), 8)) == [0, 1]
    assert active_children() == []


def test_who_stops_in_the_middle_leaves_no_process_though_all_are_at_work() -> None:
    with closing(in_processes(partial(stuck_from, 3), range(9), 2)) as results:
        assert [next(results) for _ in range(3)] == [0, 1, 2]
        assert len(active_children()) == 2
    assert active_children() == []


def test_the_signal_of_a_terminal_reaches_no_process_from_its_first_moment_on() -> None:
    over = threading.Event()

    def interrupt_all() -> None:
        while not over.wait(0.01):
            for process in active_children():
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(process.pid or 0, signal.SIGINT)

    terminal = threading.Thread(target=interrupt_all)
    terminal.start()
    try:
        assert list(in_processes(slow_at_first, range(4), 2)) == list(range(4))
    finally:
        over.set()
        terminal.join()


def test_a_process_that_dies_is_told_with_its_item_and_status_and_the_others_go() -> None:
    with pytest.raises(WorkerLostError, match=r"seed 7: its process ended with status 7; .* fewer --jobs"):
        list(in_processes(os._exit, [7, 7], 2))
    assert active_children() == []
