"""Real processes on loopback, kept between tests; the shared store lives in the test's own process."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from datetime import timedelta
from itertools import count
from typing import Any

import pytest
import torch.distributed as dist

from tests.ranks import worker
from tests.ranks.controller_processes import Controllers

_ANSWER_S = 60.0
_groups = count(1)


class Answer:
    """What a worker will say to one command."""

    def __init__(self, process: Worker, number: int) -> None:
        self._process, self._number = process, number

    def result(self) -> Any:
        value, error = self._process.wait_for(self._number)
        if error is not None:
            raise RuntimeError(error)
        return value


class Worker:
    """One rank's process."""

    def __init__(self, port: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._conn, theirs = context.Pipe()
        self._numbers = count(1)
        self._answers: dict[int, tuple[Any, str | None]] = {}
        self.process = context.Process(target=worker.main, args=(theirs, port), daemon=True)
        self.process.start()
        theirs.close()

    def ready(self) -> Worker:
        self.pid, _ = self.wait_for(0)
        return self

    def send(self, command: str, **arguments: Any) -> Answer:
        number = next(self._numbers)
        self._conn.send((number, command, arguments))
        return Answer(self, number)

    def do(self, command: str, **arguments: Any) -> Any:
        return self.send(command, **arguments).result()

    def wait_for(self, number: int) -> tuple[Any, str | None]:
        while number not in self._answers:
            if not self._conn.poll(_ANSWER_S):
                raise TimeoutError(f"no answer from the process {self.process.pid} in {_ANSWER_S:g} s")
            answered, value, error = self._conn.recv()
            self._answers[answered] = (value, error)
        return self._answers.pop(number)

    def wake(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        self.process.kill()
        self.process.join(10)
        self._conn.close()


class Cluster:
    """Workers that stay between tests; dead ones are replaced."""

    def __init__(self) -> None:
        self.store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
        )
        self._workers: list[Worker] = []

    def take(self, size: int) -> list[Worker]:
        self._workers = [one for one in self._workers if one.process.is_alive()]
        while len(self._workers) < size:
            self._workers.append(Worker(self.store.port))
        return [one.ready() if not hasattr(one, "pid") else one for one in self._workers[:size]]

    def end(self) -> None:
        for one in self._workers:
            one.end()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.end()


class Group:
    """The ranks of one test."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.name = f"group-{next(_groups)}"
        self.ranks: list[Worker] = []
        self._options: dict[str, Any] = {}

    def open(self, size: int, deadline_s: float = 5.0, **options: Any) -> list[Worker]:
        self.ranks = self._cluster.take(size)
        self._options = {"group": self.name, "size": size, "deadline_s": deadline_s, **options}
        for answer in [one.send("open", rank=rank, **self._options) for rank, one in enumerate(self.ranks)]:
            answer.result()
        return self.ranks

    def restart(self, rank: int) -> Worker:
        """Start a rank anew, in a process of its own, after the old one died."""
        self.ranks[rank].process.join(10)
        self.ranks[rank] = next(one for one in self._cluster.take(len(self.ranks)) if one not in self.ranks)
        self.ranks[rank].do("open", rank=rank, **self._options)
        return self.ranks[rank]

    def close(self) -> None:
        alive = [one for one in self.ranks if one.process.is_alive()]
        for answer in [one.send("close") for one in alive]:
            answer.result()


@pytest.fixture
def group(cluster: Cluster) -> Iterator[Group]:
    group = Group(cluster)
    yield group
    group.close()


@pytest.fixture(scope="session")
def controllers() -> Iterator[Controllers]:
    """Processes with whole controllers; each must end by itself, and well."""
    controllers = Controllers()
    yield controllers
    statuses = controllers.end()
    assert not any(statuses), f"processes ended with {statuses}"
