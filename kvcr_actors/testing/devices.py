"""A device for tests: bytes instead of a GPU, copies that take virtual time on the loop, faults on demand."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import attrs

from kvcr_actors.core.copy_plan import CopyPlan, Direction, PoolCopy
from kvcr_actors.errors import ThreadDeadlineError
from kvcr_actors.host_buffers import POISON_BYTE
from kvcr_actors.ports import CopyOutcome, Description, HostMemory, Services
from kvcr_actors.testing.faults import Fault, FaultPlan
from kvcr_actors.transfers import Operation
from kvcr_actors.types import CacheLayout


@attrs.frozen
class _Job:
    plan: CopyPlan
    fences: Sequence[anyio.Event]
    operation: Operation[CopyOutcome]
    fault: Fault | None
    before: anyio.Event | None
    """The end of the copy that was submitted before this one in the same direction."""
    over: anyio.Event


class LoopDevice:
    """The `Device` port over plain bytes (page-first), for one loop and no thread.

    A copy waits for its fence (an `anyio.Event`) and for the copies before it in its direction, takes `latency_s` and
    `seconds_per_byte`, and moves its bytes at the end. `faults` is asked for `to_host` or `to_device` at each submit,
    and for `to_host.NAME` or `to_device.NAME` for each pool, where any fault fails that pool alone, half copied.
    """

    def __init__(
        self,
        layout: CacheLayout,
        pages: int,
        host: HostMemory,
        *,
        latency_s: float = 0.001,
        seconds_per_byte: float = 0.0,
        late_s: float = 1.0,
        faults: FaultPlan | None = None,
    ) -> None:
        self.layout = layout
        self.host = host
        self.submits = 0
        self.faults = FaultPlan() if faults is None else faults
        self._pages = pages
        self._latency_s = latency_s
        self._seconds_per_byte = seconds_per_byte
        self._late_s = late_s
        self._memory = [bytearray(pages * pool.page_bytes) for pool in layout.pools]
        self._last: dict[Direction, anyio.Event] = {}
        self._running: dict[anyio.Event, None] = {}
        """In order of their submission: a simulation must not depend on where an event lies in memory."""
        self._release = anyio.Event()
        self._services: Services | None = None

    def pages_of(self, pool: int) -> int:
        """Pages of one pool: as many as of each other."""
        del pool
        return self._pages

    async def open(self, services: Services) -> None:
        """Start to take submits."""
        self._services = services

    def submit(self, plan: CopyPlan, fences: Sequence[object] = ()) -> Operation[CopyOutcome]:
        """Start one plan behind any number of `anyio.Event`."""
        if self._services is None:
            return _refused(plan, "the device is not open")
        awaited: list[anyio.Event] = []
        for fence in fences:
            if not isinstance(fence, anyio.Event):
                return _refused(plan, f"fence: {fence!r} is not an anyio.Event")
            awaited.append(fence)
        fault = self.faults.decide(plan.direction.value)
        if fault is Fault.FAIL:
            return _refused(plan, "injected: the launch failed")
        self.submits += 1
        job = _Job(plan, awaited, Operation(), fault, self._last.get(plan.direction), anyio.Event())
        self._last[plan.direction] = job.over
        self._running[job.over] = None
        self._services.spawn(lambda: self._run(job), f"loop-device-{plan.direction.value}-{self.submits}")
        return job.operation

    def release(self) -> None:
        """Let the copies that stall begin; later ones stall anew."""
        self._release.set()
        self._release = anyio.Event()

    async def close(self, deadline_s: float) -> None:
        """Wait until no copy touches memory; DeadlineError if one still does."""
        self._services = None
        with anyio.move_on_after(deadline_s):
            for over in tuple(self._running):
                await over.wait()
        if self._running:
            words = f"{len(self._running)} copies still ran {deadline_s} s after the device was closed"
            raise ThreadDeadlineError(words, ())

    def describe(self) -> Description:
        """State for people."""
        return {"device": "loop", "submits": self.submits, "pages": self._pages, "running": len(self._running)}

    def load(self, pool: int, pages: Sequence[int], content: bytes) -> None:
        """Write pages as the engine would; `content` is one page after the other."""
        size = self.layout.pools[pool].page_bytes
        if len(content) != size * len(pages):
            raise ValueError(f"{len(content)} bytes for {len(pages)} pages of {size}")
        for index, page in enumerate(pages):
            self._page(pool, page)[:] = content[index * size : (index + 1) * size]

    def gather(self, pool: int, pages: Sequence[int]) -> bytes:
        """Read pages, one after the other."""
        return b"".join(self._page(pool, page) for page in pages)

    def poison(self, pool: int, pages: Sequence[int]) -> None:
        """Overwrite pages that the engine gave up."""
        self.load(pool, pages, bytes([POISON_BYTE]) * (self.layout.pools[pool].page_bytes * len(pages)))

    async def _run(self, job: _Job) -> None:
        try:
            for fence in job.fences:
                await fence.wait()
            if job.before is not None:
                await job.before.wait()
            if job.fault is Fault.STALL:
                await self._release.wait()
            await anyio.sleep(self._latency_s + self._seconds_per_byte * job.plan.bytes_for(self.layout))
            if job.fault is Fault.LATE:
                job.operation.settle(_all_failed(job.plan, "injected: given up while it ran"), quiet=False)
                await anyio.sleep(self._late_s)
            outcome = self._copy_all(job)
        finally:
            self._running.pop(job.over, None)
            job.over.set()
        if job.fault is not Fault.DROP:
            job.operation.settle(outcome)
        if job.fault is Fault.DUPLICATE:
            job.operation.settle(_all_failed(job.plan, "injected: delivered twice"))

    def _copy_all(self, job: _Job) -> CopyOutcome:
        """Move the bytes of every pool that its fault spares."""
        plan, copied = job.plan, 0
        failed: dict[int, str] = {}
        for copy in plan.pools:
            name = self.layout.pools[copy.pool].name
            fault = self.faults.decide(f"{plan.direction.value}.{name}")
            if job.fault is Fault.TRUNCATE and copy is plan.pools[-1]:
                fault = Fault.TRUNCATE
            whole = len(copy.host_slots)
            try:
                count = self._copy(plan.direction, copy, whole if fault is None else whole // 2)
            except IndexError as error:
                failed[copy.pool] = str(error)
                continue
            if fault is None:
                copied += count
            else:
                failed[copy.pool] = f"injected: {fault.value} of pool {name}"
        if job.fault in (Fault.CORRUPT, Fault.CORRUPT_SILENTLY):
            self._damage(plan)
        if job.fault is Fault.CORRUPT:
            return _all_failed(plan, "injected: bytes damaged")
        return CopyOutcome(copied, failed=failed)

    def _copy(self, direction: Direction, copy: PoolCopy, count: int) -> int:
        for page, slot in zip(copy.device_pages[:count], copy.host_slots[:count], strict=True):
            device, host = self._page(copy.pool, page), self._slot(copy.pool, slot)
            if direction is Direction.TO_HOST:
                host[:] = device
            else:
                device[:] = host
        return count * self.layout.pools[copy.pool].page_bytes

    def _damage(self, plan: CopyPlan) -> None:
        copy = plan.pools[0]
        if plan.direction is Direction.TO_HOST:
            target = self._slot(copy.pool, copy.host_slots[0])
        else:
            target = self._page(copy.pool, copy.device_pages[0])
        target[0] ^= 0xFF

    def _page(self, pool: int, page: int) -> memoryview:
        if not 0 <= page < self._pages:
            raise IndexError(f"pool {self.layout.pools[pool].name}: page {page} of {self._pages}")
        size = self.layout.pools[pool].page_bytes
        return memoryview(self._memory[pool])[page * size : (page + 1) * size]

    def _slot(self, pool: int, slot: int) -> memoryview:
        if not 0 <= slot < self.host.slots:
            raise IndexError(f"pool {self.layout.pools[pool].name}: slot {slot} of {self.host.slots}")
        size = self.layout.pools[pool].page_bytes
        return self.host.buffer(pool)[slot * size : (slot + 1) * size]


def _all_failed(plan: CopyPlan, error: str) -> CopyOutcome:
    return CopyOutcome(0, failed={copy.pool: error for copy in plan.pools})


def _refused(plan: CopyPlan, error: str) -> Operation[CopyOutcome]:
    return Operation[CopyOutcome].finished(attrs.evolve(_all_failed(plan, error), launches=0))
