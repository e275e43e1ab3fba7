"""A device without a GPU: real page pools in memory, copied by a thread a direction, along the path that CUDA takes."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import attrs
import torch

from kvcr_actors.core.copy_plan import CopyPlan, Direction, PoolCopy
from kvcr_actors.devices.host_memory import POISON_BYTE, HostPools
from kvcr_actors.devices.pairs import Pairs, check_pairs, is_one_run, word_type
from kvcr_actors.errors import ConfigError, DeadlineError, DeviceError
from kvcr_actors.ports import CopyOutcome, Description, Services
from kvcr_actors.runtime.operation import Operation
from kvcr_actors.runtime.owner_thread import OwnerThread, close_threads
from kvcr_actors.types import CacheLayout


class CpuFence:
    """Stands for the kernel that writes pages, or still reads them: `set` when it is over, from any thread, once."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        """Let the copies behind the fence begin."""
        self._event.set()

    def wait(self, deadline_s: float) -> None:
        """Block until `set`; DeadlineError past the deadline. The copy thread calls it, nobody else needs to."""
        if not self._event.wait(deadline_s):
            raise DeadlineError(f"the fence was not set within {deadline_s} s; nothing was copied")


@attrs.frozen
class _PoolViews:
    """One pool as the copy threads see it: device [pages, planes, words] and host [slots, planes, words]."""

    device: torch.Tensor
    host: torch.Tensor
    page_bytes: int
    staging_pages: int


class CpuDevice:
    """The `Device` port over pools of `pages` pages (a number, or one a pool), layer-first like an engine's.

    Plans of one direction run in order on a thread of their own, so that a backup whose fence is not set holds up no
    restore: each pool's pages are gathered by one index operation a slice, in slices of at most `staging_bytes` where
    host slots are scattered. A pool that fails leaves the others unharmed. Copies behind a fence that is not set within
    `fence_deadline_s` fail as a whole.
    """

    def __init__(
        self,
        layout: CacheLayout,
        pages: int | Sequence[int],
        host: HostPools,
        *,
        staging_bytes: int = 16 << 20,
        fence_deadline_s: float = 30.0,
    ) -> None:
        counts = [pages] * len(layout.pools) if isinstance(pages, int) else list(pages)
        if len(counts) != len(layout.pools) or min(counts) < 1:
            raise ConfigError(f"pages: {pages}; give one positive number, or one for each of {len(layout.pools)} pools")
        if host.layout != layout:
            raise ConfigError("the host pools were made for another layout than the device")
        self.layout = layout
        self.host = host
        self.submits = 0
        self.backup_submits = 0
        self._fence_deadline_s = fence_deadline_s
        self._pools = [
            torch.zeros((pool.planes, count, pool.plane_bytes), dtype=torch.uint8)
            for pool, count in zip(layout.pools, counts, strict=True)
        ]
        size = max(staging_bytes, *(pool.page_bytes for pool in layout.pools))
        self._staging = {direction: torch.empty(size, dtype=torch.uint8) for direction in Direction}
        self._views = [self._make_views(pool, size) for pool in range(len(layout.pools))]
        self._threads: dict[Direction, OwnerThread] = {}
        self._closing: tuple[OwnerThread, ...] = ()

    async def open(self, services: Services) -> None:
        """Start the copy threads."""
        self._threads = {way: OwnerThread(f"kvcr-cpu-{way.value}", services) for way in Direction}

    def submit(self, plan: CopyPlan, fence: object | None) -> Operation[CopyOutcome]:
        """Queue one plan behind a `CpuFence` or none; its direction's thread waits for the fence, not the caller."""
        if fence is not None and not isinstance(fence, CpuFence):
            return Operation[CopyOutcome].finished(
                _all_failed(plan, f"fence: a CpuFence or None, not {type(fence).__name__}")
            )
        thread = self._threads.get(plan.direction)
        if thread is None:
            return Operation[CopyOutcome].finished(_all_failed(plan, "the device is not open"))
        self.submits += 1
        self.backup_submits += plan.direction is Direction.TO_HOST
        return thread.submit(
            lambda: self._run(plan, fence), lambda error: _all_failed(plan, f"the copy thread failed: {error!r}")
        )

    async def close(self, deadline_s: float) -> None:
        """Let queued copies end and stop the threads; DeadlineError if they do not end in time.

        A further `close` waits again.
        """
        threads, self._threads = self._threads, {}
        self._closing += tuple(threads.values())
        await close_threads(self._closing, deadline_s)
        self._closing = ()

    def describe(self) -> Description:
        """State for people."""
        pools = {spec.name: pool.shape[1] for spec, pool in zip(self.layout.pools, self._pools, strict=True)}
        return {"device": "cpu", "submits": self.submits, "pages": pools, "open": bool(self._threads)}

    def pool_view(self, pool: int) -> torch.Tensor:
        """The pool as the engine owns it: uint8 [planes, pages, plane_bytes]."""
        return self._pools[pool]

    def load(self, pool: int, pages: Sequence[int], content: torch.Tensor) -> None:
        """Write pages as the engine would: `content` is uint8 [n, page_bytes], a page's planes one after the other."""
        view = self._views[pool]
        index = torch.tensor(pages, dtype=torch.int64)
        view.device.index_copy_(0, index, content.view(view.device.dtype).view(len(pages), *view.device.shape[1:]))

    def gather(self, pool: int, pages: Sequence[int]) -> torch.Tensor:
        """Read pages as uint8 [n, page_bytes], a copy."""
        rows = torch.index_select(self._views[pool].device, 0, torch.tensor(pages, dtype=torch.int64))
        return rows.view(torch.uint8).view(len(pages), self._views[pool].page_bytes)

    def poison(self, pool: int, pages: Sequence[int]) -> None:
        """Overwrite pages that the engine gave up, so that a use after free shows as wrong bytes."""
        self._pools[pool].index_fill_(1, torch.tensor(pages, dtype=torch.int64), POISON_BYTE)

    def _make_views(self, pool: int, staging_bytes: int) -> _PoolViews:
        spec = self.layout.pools[pool]
        dtype = word_type(spec.plane_bytes)
        host = self.host.tensor(pool).view(self.host.slots, spec.planes, spec.plane_bytes)
        device = self._pools[pool].view(dtype).transpose(0, 1)
        return _PoolViews(device, host.view(dtype), spec.page_bytes, staging_bytes // spec.page_bytes)

    def _run(self, plan: CopyPlan, fence: CpuFence | None) -> CopyOutcome:
        """On its direction's thread: wait for the fence, then copy pool by pool."""
        if fence is not None:
            try:
                fence.wait(self._fence_deadline_s)
            except DeadlineError as error:
                return _all_failed(plan, str(error))
        copied, slices = 0, 0
        failed: dict[int, str] = {}
        for copy in plan.pools:
            try:
                slices = max(slices, self._copy(plan.direction, copy))
                copied += len(copy.host_slots) * self.layout.pools[copy.pool].page_bytes
            except (DeviceError, IndexError, RuntimeError) as error:
                failed[copy.pool] = str(error)
        return CopyOutcome(copied, max(1, slices), failed)

    def _copy(self, direction: Direction, copy: PoolCopy) -> int:
        """Copy one pool's pairs and return the slices that it took."""
        view = self._views[copy.pool]
        pairs = check_pairs(self.layout, direction, copy, view.device.shape[0], self.host.slots)
        count = len(pairs)
        step = count if pairs.one_run else view.staging_pages
        starts = range(0, count, step)
        for start in starts:
            self._copy_slice(direction, pairs, start, min(count, start + step))
        return len(starts)

    def _copy_slice(self, direction: Direction, pairs: Pairs, start: int, end: int) -> None:
        view = self._views[pairs.pool]
        pages, slots = torch.as_tensor(pairs.device_pages[start:end]), torch.as_tensor(pairs.host_slots[start:end])
        one_run = pairs.one_run or is_one_run(pairs.host_slots[start:end])
        if one_run:
            # Neighbouring slots are their own staging: one operation, no second pass over the bytes.
            first = int(pairs.host_slots[start])
            rows = view.host[first : first + end - start]
        else:
            rows = self._staging[direction][: (end - start) * view.page_bytes].view(view.host.dtype)
            rows = rows.view(end - start, *view.host.shape[1:])
        if direction is Direction.TO_HOST:
            torch.index_select(view.device, 0, pages, out=rows)
            if not one_run:
                view.host.index_copy_(0, slots, rows)
        else:
            if not one_run:
                torch.index_select(view.host, 0, slots, out=rows)
            view.device.index_copy_(0, pages, rows)


def _all_failed(plan: CopyPlan, error: str) -> CopyOutcome:
    return CopyOutcome(0, failed={copy.pool: error for copy in plan.pools})
