"""A store for tests: any embedded backend on the loop itself, without threads, with latency and faults on order.

It runs under virtual time. Every operation asks the fault plan once, by its kind: `lookup`, `read`, `write` or `clear`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeAlias, TypeVar

import anyio
import anyio.lowlevel
import attrs

from kvcr_actors.errors import ThreadDeadlineError
from kvcr_actors.ports import BatchOutcome, ClearOutcome, Description, HostMemory, PageBatch, Services, StoreTraits
from kvcr_actors.stores.backend import PageBackend
from kvcr_actors.stores.threaded import EMBEDDED, all_failed
from kvcr_actors.testing.faults import Fault, FaultPlan
from kvcr_actors.testing.faulty_backend import FaultyCalls
from kvcr_actors.transfers import Operation
from kvcr_actors.types import PageKey, RequestId

T = TypeVar("T")

Latency: TypeAlias = Callable[[str, int], float]
"""Seconds that an operation of a kind takes for so many pages."""

_Perform: TypeAlias = Callable[[FaultyCalls, Fault | None], T]


@attrs.frozen
class _Job(Generic[T]):
    operation: Operation[T]
    fault: Fault | None
    delay: float
    perform: Callable[[Fault | None], T]
    failed: T
    reads: PageBatch | None
    """The batch whose host slots the operation writes."""
    clears: int
    """How often the store was cleared before."""


def no_latency(kind: str, pages: int) -> float:
    """Every operation takes one turn of the loop."""
    del kind, pages
    return 0.0


class FaultyStore:
    """A `Store` over a `PageBackend` whose operations meet the faults of a plan.

    Operations run side by side, each after its own latency, so that they may finish out of order, as a remote store's
    do. `TRUNCATE` does the first half of a batch. `CORRUPT` damages the first page: a read misses it and drops it, a
    write fails it. `CORRUPT_SILENTLY` reads or writes one wrong byte and says OK; a lookup promises every pool.
    `STALL` waits for `release()`. `LATE` settles as failed after the latency, scribbles over the host slots of a read,
    and does the operation only `late_s` later. A clear takes effect in the turn of the call, and what runs by then
    fails; with `FAIL` it changes nothing.
    """

    def __init__(
        self,
        backend: PageBackend,
        faults: FaultPlan | None = None,
        *,
        latency: Latency = no_latency,
        late_s: float = 1.0,
        traits: StoreTraits = EMBEDDED,
        name: str = "faulty",
    ) -> None:
        self.name = name
        self.traits = traits
        self.faults = FaultPlan() if faults is None else faults
        self.running = 0
        """Operations that may still touch host memory."""
        self._backend = backend
        self._latency = latency
        self._late_s = late_s
        self._services: Services | None = None
        self._calls: FaultyCalls | None = None
        self.hints: dict[RequestId, object] = {}
        """The hints of the requests that are served."""
        self._closed = False
        self._clears = 0
        self._released = anyio.Event()
        self._idle = anyio.Event()

    async def open(self, services: Services, host: HostMemory) -> None:
        """Open the backend and announce what it holds."""
        self._backend.open(host.layout)
        self._services, self._calls = services, FaultyCalls(self._backend, host)
        services.publish(self._backend.take_events())

    def begin_request(self, request_id: RequestId, hints: object) -> None:
        """Keep the hints, so that a test sees them in `hints` as long as the request is served."""
        self.hints[request_id] = hints

    def end_request(self, request_id: RequestId) -> None:
        """Discard the hints."""
        del self.hints[request_id]

    def lookup(self, keys: Sequence[PageKey], request_id: RequestId) -> Operation[tuple[int, ...]]:
        """Answer from the backend's index, or as the fault says."""
        del request_id
        keys = tuple(keys)
        return self._start("lookup", len(keys), lambda calls, fault: calls.lookup(keys, fault), (0,) * len(keys))

    def confirm(self, keys: Sequence[PageKey], request_id: RequestId) -> Operation[bool]:
        """An embedded store promises only what it has (see `testing.confirming`)."""
        del keys, request_id
        return Operation[bool].finished(True)  # noqa: FBT003

    def read(self, batch: PageBatch, request_id: RequestId) -> Operation[BatchOutcome]:
        """Copy pages into host slots, or do to them what the fault says."""
        del request_id
        failed = all_failed(batch, "injected: the read failed")
        return self._start("read", len(batch.keys), lambda calls, fault: calls.read(batch, fault), failed, batch)

    def write(self, batch: PageBatch) -> Operation[BatchOutcome]:
        """Copy pages out of host slots, or do what the fault says."""
        failed = all_failed(batch, "injected: the write failed")
        return self._start("write", len(batch.keys), lambda calls, fault: calls.write(batch, fault), failed)

    def align(self, keys: Sequence[PageKey]) -> None:
        """Make a prefix recent, at once."""
        self._backend.align(keys)

    def clear(self) -> Operation[ClearOutcome]:
        """Forget every page, or fail to."""
        fault, calls, services = self.faults.decide("clear"), self._calls, self._services
        if calls is None or services is None or self._closed:
            return Operation[ClearOutcome].finished(ClearOutcome(error=f"store {self.name} is not open"))
        if fault is Fault.FAIL:
            return Operation[ClearOutcome].finished(ClearOutcome(error="injected: the clear failed"))
        self._clears += 1
        outcome = ClearOutcome(self._backend.clear())
        services.publish(self._backend.take_events())
        delay = self._latency("clear", 0)
        return self._begin(_Job(Operation(), fault, delay, lambda _: outcome, outcome, None, self._clears))

    def contents(self) -> frozenset[PageKey]:
        """The keys held now."""
        return self._backend.contents()

    def release(self) -> None:
        """Let every operation go on that has stalled so far."""
        self._released.set()
        self._released = anyio.Event()

    async def close(self, deadline_s: float) -> None:
        """Wait for running operations, then close the backend; DeadlineError if some do not end."""
        self._closed = True
        with anyio.move_on_after(deadline_s):
            while self.running:
                self._idle = anyio.Event()
                await self._idle.wait()
        if self.running:
            words = f"store {self.name}: {self.running} operations did not end within {deadline_s:g} s"
            raise ThreadDeadlineError(words, ())
        self._backend.close()

    def describe(self) -> Description:
        """The backend's counters, and the faults that fired."""
        fired = {f"{kind}:{fault}": count for (kind, fault), count in self.faults.fired.items()}
        return {"name": self.name, "running": self.running, "fired": fired, **self._backend.counters()}

    def _start(
        self, kind: str, pages: int, perform: _Perform[T], failed: T, reads: PageBatch | None = None
    ) -> Operation[T]:
        fault = self.faults.decide(kind)
        calls, services = self._calls, self._services
        if calls is None or services is None or self._closed:
            return Operation[T].finished(failed)
        delay = self._latency(kind, pages)
        if kind == "lookup" and fault is None and not delay:
            return Operation[T].finished(perform(calls, None))
        return self._begin(_Job(Operation[T](), fault, delay, partial(perform, calls), failed, reads, self._clears))

    def _begin(self, job: _Job[T]) -> Operation[T]:
        calls, services = self._calls, self._services
        if calls is not None and services is not None:
            self.running += 1
            services.spawn(partial(self._run, job, calls, services), f"store-{self.name}")
        return job.operation

    async def _run(self, job: _Job[T], calls: FaultyCalls, services: Services) -> None:
        try:
            await anyio.sleep(job.delay)
            if job.fault is Fault.STALL:
                await self._released.wait()
            if job.fault is Fault.FAIL:
                job.operation.settle(job.failed)
            elif job.fault is Fault.LATE:
                await self._come_late(job, calls, services)
            else:
                outcome = self._performed(job, services)
                if job.fault is not Fault.DROP:
                    job.operation.settle(outcome)
                if job.fault is Fault.DUPLICATE:
                    await anyio.lowlevel.checkpoint()
                    job.operation.settle(outcome)
        finally:
            self.running -= 1
            self._idle.set()

    async def _come_late(self, job: _Job[T], calls: FaultyCalls, services: Services) -> None:
        job.operation.settle(job.failed, quiet=False)
        for _ in range(2):
            await anyio.sleep(self._late_s / 2)
            if job.reads is not None:
                calls.scribble(job.reads)
        self._performed(job, services)
        job.operation.become_quiet()

    def _performed(self, job: _Job[T], services: Services) -> T:
        if job.clears != self._clears:  # what it was to read is gone, and what it was to write must not come
            return job.failed
        outcome = job.perform(job.fault)
        events = self._backend.take_events()
        if events:
            services.publish(events)
        return outcome
