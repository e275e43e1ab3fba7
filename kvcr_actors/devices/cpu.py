"""A device without a GPU: real page pools in memory, copied by a thread a direction, along the path that CUDA takes."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch

from kvcr_actors.core.copy_plan import CopyPlan, Direction, PoolCopy
from kvcr_actors.devices.host_memory import POISON_BYTE, CopyMemory
from kvcr_actors.devices.pairs import Pairs, check_pairs, is_one_run, word_type
from kvcr_actors.devices.row_mover import PlaneTable
from kvcr_actors.errors import ConfigError, DeadlineError, DeviceError
from kvcr_actors.ports import CopyOutcome, Description, LayerWaits, Services
from kvcr_actors.runtime.owner_thread import OwnerThread, close_threads
from kvcr_actors.transfers import Operation
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


@attrs.frozen(eq=False)
class _Segment:
    """Planes that lie together on both sides: device [pages, planes, words] and host [slots, planes, words]."""

    device: torch.Tensor
    host: torch.Tensor


@attrs.frozen(eq=False)
class _Pool:
    """One pool as the copy threads see it."""

    segments: tuple[_Segment, ...]
    pages: int
    slots: int
    is_dense: bool
    """Whether neighbouring slots are one stretch of memory, in every segment."""
    staging_pages: int


class CpuDevice(LayerWaits):
    """The `Device` port on a CPU: over pools of its own, or over an engine's tensors.

    `pages` (a number, or one a pool) makes layer-first pools of so many pages. `planes[pool][plane]` are an engine's
    own tensors instead, whose first dimension is the page (see `PlaneTable`); they must outlive every copy.

    Plans of one direction run in order on a thread of their own, so that a backup whose fence is not set holds up no
    restore: pages are gathered by one index operation a slice and segment, in slices of at most `staging_bytes` where
    host slots are scattered. A pool that fails leaves the others unharmed. Copies behind a fence that is not set within
    `fence_deadline_s` fail as a whole.
    """

    def __init__(
        self,
        layout: CacheLayout,
        pages: int | Sequence[int] | None = None,
        host: CopyMemory | None = None,
        *,
        planes: Sequence[Sequence[torch.Tensor]] | None = None,
        staging_bytes: int = 16 << 20,
        fence_deadline_s: float = 30.0,
    ) -> None:
        if host is None:
            raise ConfigError("host: give the host pools that the device copies to and from")
        if host.layout != layout:
            raise ConfigError("the host pools were made for another layout than the device")
        self.layout = layout
        self.host = host
        self.submits = 0
        self._fence_deadline_s = fence_deadline_s
        self._blocks = _own_pools(layout, pages, planes)
        """For each pool its planes, as few tensors uint8 [pages, planes, plane_bytes] as can be."""
        size = max(staging_bytes, *(pool.page_bytes for pool in layout.pools))
        self._staging = {direction: torch.empty(size, dtype=torch.uint8) for direction in Direction}
        self._pools = [self._make_pool(pool, size) for pool in range(len(layout.pools))]
        self._threads: dict[Direction, OwnerThread] = {}
        self._closing: tuple[OwnerThread, ...] = ()
        self._restored = threading.Condition()
        self._restores_given = 0
        self._restores_over = 0

    def pages_of(self, pool: int) -> int:
        """Pages of one pool."""
        return self._pools[pool].pages

    async def open(self, services: Services) -> None:
        """Start the copy threads; those of an earlier life have ended, or the memory would be another's."""
        self._closing = ()
        self._threads = {way: OwnerThread(f"kvcr-cpu-{way.value}", services) for way in Direction}

    def submit(self, plan: CopyPlan, fences: Sequence[object] = ()) -> Operation[CopyOutcome]:
        """Queue one plan behind any number of `CpuFence`; its direction's thread waits for them, not the caller."""
        awaited: list[CpuFence] = []
        for fence in fences:
            if not isinstance(fence, CpuFence):
                return Operation[CopyOutcome].finished(
                    _refused(plan, f"fence: give CpuFence, not {type(fence).__name__}")
                )
            awaited.append(fence)
        thread = self._threads.get(plan.direction)
        if thread is None:
            return Operation[CopyOutcome].finished(_refused(plan, "the device is not open"))
        self.submits += 1
        self._restores_given += plan.direction is Direction.TO_DEVICE
        return thread.submit(
            lambda: self._run(plan, awaited), lambda error: _all_failed(plan, f"the copy thread failed: {error!r}")
        )

    def wait_layer(self, layer: int, stream: Any = None, *, deadline_s: float = 1.0) -> None:
        """Block until every restore that was submitted is over; a CPU has all layers at once, and no streams."""
        given = self._restores_given
        with self._restored:
            if not self._restored.wait_for(lambda: self._restores_over >= given, deadline_s):
                raise DeadlineError(
                    f"layer {layer}: {given - self._restores_over} restores ran on after {deadline_s:g} s"
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
        pools = {spec.name: pool.pages for spec, pool in zip(self.layout.pools, self._pools, strict=True)}
        return {"device": "cpu", "submits": self.submits, "pages": pools, "open": bool(self._threads)}

    def pool_view(self, pool: int) -> torch.Tensor:
        """A pool of the device's own as the engine sees it: uint8 [planes, pages, plane_bytes]."""
        blocks = self._blocks[pool]
        if len(blocks) != 1:
            raise ConfigError(
                f"pool {self.layout.pools[pool].name}: its planes are the engine's own tensors; use those"
            )
        return blocks[0].transpose(0, 1)

    def load(self, pool: int, pages: Sequence[int], content: torch.Tensor) -> None:
        """Write pages as the engine would: `content` is uint8 [n, page_bytes], a page's planes one after the other."""
        index, spec, first = torch.tensor(pages, dtype=torch.int64), self.layout.pools[pool], 0
        rows = content.view(len(pages), spec.planes, spec.plane_bytes)
        for block in self._blocks[pool]:
            block.index_copy_(0, index, rows[:, first : first + block.shape[1]])
            first += block.shape[1]

    def gather(self, pool: int, pages: Sequence[int]) -> torch.Tensor:
        """Read pages as uint8 [n, page_bytes], a copy."""
        index = torch.tensor(pages, dtype=torch.int64)
        rows = [torch.index_select(block, 0, index) for block in self._blocks[pool]]
        return torch.cat(rows, dim=1).view(len(pages), self.layout.pools[pool].page_bytes)

    def poison(self, pool: int, pages: Sequence[int]) -> None:
        """Overwrite pages that the engine gave up, so that a use after free shows as wrong bytes."""
        index = torch.tensor(pages, dtype=torch.int64)
        for block in self._blocks[pool]:
            block.index_fill_(0, index, POISON_BYTE)

    def _make_pool(self, pool: int, staging_bytes: int) -> _Pool:
        spec, blocks = self.layout.pools[pool], self._blocks[pool]
        segments = tuple(_segments(blocks, self.host.views(pool)))
        pages, slots = blocks[0].shape[0], self.host.slots_of(pool)
        is_dense = all(segment.host.is_contiguous() for segment in segments)
        return _Pool(segments, pages, slots, is_dense, staging_bytes // spec.page_bytes)

    def _run(self, plan: CopyPlan, fences: Sequence[CpuFence]) -> CopyOutcome:
        """On its direction's thread."""
        try:
            return self._copy_all(plan, fences)
        finally:
            if plan.direction is Direction.TO_DEVICE:
                with self._restored:
                    self._restores_over += 1
                    self._restored.notify_all()

    def _copy_all(self, plan: CopyPlan, fences: Sequence[CpuFence]) -> CopyOutcome:
        """Wait for the fences, then copy pool by pool."""
        try:
            for fence in fences:
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
        pool = self._pools[copy.pool]
        pairs = check_pairs(self.layout, direction, copy, pool.pages, pool.slots)
        count = len(pairs)
        step = count if pairs.one_run and pool.is_dense else pool.staging_pages
        starts = range(0, count, step)
        for start in starts:
            for segment in pool.segments:
                self._copy_slice(direction, segment, pairs, start, min(count, start + step))
        return len(starts)

    def _copy_slice(self, direction: Direction, segment: _Segment, pairs: Pairs, start: int, end: int) -> None:
        pages, slots = torch.as_tensor(pairs.device_pages[start:end]), torch.as_tensor(pairs.host_slots[start:end])
        first, count = int(pairs.host_slots[start]), end - start
        # Neighbouring slots are their own staging: one operation, no second pass over the bytes.
        rows = segment.host[first : first + count]
        in_place = (pairs.one_run or is_one_run(pairs.host_slots[start:end])) and rows.is_contiguous()
        if not in_place:
            shape = segment.host.shape[1:]
            size = count * shape.numel() * segment.host.element_size()
            rows = self._staging[direction][:size].view(segment.host.dtype).view(count, *shape)
        if direction is Direction.TO_HOST:
            torch.index_select(segment.device, 0, pages, out=rows)
            if not in_place:
                segment.host.index_copy_(0, slots, rows)
        else:
            if not in_place:
                torch.index_select(segment.host, 0, slots, out=rows)
            segment.device.index_copy_(0, pages, rows)


def _own_pools(
    layout: CacheLayout, pages: int | Sequence[int] | None, planes: Sequence[Sequence[torch.Tensor]] | None
) -> list[list[torch.Tensor]]:
    """Each pool's planes as tensors uint8 [pages, planes, plane_bytes]: one of the device's own, or the engine's."""
    if (pages is None) == (planes is None):
        raise ConfigError("give either `pages`, for pools of the device's own, or `planes`, the engine's tensors")
    if planes is not None:
        table = PlaneTable(layout, planes)
        if table.device.type != "cpu":
            raise ConfigError(f"planes on {table.device}: a CpuDevice copies for pools on a CPU, CudaDevice on a GPU")
        return [[rows.unsqueeze(1) for rows in of_pool] for of_pool in table.rows()]
    assert pages is not None  # noqa: S101 - for the type checker
    counts = [pages] * len(layout.pools) if isinstance(pages, int) else list(pages)
    if len(counts) != len(layout.pools) or min(counts) < 1:
        raise ConfigError(f"pages: {pages}; give one positive number, or one for each of {len(layout.pools)} pools")
    return [
        [torch.zeros((pool.planes, count, pool.plane_bytes), dtype=torch.uint8).transpose(0, 1)]
        for pool, count in zip(layout.pools, counts, strict=True)
    ]


def _segments(device: Sequence[torch.Tensor], host: Sequence[torch.Tensor]) -> Iterator[_Segment]:
    """Cut planes where a tensor of either side ends, and view both in the widest words that fit."""
    devices, hosts = _by_plane(device), _by_plane(host)
    first = 0
    while first < len(devices):
        (block, at), (run, slot_at) = devices[first], hosts[first]
        planes = min(block.shape[1] - at, run.shape[1] - slot_at)
        one, other = block[:, at : at + planes], run[:, slot_at : slot_at + planes]
        dtype = word_type(math.gcd(*_distances(one), *_distances(other)))
        yield _Segment(one.view(dtype), other.view(dtype))
        first += planes


def _by_plane(blocks: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
    """For each plane the tensor that holds it, and its place in there."""
    return [(block, at) for block in blocks for at in range(block.shape[1])]


def _distances(block: torch.Tensor) -> tuple[int, ...]:
    """Everything that words must divide: where a uint8 tensor begins, its rows' length and how far apart they are."""
    return (int(block.storage_offset()), block.shape[2], block.stride(0), block.stride(1))


def _all_failed(plan: CopyPlan, error: str) -> CopyOutcome:
    return CopyOutcome(0, failed={copy.pool: error for copy in plan.pools})


def _refused(plan: CopyPlan, error: str) -> CopyOutcome:
    return attrs.evolve(_all_failed(plan, error), launches=0)
