"""One direction of a CUDA device: its streams, its staging ring, and the launch of one submit."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Generic, TypeVar

import attrs
import torch

from kvcr_actors.core.copy_plan import CopyPlan, Direction
from kvcr_actors.devices.copy_program import (
    EncodedPart,
    Part,
    Piece,
    cut_parts,
    encode,
    index_words,
)
from kvcr_actors.devices.cuda_runtime import CopyRuntime
from kvcr_actors.devices.host_memory import CopyMemory
from kvcr_actors.devices.host_transfers import HostPairs, Transfers
from kvcr_actors.devices.layer_groups import LayerGate, LayerGroups, OpenRestore, choose_groups
from kvcr_actors.devices.pairs import check_pairs
from kvcr_actors.devices.row_mover import PlaneTable, RowMover
from kvcr_actors.devices.staging_ring import Region, StagingRing
from kvcr_actors.errors import DeviceError
from kvcr_actors.ports import CopyOutcome
from kvcr_actors.transfers import Operation
from kvcr_actors.types import CacheLayout

S = TypeVar("S")
E = TypeVar("E")

_WORD = 8


@attrs.define(eq=False)
class CopyJob(Generic[E]):
    """One submit on its way. The launching thread fills it and sets `launched`; then the waiting thread owns it."""

    plan: CopyPlan
    fences: tuple[E, ...]
    restore: OpenRestore[E] | None
    operation: Operation[CopyOutcome] = attrs.field(factory=Operation[CopyOutcome])
    launched: threading.Event = attrs.field(factory=threading.Event)
    done: E | None = None
    """Behind it nothing of the submit touches memory; None if nothing was launched."""
    slices: int = 1
    failed: dict[int, str] = attrs.field(factory=dict[int, str])

    def fail(self, error: str) -> None:
        """Fail every pool that has not failed already."""
        for copy in self.plan.pools:
            self.failed.setdefault(copy.pool, error)

    def outcome(self, layout: CacheLayout) -> CopyOutcome:
        """How it stands: the bytes of the pools that did not fail, and the others' errors."""
        copied = sum(
            len(copy.host_slots) * layout.pools[copy.pool].page_bytes
            for copy in self.plan.pools
            if copy.pool not in self.failed
        )
        return CopyOutcome(copied, self.slices, dict(self.failed))


@attrs.frozen
class LaneParts(Generic[S, E]):
    """What both lanes of a device share."""

    runtime: CopyRuntime[S, E]
    table: PlaneTable
    mover: RowMover
    host: CopyMemory
    direct: frozenset[int]
    """Pools whose planes are large enough to be copied without staging."""
    layers: tuple[tuple[int, ...], ...]
    most_groups: int
    gate: LayerGate[E]


