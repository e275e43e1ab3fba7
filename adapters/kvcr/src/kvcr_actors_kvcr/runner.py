"""The one thread that owns the runner: it makes every call, polls also when idle, and keeps what is not quiet."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic
from traceback import format_exception
from typing import Any, TypeVar

import anyio
import attrs
import structlog
from kvcr import KVCR
from kvcr.types import OpHandle, TransferError

from kvcr_actors import DeadlineError, KvcrActorsError, StoreError
from kvcr_actors.ports import Operation, Services
from kvcr_actors_kvcr.jobs import Entries, Job
from kvcr_actors_kvcr.quarantine import Quarantine
from kvcr_actors_kvcr.settling import Settler

log = structlog.get_logger()

T = TypeVar("T")

_BUSY_POLL_S = 0.0002
_MOST_RUNNING = 32
"""Jobs that run at a time: the runner's deadlines count from its calls, so what waits must wait here."""

LEFT_MAPPED: list[object] = []
"""Everything whose memory native code may still use when its runner did not close; kept until the process ends."""


@attrs.define
class RunnerCounters:
    """What the owner thread saw."""

    polls: int = 0
    operations: int = 0
    failed_operations: int = 0
    uncertain: int = 0
    quiesced: int = 0
    late_settled: int = 0
    close_errors: int = 0


@attrs.frozen
class RunnerLimits:
    """The times, in seconds, that the thread goes by."""

    idle_poll_s: float
    operation_s: float
    close_s: float


