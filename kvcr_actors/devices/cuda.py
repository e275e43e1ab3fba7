"""The CUDA device: one submit a step, one gather launch, one batched copy, and the engine's thread in none of it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Generic, TypeVar, cast

import attrs
import torch

from kvcr_actors.core.copy_plan import CopyPlan, Direction
from kvcr_actors.devices.copy_lane import CopyJob, CopyLane, LaneParts
from kvcr_actors.devices.cuda_runtime import CopyRuntime, CudaRuntime
from kvcr_actors.devices.host_memory import CopyMemory
from kvcr_actors.devices.layer_groups import MAX_GROUPS, LayerGate, check_layers
from kvcr_actors.devices.row_mover import PlaneTable, RowMover, make_mover
from kvcr_actors.errors import ConfigError, DeadlineError, DeviceError
from kvcr_actors.ports import CopyOutcome, Description, LayerWaits, PageListsRead, ReadsPageLists, Services
from kvcr_actors.runtime.owner_thread import OwnerThread, close_threads
from kvcr_actors.transfers import Operation
from kvcr_actors.types import CacheLayout

S = TypeVar("S")
E = TypeVar("E")

DIRECT_BYTES = 256 << 10
"""A plane of this size takes 5 us to copy and under 1 us to list in a batch."""

_LEAST_INDEX_BYTES = 4 << 10
_LAUNCH_DEADLINE_S = 60.0


class CopyEngine(LayerWaits, ReadsPageLists, Generic[S, E]):
    """The `Device` port over an engine's own page pools, on any `CopyRuntime`.

    `planes[pool][plane]` are the engine's tensors (see `PlaneTable`); `layers[pool][plane]` says which layer reads
    each first, for `wait_layer`, which a restore serves in `most_groups` groups at most. The host pools must be
    registered with the runtime. Each direction has a staging ring of `staging_bytes`, which must hold two pages of
    every pool; a plan that does not fit goes in slices. Pools with planes of `direct_bytes` or more go without staging:
    the copy engine moves such planes one by one at its full rate. A fence is an engine's event, or its stream as it
    stands at the submit. A submit launches on a thread of its own, or inside `submit` with `launch_on_caller`: for a
    controller that is pumped inline, whose engine would starve such a thread of the GIL. If a pool fails on its way to
    the device, the bytes of its target pages are undefined.
    """

    def __init__(
        self,
        layout: CacheLayout,
        planes: Sequence[Sequence[torch.Tensor]],
        host: CopyMemory,
        runtime: CopyRuntime[S, E],
        *,
        layers: Sequence[Sequence[int]] | None = None,
        staging_bytes: int = 256 << 20,
        index_bytes: int = 8 << 20,
        direct_bytes: int = DIRECT_BYTES,
        most_groups: int = MAX_GROUPS,
        mover: RowMover | None = None,
        launch_on_caller: bool = False,
    ) -> None:
        if host.layout != layout:
            raise ConfigError("the host pools were made for another layout than the device")
        if not host.is_registered:
            raise ConfigError("the host pools are not registered: make HostPools with registrar=the device's runtime")
        direct = frozenset(pool for pool, spec in enumerate(layout.pools) if spec.plane_bytes >= direct_bytes)
        staged = [spec.page_bytes for pool, spec in enumerate(layout.pools) if pool not in direct]
        needed = 2 * max(staged, default=0)
        if staging_bytes < needed + needed // 64 + 1024:
            raise ConfigError(f"staging_bytes: {staging_bytes} does not hold two pages of {needed // 2} bytes")
        if index_bytes < _LEAST_INDEX_BYTES:
            raise ConfigError(
                f"index_bytes: {index_bytes}; give 8 for each page of a plan, and {_LEAST_INDEX_BYTES} or more"
            )
        table = PlaneTable(layout, planes)
        if table.device != runtime.device:
            raise ConfigError(f"the planes are on {table.device}, the runtime is for {runtime.device}")
        self.layout = layout
        self.host = host
        self.submits = 0
        self._runtime = runtime
        self._gate = LayerGate[E]()
        self._table = table
        self._direct = direct
        self._layers = check_layers(layout, layers)
        self._options = (staging_bytes, index_bytes, most_groups, mover)
        self._lanes: dict[Direction, CopyLane[S, E]] = {}
        self._waiters: dict[Direction, OwnerThread] = {}
        self._launcher: OwnerThread | None = None
        self._reader: OwnerThread | None = None
        self._threads: tuple[OwnerThread, ...] = ()
        """All that `close` has to end."""
        self._reading: S | None = None
        self._services: Services | None = None
        self._open: set[CopyJob[E]] = set()
        self._launch_on_caller = launch_on_caller

    def pages_of(self, pool: int) -> int:
        """Pages of one pool."""
        return self._table.pages[pool]

    async def open(self, services: Services) -> None:
        """Start the threads, take the staging memory and compile the kernels; DeviceError if one of them fails."""
        self._open.clear()  # the copies of an earlier life have ended, or the memory would be another's
        launcher = OwnerThread("kvcr-launch", services)
        self._threads = (launcher,)
        error = await launcher.submit(self._prepare, lambda error: f"{type(error).__name__}: {error}").outcome()
        if error is not None:
            await self.close(_LAUNCH_DEADLINE_S)
            raise DeviceError(f"the device cannot be opened: {error}")
        for direction in Direction:
            self._waiters[direction] = OwnerThread(f"kvcr-wait-{direction.value}", services)
            self._waiters[direction].post(self._runtime.bind_thread)
        self._reader = OwnerThread("kvcr-page-lists", services)
        self._reader.post(self._runtime.bind_thread)
        self._threads = (launcher, *self._waiters.values(), self._reader)
        self._services = services
        self._launcher = launcher

    def submit(self, plan: CopyPlan, fences: Sequence[object] = ()) -> Operation[CopyOutcome]:
        """Hand one plan to the launching thread; the operation ends when its last byte is in place."""
        launcher = self._launcher
        if launcher is None:
            return _failed(plan, "the device is not open")
        try:
            events = tuple(self._runtime.as_event(fence) for fence in fences)
        except (DeviceError, RuntimeError) as error:
            return _failed(plan, f"fence: {error}")
        self.submits += 1
        restore = self._gate.expect() if plan.direction is Direction.TO_DEVICE else None
        job = CopyJob(plan, events, restore)
        self._open.add(job)
        if self._launch_on_caller:
            with self._runtime.selected():
                self._lanes[plan.direction].launch(job)
        else:
            launcher.submit(partial(self._lanes[plan.direction].launch, job), partial(_abandon, job))
        self._waiters[plan.direction].post(partial(self._finish, job))
        return job.operation

    def read_page_lists(self, lists: Sequence[torch.Tensor], fences: Sequence[object] = ()) -> Operation[PageListsRead]:
        """Read tensors of page ids on a thread of its own, once every fence allows it; they must stay as they are."""
        reader = self._reader
        if reader is None:
            return Operation[PageListsRead].finished(PageListsRead(error="the device is not open"))
        try:
            events = tuple(self._runtime.as_event(fence) for fence in fences)
        except (DeviceError, RuntimeError) as error:
            return Operation[PageListsRead].finished(PageListsRead(error=f"fence: {error}"))
        return reader.submit(
            partial(self._read_lists, tuple(lists), events),
            lambda error: PageListsRead(error=f"its page lists were not read: {error}"),
        )

    def _read_lists(self, lists: Sequence[torch.Tensor], events: Sequence[E]) -> PageListsRead:
        """On the reading thread: one copy for all lists, behind the events."""
        stream = self._runtime.stream() if self._reading is None else self._reading
        self._reading = stream
        for event in events:
            self._runtime.wait(stream, event)
        lengths = [len(one) for one in lists]
        host = torch.empty(sum(lengths), dtype=torch.int64, pin_memory=self._runtime.device.type == "cuda")
        joined: list[torch.Tensor] = []

        def copy() -> None:
            joined.append(torch.cat([one.to(torch.int64) for one in lists]))
            host.copy_(joined[0], non_blocking=True)

        self._runtime.launch(stream, copy)
        self._runtime.synchronize(self._runtime.record(stream, blocking=True))
        ids = cast("list[int]", host.tolist())  # pyright: ignore[reportUnknownMemberType]
        ends = list(accumulate(lengths))
        return PageListsRead(tuple(array("q", ids[end - n : end]) for end, n in zip(ends, lengths, strict=True)))

    def wait_layer(self, layer: int, stream: S | None = None, *, deadline_s: float = 1.0) -> None:
        """Make the engine's stream (the current one) wait on the device for a layer's part of the restores under way.

        Call it on any thread before the layer's first access to a restored pool. A restore that was submitted but not
        launched yet is awaited on the host; DeadlineError past the deadline. One that is still on its way from a flush
        to `submit`, on another thread, is not known here: `CacheController.wait_restores_submitted` waits for that.
        Whether the bytes came tells the outcome alone.
        """
        on = self._runtime.current_stream() if stream is None else stream
        self._gate.wait_layer(layer, partial(self._runtime.wait, on), deadline_s)

    async def close(self, deadline_s: float) -> None:
        """Let running copies end and stop the threads; DeadlineError if they do not end in time.

        Copies that run past it are settled as failed, and become quiet when they end. A further `close` waits again.
        """
        self._launcher = self._reader = None
        try:
            await close_threads(self._threads, deadline_s)
        except DeadlineError as error:
            for job in self._open:
                job.operation.settle(_all_failed(job.plan, str(error)), quiet=False)
            raise
        self._threads = ()
        self._lanes.clear()

    def describe(self) -> Description:
        """State for people."""
        running = {direction.value: thread.depth for direction, thread in self._waiters.items()}
        pages = {spec.name: count for spec, count in zip(self.layout.pools, self._table.pages, strict=True)}
        launching = 0 if self._launcher is None else self._launcher.depth
        return {
            "device": str(self._runtime.device),
            "submits": self.submits,
            "launching": launching,
            "running": running,
            "pages": pages,
        }

    def _prepare(self) -> str | None:
        """On the launching thread: build and warm up both lanes."""
        staging_bytes, index_bytes, most_groups, mover = self._options
        self._runtime.bind_thread()
        mover = make_mover(self._table) if mover is None else mover
        shared = LaneParts[S, E](
            self._runtime, self._table, mover, self.host, self._direct, self._layers, most_groups, self._gate
        )
        for direction in Direction:
            lane = CopyLane[S, E](shared, direction, staging_bytes, index_bytes)
            lane.warm_up()
            self._lanes[direction] = lane
        return None

    def _finish(self, job: CopyJob[E]) -> None:
        """On the waiting thread: sleep until the copies are over, however long; callers and `close` have deadlines."""
        job.launched.wait()
        try:
            if job.done is not None:
                self._runtime.synchronize(job.done)
        except (DeviceError, RuntimeError) as error:
            job.fail(f"the device was lost: {error}")
        if job.restore is not None:
            self._gate.close(job.restore)
        if self._services is not None:
            self._services.post(partial(self._settle, job))

    def _settle(self, job: CopyJob[E]) -> None:
        self._open.discard(job)
        job.operation.settle(job.outcome(self.layout))


class CudaDevice(CopyEngine[torch.cuda.Stream, torch.cuda.Event]):
    """A `CopyEngine` on a GPU; `registrar=CudaRuntime(device)` registers its host pools."""

    def __init__(
        self, layout: CacheLayout, planes: Sequence[Sequence[torch.Tensor]], host: CopyMemory, **options: Any
    ) -> None:
        device = PlaneTable(layout, planes).device
        if device.type != "cuda":
            raise ConfigError(f"planes on {device}: a CudaDevice copies for pools on a GPU; CpuDevice has its own")
        super().__init__(layout, planes, host, CudaRuntime(device), **options)


def _all_failed(plan: CopyPlan, error: str) -> CopyOutcome:
    return CopyOutcome(0, failed={copy.pool: error for copy in plan.pools})


def _failed(plan: CopyPlan, error: str) -> Operation[CopyOutcome]:
    return Operation[CopyOutcome].finished(attrs.evolve(_all_failed(plan, error), launches=0))


def _abandon(job: CopyJob[Any], error: Exception) -> None:
    job.fail(str(error))
    job.launched.set()