class CopyLane(Generic[S, E]):
    """Launches the submits of one direction; every method runs on the launching thread.

    Kernels and the index upload run on one stream, host copies on another, so that a part's kernel runs beside the
    copies of the part before it. Work of the two is ordered by events on the device alone.
    """

    def __init__(self, shared: LaneParts[S, E], direction: Direction, staging_bytes: int, index_bytes: int) -> None:
        self._shared = shared
        self._runtime = shared.runtime
        self._layout = shared.table.layout
        self._direction = direction
        self._whole = LayerGroups((tuple((0, pool.planes) for pool in self._layout.pools),), (1,))
        device = shared.runtime.device
        self._kernels = self._runtime.stream()
        self._copies = self._runtime.stream()
        self._ring = StagingRing[E](staging_bytes, "staging_bytes")
        self._staging = torch.empty(self._ring.size, dtype=torch.uint8, device=device)
        self._address = self._staging.data_ptr()
        self._index_ring = StagingRing[E](index_bytes, "index_bytes")
        words = self._index_ring.size // _WORD
        self._index = torch.empty(words, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._index_view = self._index.numpy()
        self._device_index = torch.empty(words, dtype=torch.int64, device=device)

    def warm_up(self) -> None:
        """Compile the kernel and load it, by a launch that moves nothing, once the new memory is free of old work."""
        self._runtime.synchronize(self._runtime.record(self._runtime.current_stream(), blocking=True))
        empty = Part(0, (), 0)
        taken: list[Region[E]] = []
        part, plan = self._upload([empty], [0], (), taken)
        to_staging = self._direction is Direction.TO_HOST
        call = partial(self._shared.mover.move, part[0], plan, self._staging, to_staging=to_staging)
        self._runtime.launch(self._kernels, call)
        end = self._runtime.record(self._kernels, blocking=True)
        taken[0].release(end)
        self._runtime.synchronize(end)

    def launch(self, job: CopyJob[E]) -> None:
        """Launch a job's plan and set `launched`; what fails is in `job.failed`, a failed pool leaves the others be."""
        taken: list[Region[E]] = []
        try:
            copies = self._accepted(job)
            if copies:
                self._launch(job, copies, taken)
        except Exception as error:  # noqa: BLE001 - the outcome carries it, and what was launched is waited for
            job.fail(f"{type(error).__name__}: {error}")
            job.done = self._end_of_streams()
        finally:
            for region in taken:
                if region.released is None:
                    region.release(job.done)
            if job.restore is not None and job.restore.groups is None:
                self._shared.gate.close(job.restore)
            job.launched.set()

    def _accepted(self, job: CopyJob[E]) -> list[HostPairs]:
        """The pools whose pairs are in bounds; the others fail."""
        copies: list[HostPairs] = []
        pages, host = self._shared.table.pages, self._shared.host
        for copy in job.plan.pools:
            try:
                pairs = check_pairs(self._layout, self._direction, copy, pages[copy.pool], host.slots_of(copy.pool))
            except DeviceError as error:
                job.failed[copy.pool] = str(error)
                continue
            if len(pairs):
                spec = self._layout.pools[copy.pool]
                copies.append(HostPairs(pairs, spec.page_bytes, spec.plane_bytes, host.runs(copy.pool)))
        return copies

    def _launch(self, job: CopyJob[E], copies: list[HostPairs], taken: list[Region[E]]) -> None:
        groups = self._whole
        if self._direction is Direction.TO_DEVICE:
            pages = {copy.pool: copy.count for copy in copies}
            groups = choose_groups(self._layout, self._shared.layers, pages, most=self._shared.most_groups)
        direct = self._shared.direct
        total = sum(copy.count * copy.page_bytes for copy in copies if copy.pool not in direct)
        # A plan that does not fit goes in halves of the ring: one is copied while the other is filled.
        limit = self._ring.size if total <= self._ring.size else self._ring.size // 2
        parts = cut_parts(self._layout, copies, groups.planes, limit, direct)
        job.slices = len(parts) - len({part.group for part in parts}) + 1
        regions = [self._ring.take(part.size) for part in parts]
        taken += regions
        encoded, plan = self._upload(parts, [region.offset for region in regions], copies, taken)
        for fence in job.fences:
            self._runtime.wait(self._kernels, fence)
        ends: dict[int, E] = {}
        for part, region in zip(encoded, regions, strict=True):
            move = self._gather if self._direction is Direction.TO_HOST else self._scatter
            job.done = ends[part.part.group] = move(job, part, plan, region)
            region.release(job.done)
        if job.restore is not None:
            self._shared.gate.launched(job.restore, groups, _fill(ends, len(groups.ends)))

    def _gather(self, job: CopyJob[E], part: EncodedPart, plan: torch.Tensor, region: Region[E]) -> E:
        """Kernel, then host copies."""
        for event in region.events_before():
            self._runtime.wait(self._kernels, event)
        self._launch_kernel(part, plan)
        self._runtime.wait(self._copies, self._runtime.record(self._kernels))
        self._copy(job, part)
        return self._runtime.record(self._copies, blocking=True)

    def _scatter(self, job: CopyJob[E], part: EncodedPart, plan: torch.Tensor, region: Region[E]) -> E:
        """Host copies, then kernel. Copies into staging need not wait for the last reader of the pages."""
        for event in region.events_before():
            self._runtime.wait(self._copies, event)
        for fence in job.fences if part.part.direct else ():
            self._runtime.wait(self._copies, fence)
        self._copy(job, part)
        self._runtime.wait(self._kernels, self._runtime.record(self._copies))
        self._launch_kernel(part, plan)
        return self._runtime.record(self._kernels, blocking=True)

    def _launch_kernel(self, part: EncodedPart, plan: torch.Tensor) -> None:
        if not part.part.pieces:
            return
        to_staging = self._direction is Direction.TO_HOST
        call = partial(self._shared.mover.move, part, plan, self._staging, to_staging=to_staging)
        self._runtime.launch(self._kernels, call)

    def _upload(
        self, parts: Sequence[Part], bases: Sequence[int], copies: Sequence[HostPairs], taken: list[Region[E]]
    ) -> tuple[list[EncodedPart], torch.Tensor]:
        """Write the index buffer into pinned memory and copy it to the device, once a submit."""
        words = index_words(self._layout, parts, copies)
        region = self._index_ring.take(words * _WORD)
        taken.append(region)
        for event in region.events_before():
            self._runtime.synchronize(event)  # pinned words still being read; 8 MiB of plans ago, so over long since
        begin = region.offset // _WORD
        mover = self._shared.mover
        encoded = encode(self._layout, parts, bases, copies, mover.tile, self._index_view[begin : begin + words])
        plan = self._device_index[begin : begin + words]
        self._runtime.upload(self._kernels, plan, self._index[begin : begin + words])
        return encoded, plan

    def _copy(self, job: CopyJob[E], part: EncodedPart) -> None:
        """Copy a part's pieces between staging and host, together; one by one if the driver refuses that."""
        pieces = [piece for piece in (*part.part.pieces, *part.part.direct) if piece.pairs.pool not in job.failed]
        listed = [self._transfers(piece, part.base) for piece in pieces]
        together = Transfers([], [], [])
        for transfers in listed:
            together.extend(transfers)
        try:
            self._run_transfers(together)
        except DeviceError:
            for piece, transfers in zip(pieces, listed, strict=True):
                try:
                    self._run_transfers(transfers)
                except DeviceError as error:
                    job.failed[piece.pairs.pool] = f"pool {self._layout.pools[piece.pairs.pool].name}: {error}"

    def _transfers(self, piece: Piece, base: int) -> Transfers:
        pairs, planes = piece.pairs, range(piece.range[0], sum(piece.range))
        if pairs.pool in self._shared.direct:
            table = self._shared.table
            return pairs.direct_transfers(planes, table.addresses[pairs.pool], table.strides[pairs.pool])
        return pairs.transfers(piece.start, piece.end, planes, self._address + base + piece.offset)

    def _run_transfers(self, transfers: Transfers) -> None:
        to_host = self._direction is Direction.TO_HOST
        if transfers.sizes:
            host, staging = transfers.host, transfers.staging
            targets, sources = (host, staging) if to_host else (staging, host)
            self._runtime.copy(self._copies, targets, sources, transfers.sizes)
        for staged, staged_pitch, host_row, host_pitch, width, rows in transfers.pitched:
            if to_host:
                self._runtime.copy_pitched(self._copies, host_row, host_pitch, staged, staged_pitch, width, rows)
            else:
                self._runtime.copy_pitched(self._copies, staged, staged_pitch, host_row, host_pitch, width, rows)

    def _end_of_streams(self) -> E | None:
        """An event behind all that both streams were given; None if they are idle, or the device is lost."""
        try:
            self._runtime.wait(self._copies, self._runtime.record(self._kernels))
            return self._runtime.record(self._copies, blocking=True)
        except (DeviceError, RuntimeError):
            # No event is to be had, but what runs may still touch the memory: it is waited for here.
            with suppress(DeviceError, RuntimeError):  # a lost device touches nothing more
                self._runtime.drain(self._kernels)
                self._runtime.drain(self._copies)
            return None


def _fill(ends: dict[int, E], groups: int) -> list[E]:
    """One event a group; a group that moves nothing, which the first is not, is over with the one before it."""
    events: list[E] = []
    for group in range(groups):
        events.append(ends[group] if group in ends else events[-1])
    return events
