"""Real processes with a whole controller each, and what must hold of their reports. The store lives in this process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

import attrs
import torch.distributed as dist

from tests.ranks.lives import Life

Report: TypeAlias = dict[str, Any]

ROOT = Path(__file__).parents[2]
REPORT_S = 120.0
"""A report that takes longer is a hang of the whole process; each wait inside has a shorter deadline."""


class Process:
    """One rank's process: it takes lives and gives reports."""

    def __init__(self, port: int) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `end`
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.ranks.controller_worker", str(port)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._said: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._is_ready = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def is_killed(self) -> bool:
        return self._process.poll() == -signal.SIGKILL

    def start(self, life: Life) -> None:
        if not self._is_ready:
            self._is_ready = self.report() is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(attrs.asdict(life)) + "\n")
        self._process.stdin.flush()

    def report(self) -> Report | None:
        """The next report; None if the process was killed."""
        try:
            said = self._said.get(timeout=REPORT_S)
        except Empty:
            raise AssertionError(f"no report in {REPORT_S:g} s; the process said:\n{self.errors()}") from None
        if said is None and self._process.wait(10) != -signal.SIGKILL:
            raise AssertionError(f"the process ended with {self._process.returncode}:\n{self.errors()}")
        return said

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def errors(self) -> str:
        """The last lines of its standard error."""
        self._errors.seek(0)
        return "".join(self._errors.readlines()[-60:])

    def end(self) -> int:
        """Close its input, and wait for it to end by itself: its exit status."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            status = self._process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()
            status = -signal.SIGKILL
        self._reader.join(10)
        self._process.stdout.close()
        self._errors.close()
        return status

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            if "frozen" in said:
                self._wake_after(said["frozen"])
            else:
                self._said.put(said)
        self._said.put(None)

    def _wake_after(self, seconds: float) -> None:
        pid = self._process.pid
        while os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT | os.WEXITED) is None:
            time.sleep(0.005)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)


class Controllers:
    """Processes that stay between tests; those that were killed are replaced."""

    def __init__(self) -> None:
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
        )
        self._groups = count(1)
        self._processes: list[Process] = []

    def run(self, lives: Sequence[Life], restarts: Mapping[int, Life] | None = None) -> list[Report]:
        """Live each life in a process of its own; the reports of those that came to their end, in the order of ranks.

        A rank that is killed and has a life in `restarts` lives that in a new process.
        """
        group, size = f"group-{next(self._groups)}", len(lives)
        named = [attrs.evolve(life, group=group, rank=rank, size=size) for rank, life in enumerate(lives)]
        processes = self._take(size)
        try:
            for process, life in zip(processes, named, strict=True):
                process.start(life)
            for rank, life in (restarts or {}).items():
                assert processes[rank].report() is None, f"rank {rank} was to be killed"
                processes += self._take(1, besides=processes)
                processes[rank] = processes[-1]
                processes[rank].start(attrs.evolve(life, group=group, rank=rank, size=size))
            reports = [process.report() for process in processes[:size]]
        except BaseException:
            for process in processes:  # no other test may meet one that is still busy with this
                process.kill()
            raise
        self._take(size)  # those that replace killed ones start while the test goes on
        return [report for report in reports if report is not None]

    def end(self) -> list[int]:
        """End all processes; the exit status of each that was not killed."""
        killed = [process.is_killed for process in self._processes]
        statuses = [process.end() for process in self._processes]
        return [status for status, was_killed in zip(statuses, killed, strict=True) if not was_killed]

    def _take(self, number: int, besides: Sequence[Process] = ()) -> list[Process]:
        for process in self._processes:
            if not process.is_alive:
                process.end()
        self._processes = [one for one in self._processes if one.is_alive]
        idle = [one for one in self._processes if one not in besides]
        new = [Process(self._store.port) for _ in range(number - len(idle))]
        self._processes += new
        return [*idle, *new][:number]


def assert_agreed(reports: Sequence[Report]) -> None:
    """Every node and every prefetch ended alike on all ranks that had it."""
    for node in sorted({node for report in reports for node in report["nodes"]}):
        ends = {report["rank"]: report["nodes"].get(node) for report in reports}
        kept = {end == "kept" for end in ends.values() if end is not None}
        assert len(kept) == 1, f"node {node} ended differently: {ends}"
    for request in sorted({request for report in reports for request in report["lengths"]}):
        lengths = {report["rank"]: report["lengths"].get(request) for report in reports}
        # A rank that cancelled it before it was agreed on knows no length.
        agreed = {length for length in lengths.values() if length is not None}
        assert len(agreed) <= 1, f"request {request} has lengths {lengths}"


def assert_nothing_left(reports: Sequence[Report]) -> None:
    """No hang and no broken invariant; no claim, slot, agreement or thread is left on any rank."""
    for report in reports:
        rank = f"rank {report['rank']}"
        assert not report["trouble"], f"{rank}: {report['trouble']}"
        claims = report["claims"]
        assert not claims["open"], f"{rank} has open claims: {claims['open']}"
        assert claims["taken"] == claims["released"], f"{rank}: {claims}"
        assert (claims["refused"], claims["quarantined_bytes"]) == (0, 0), f"{rank}: {claims}"
        assert not any(report["slots_in_use"]), f"{rank} uses slots: {report['slots_in_use']}"
        assert not report["ranks"]["open"], f"{rank} has open agreements"
        assert not report["threads_left"], f"{rank} has threads: {report['threads_left']}"


def assert_off_the_scheduler(reports: Sequence[Report]) -> None:
    """All collectives came from the ranks' own thread, and are those that it counts."""
    for report in reports:
        assert sum(number for _, _, number in report["threads"]) == report["ranks"]["collectives"]
        for name, ident, _ in report["threads"]:
            assert name == f"kvcr-ranks-{report['rank']}", f"rank {report['rank']}: a collective on thread {name}"
            assert ident != report["scheduler"][1]


def assert_constant_collectives(reports: Sequence[Report]) -> None:
    """Two collectives a round, of the same sizes on every rank, whatever is open. For lives without missed rounds."""
    for report in reports:
        ranks = report["ranks"]
        made = f"rank {report['rank']}: {ranks['collectives']} collectives in {ranks['rounds']} rounds"
        assert ranks["collectives"] == 2 * ranks["rounds"] > 0, made
        assert ranks["epoch"] == 0, f"{made}, and one failed"
        calls = {(kind, size): number for kind, size, number in report["collectives"]}
        assert sorted(calls.values()) == [ranks["rounds"]] * 2, f"rank {report['rank']}: {calls} in {ranks}"
        assert calls == {(kind, size): number for kind, size, number in reports[0]["collectives"]}


def assert_sound(reports: Sequence[Report]) -> None:
    """What must hold of every life, whatever went wrong in it."""
    assert_nothing_left(reports)
    assert_off_the_scheduler(reports)
    assert_agreed(reports)