class Runner:
    """Starts the runner on its thread, runs jobs on it, closes it. `open`, `submit`, `post`, `close` are the loop's.

    What it is given is called on the thread: `start` makes the runner, `stop` frees its memory once it is closed and
    quiet, `unanswered` hears of a peer that a job waits for no longer.
    """

    def __init__(
        self,
        services: Services,
        limits: RunnerLimits,
        *,
        start: Callable[[], KVCR],
        stop: Callable[[], None],
        publish: Callable[[], None],
        unanswered: Callable[[str], None],
        keep: object,
    ) -> None:
        self.counters = RunnerCounters()
        self.stalled: str | None = None
        """Why sources refuse to write, or local copies cannot be trusted, until a restart."""
        self.retired = False
        self._settler = Settler(services)
        self._limits = limits
        self._start = start
        self._stop = stop
        self._publish = publish
        self._unanswered = unanswered
        self._keep = keep
        self._kvcr: KVCR | None = None
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._waiting: deque[Job[Any]] = deque()
        self._running: dict[OpHandle, Job[Any]] = {}
        self._quarantine = Quarantine(lambda job: self._settle(job, job.on_error, quiet=True))
        self._accepting = True
        self._close_by: float | None = None
        self._opened: Operation[Exception | None] = Operation()
        self._ended: Operation[Exception | None] = Operation()
        self._thread = threading.Thread(target=self._work, name="store-kvcr", daemon=True)

    @property
    def kvcr(self) -> KVCR:
        """The runner; for jobs, on the thread."""
        if self._kvcr is None:
            raise StoreError("store kvcr is not open")
        return self._kvcr

    @property
    def serves(self) -> bool:
        """Whether it takes jobs and its bytes can be trusted."""
        return self._accepting and not self.retired

    @property
    def unquiet_bytes(self) -> int:
        """Host memory that nobody waits for any more and that native code may still touch; from any thread."""
        running = list(self._running.values())
        late = sum(job.waits.size for job in running if job.settled and job.waits is not None)
        return self._quarantine.bytes + late

    async def open(self) -> None:
        """Start the thread and the runner; raises why it did not start."""
        self._thread.start()
        error = await self._opened.outcome()
        if error is not None:
            raise error

    def submit(self, job: Job[T]) -> Operation[T]:
        """Run a job on the thread; after `close` it ends at once as its `on_error`."""
        if self._accepting:
            self._calls.put(partial(self._waiting.append, job))
        if not self._accepting:  # asked after the put: a thread that fails meanwhile may not have seen it
            job.operation.settle(job.on_error)
        return job.operation

    def post(self, call: Callable[[], None]) -> None:
        """Run a short call on the thread, in order; dropped after `close`."""
        if self._accepting:
            self._calls.put(call)

    async def close(self, deadline_s: float) -> None:
        """Refuse new jobs, drain, close the runner. DeadlineError: not quiet; its memory stays mapped."""
        if self._accepting:
            self._accepting = False
            self._calls.put(partial(self._begin_close, deadline_s))
        with anyio.move_on_after(deadline_s + self._limits.close_s):
            error = await self._ended.outcome()
            if error is not None:
                raise error
            return
        LEFT_MAPPED.append((self, self._keep))
        raise DeadlineError(f"store kvcr did not close within {deadline_s + self._limits.close_s:g} s")

    def _begin_close(self, deadline_s: float) -> None:
        self._close_by = monotonic() + deadline_s

    # On the thread.

    def _work(self) -> None:
        try:
            self._kvcr = self._start()
        except BaseException as fault:  # noqa: BLE001 - told to whoever opens the store
            LEFT_MAPPED.append(self._keep)
            wrapped = (
                fault if isinstance(fault, KvcrActorsError) else StoreError(f"store kvcr did not start: {_told(fault)}")
            )
            wrapped.__cause__ = fault if wrapped is not fault else None
            self._accepting = False
            self._settler.settle(self._opened, wrapped)
            self._settler.settle(self._ended, None)
            return
        self._settler.settle(self._opened, None)
        error: Exception | None = None
        try:
            while not self._is_drained():
                self._turn()
        except BaseException as fault:  # noqa: BLE001 - whoever closes the store waits for this thread
            log.error("kvcr.owner_thread_failed", traceback="".join(format_exception(fault)))
            error = StoreError(f"store kvcr failed: {_told(fault)}")
        self._accepting = False
        self._finish(error)

    def _is_drained(self) -> bool:
        if self._close_by is None:
            return False
        return not (self._running or self._waiting) or monotonic() > self._close_by

    def _turn(self) -> None:
        self._take_calls(_BUSY_POLL_S if self._running else self._limits.idle_poll_s)
        while self._waiting and len(self._running) < _MOST_RUNNING:
            self._step(self._waiting.popleft(), None)
        self._poll()
        self._settle_late()
        self._publish()

    def _take_calls(self, timeout_s: float | None = None) -> None:
        """Run what the loop handed over; wait for a first call if a time is given."""
        with suppress(Empty):
            call = self._calls.get(timeout=timeout_s) if timeout_s is not None else self._calls.get_nowait()
            while True:
                call()
                call = self._calls.get_nowait()

    def _poll(self) -> None:
        self.counters.polls += 1
        while completed := list(self.kvcr.poll_completed()):
            for handle, entries in completed:
                job = self._running.pop(handle, None)
                if job is not None:
                    self._note_end(job, entries)
                    self._step(job, entries)

    def _note_end(self, job: Job[Any], entries: Entries) -> None:
        """Keep the memory of an operation that failed without being refused: native code may still touch it."""
        wait = job.waits
        assert wait is not None  # noqa: S101 - a running job waits
        if all(entry.success for entry in entries.values()):
            return
        self.counters.failed_operations += 1
        overran = monotonic() - job.waits_since >= self._limits.operation_s
        overran = overran and not wait.peer and wait.size > 0
        if overran or self._quarantine.is_doubted(wait.handle):
            self._quarantine.keep(wait, job)
        if overran:
            self._retire(f"a local copy overran its {self._limits.operation_s:g} s")

    def _retire(self, why: str) -> None:
        if not self.retired:
            self.retired, self.stalled = True, why
            log.error("kvcr.retired", reason=why, act="restart the process: pages of this store can not be trusted")

    def _step(self, job: Job[Any], entries: Entries | None) -> None:
        try:
            wait = next(job.steps) if entries is None else job.steps.send(entries)
        except StopIteration as stop:
            self._finish_job(job, stop.value)
        except BaseException as error:  # noqa: BLE001 - one job's fault ends that job
            log.error("kvcr.job_failed", job=job.name, error=repr(error))
            self._finish_job(job, job.on_error)
        else:
            self.counters.operations += 1
            job.waits, job.waits_since = wait, monotonic()
            self._running[wait.handle] = job

    def _finish_job(self, job: Job[Any], outcome: Any) -> None:
        job.over, job.waits = True, None
        self._publish()  # events go before the outcome that follows from them
        self._settle(job, outcome, quiet=not job.hazards)

    def _settle_late(self) -> None:
        now = monotonic()
        for job in self._running.values():
            if job.settle_at is not None and now >= job.settle_at and not job.settled:
                self.counters.late_settled += 1
                peer, seconds = job.waits.peer if job.waits else "", now - job.waits_since
                log.warning("kvcr.late", job=job.name, peer=peer, seconds=round(seconds, 3))
                if peer and seconds >= self._limits.operation_s / 2:
                    self._unanswered(peer)  # before its own deadline: others need not wait for the same peer
                self._settle(job, job.late, quiet=False)

    def _settle(self, job: Job[Any], outcome: Any, *, quiet: bool) -> None:
        job.settled = True
        self._settler.settle(job.operation, outcome, quiet=quiet)

    def notice(self, error: Exception) -> None:
        """The runner's resilience events; called inside its polls, before the completions that they explain."""
        if not isinstance(error, TransferError):
            self.stalled = str(error)
            log.error("kvcr.stalled", error=str(error), act="restart the process: peers are refused until then")
        elif error.source_blocks is not None:
            log.warning("kvcr.source_transfer", state=error.state, operation=error.op_handle)
        elif error.state == "uncertain":
            self.counters.uncertain += 1
            self._quarantine.doubt(error.op_handle)
            log.error("kvcr.uncertain", operation=error.op_handle)
        else:
            self.counters.quiesced += 1
            self._quarantine.end(error.op_handle)

    def _finish(self, error: Exception | None) -> None:
        """Close the runner in order: nothing new, jobs drained, close, one more poll, then fail what is left."""
        self._take_calls()
        kvcr, quiet = self.kvcr, False
        try:
            kvcr.close()
            list(kvcr.poll_completed())
        except BaseException as fault:  # noqa: BLE001 - the runner is foreign code; its memory is kept
            self.counters.close_errors += 1
            LEFT_MAPPED.append((self, self._keep))
            unquiet = DeadlineError(
                f"store kvcr: the runner is not quiet after its close, so its buffers stay mapped: {_told(fault)}"
            )
            unquiet.__cause__, error = error, unquiet
        else:
            quiet = True
            self._quarantine.end_all()
            self._stop()
        for job in [*self._running.values(), *self._waiting]:
            job.steps.close()
            self._settle(job, job.on_error, quiet=quiet or job.waits is None)
        self._running.clear()
        self._waiting.clear()
        self._publish()
        self._settler.settle(self._ended, error)


def _told(error: BaseException) -> str:
    """An error's words; with its kind where it is none that a library should raise, or says nothing."""
    return (str(error) if isinstance(error, Exception) else "") or repr(error)
