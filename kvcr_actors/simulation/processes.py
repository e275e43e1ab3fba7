"""Work shared among processes that are gone when the caller stops, also in the middle of an item."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, Final, Generic, TypeVar, cast

from kvcr_actors.errors import KvcrActorsError

R = TypeVar("R")

_ENDING: Final = (signal.SIGINT, signal.SIGTERM)
_KILLED_S: Final = 5.0


class WorkerLostError(KvcrActorsError):
    """A process ended in the middle of its work: killed, or out of memory. Run it again with fewer processes."""


def in_processes(work: Callable[[int], R], items: Sequence[int], jobs: int) -> Generator[R]:
    """Give the result for each item, in order, while up to `jobs` processes work ahead.

    `work` and its results must be picklable. Close the generator to stop: what runs is killed. A signal that ends the
    program is for the caller alone, who may be at a terminal that sends it to all.
    """
    workers: list[_Worker[R]] = []
    try:
        _start(workers, work, min(jobs, len(items)))
        waiting = iter(range(len(items)))
        places: dict[Connection, tuple[_Worker[R], int]] = {}
        for worker, place in zip(workers, waiting, strict=False):
            places[worker.give(items[place])] = worker, place
        done: dict[int, R] = {}
        for wanted in range(len(items)):
            while wanted not in done:
                for ready in wait(list(places)):
                    worker, place = places.pop(cast("Connection", ready))
                    done[place] = worker.take(items[place])
                    following = next(waiting, None)
                    if following is not None:
                        places[worker.give(items[following])] = worker, following
            yield done.pop(wanted)
    finally:
        with _signals_wait():
            for worker in workers:
                worker.end()


class _Worker(Generic[R]):
    """One process and the pipe to it; it has one item at a time."""

    def __init__(self, work: Callable[[int], R]) -> None:
        # Spawned, not forked: a child must not share the threads and loops of a parent that is embedded somewhere.
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(work, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def give(self, item: int) -> Connection:
        """Start an item, and give what becomes readable when it is done."""
        try:
            self._pipe.send(item)
        except OSError:
            raise self._lost(item) from None
        return self._pipe

    def take(self, item: int) -> R:
        """Take the result of an item that is done."""
        try:
            return cast("R", self._pipe.recv())
        except (EOFError, OSError):
            raise self._lost(item) from None

    def end(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.join(_KILLED_S)
        self._pipe.close()

    def _lost(self, item: int) -> WorkerLostError:
        self._process.join(_KILLED_S)
        return WorkerLostError(
            f"seed {item}: its process ended with status {self._process.exitcode}; if memory ran out, give fewer --jobs"
        )


def _start(workers: list[_Worker[R]], work: Callable[[int], R], count: int) -> None:
    """Start processes that no signal of the terminal reaches, not even while they import."""
    resource_tracker.ensure_running()  # it lets signals through when it starts
    for _ in range(count):
        with _signals_wait():
            workers.append(_Worker(work))


@contextmanager
def _signals_wait() -> Generator[None]:
    """Hold back, in this thread and in processes that it starts, the signals that end a program."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(work: Callable[[int], Any], pipe: Connection) -> None:
    """The life of a worker: it ends when the other side of the pipe is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    with suppress(EOFError, ConnectionError):
        while True:
            pipe.send(work(pipe.recv()))
