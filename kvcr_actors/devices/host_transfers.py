"""The copies between staging and scattered host slots: as few and as long as the slots allow."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from kvcr_actors.devices.pairs import Indices, Pairs

PITCHED_PAGES = 8
"""From this length on a run is copied by one pitched call; shorter ones cost less as entries of a batch."""


@attrs.frozen(eq=False)
class HostRuns:
    """Pairs as runs of neighbouring host slots, which also end at each border of a registered chunk."""

    starts: Indices
    """Each run's first pair, counted from the first of all."""
    slots: Indices
    """Each run's first host slot."""
    lengths: Indices
    short_pairs: Indices
    """The pairs of all runs shorter than `PITCHED_PAGES`."""
    short_slots: Indices
    long: tuple[tuple[int, int, int], ...]
    """The other runs: first pair, first slot, length."""

    @classmethod
    def of(cls, slots: Indices, chunk_slots: int) -> HostRuns:
        """Find the runs of ascending slots."""
        breaks = np.flatnonzero((slots[1:] - slots[:-1] != 1) | (slots[1:] % chunk_slots == 0))
        starts = np.zeros(len(breaks) + 1, np.int64)
        starts[1:] = breaks + 1
        lengths = np.empty_like(starts)
        lengths[:-1] = starts[1:] - starts[:-1]
        lengths[-1] = len(slots) - starts[-1]
        firsts = slots[starts]
        is_long = lengths >= PITCHED_PAGES
        short = np.flatnonzero(np.repeat(~is_long, lengths))
        triples = zip(starts[is_long].tolist(), firsts[is_long].tolist(), lengths[is_long].tolist(), strict=True)
        return cls(starts, firsts, lengths, short, slots[short], tuple(triples))


@attrs.frozen(eq=False)
class HostRun:
    """Where a pool's slots keep some of their planes: slot `i` has `[first, first + planes)` at `address + i * pitch`.

    Page-first memory has one run with all planes, layer-first memory one a plane. A copy must cross neither a multiple
    of `chunk_slots` slots nor an address in `borders` (ascending): it would touch two registrations of the driver.
    """

    first: int
    planes: int
    address: int
    pitch: int
    chunk_slots: int = 1 << 62
    borders: Indices | None = None


class HostPairs:
    """One pool's pairs with what its copies need: bytes of a plane and of a page, and the runs of the host memory."""

    __slots__ = ("_chunked", "_runs", "count", "page_bytes", "pairs", "plane_bytes", "pool")

    def __init__(self, pairs: Pairs, page_bytes: int, plane_bytes: int, runs: Sequence[HostRun]) -> None:
        self.pairs = pairs
        self.pool = pairs.pool
        self.count = len(pairs)
        self.page_bytes = page_bytes
        self.plane_bytes = plane_bytes
        self._runs = runs
        self._chunked: dict[int, HostRuns] = {}
        """Runs of neighbouring slots over all pairs, by the slots of a chunk."""

    def transfers(self, start: int, end: int, planes: range, staging: int) -> Transfers:
        """List the copies of pairs `[start, end)`: of each page the planes of a range.

        In staging the pages stand one after the other from address `staging` on, each with those planes.
        """
        together = Transfers([], [], [])
        row_bytes = len(planes) * self.plane_bytes
        for run in self._runs:
            first, stop = max(planes.start, run.first), min(planes.stop, run.first + run.planes)
            if first >= stop:
                continue
            address = run.address + (first - run.first) * self.plane_bytes
            at = staging + (first - planes.start) * self.plane_bytes
            piece = self._of_run(run, start, end, (stop - first) * self.plane_bytes, at, row_bytes, address)
            together.extend(piece if run.borders is None else piece.cut_at(run.borders))
        return together

    def direct_transfers(self, planes: range, addresses: Indices, stride: int) -> Transfers:
        """List the copies of every pair between host and the planes themselves, one a page and plane.

        `addresses` are where the pool's planes begin, `stride` is the bytes from page to page in them.
        """
        together = Transfers([], [], [])
        inside = self.pairs.device_pages * stride
        for run in self._runs:
            first, stop = max(planes.start, run.first), min(planes.stop, run.first + run.planes)
            if first >= stop:
                continue
            device = (addresses[first:stop, None] + inside).ravel()
            columns = np.arange(first - run.first, stop - run.first)[:, None] * self.plane_bytes
            host = (columns + self.pairs.host_slots * run.pitch + run.address).ravel()
            piece = Transfers(device.tolist(), host.tolist(), [self.plane_bytes] * len(device))
            together.extend(piece if run.borders is None else piece.cut_at(run.borders))
        return together

    def _of_run(
        self, run: HostRun, start: int, end: int, width: int, staging: int, row_bytes: int, host: int
    ) -> Transfers:
        """Copies of `width` bytes a page: rows `row_bytes` apart in staging, `run.pitch` apart from `host` on."""
        dense = width == row_bytes == run.pitch
        if self._is_one(run):
            slot, count = int(self.pairs.host_slots[start]), end - start
            address = host + slot * run.pitch
            if dense:
                return Transfers([staging], [address], [count * width])
            if count >= PITCHED_PAGES:
                return Transfers([], [], [], [(staging, row_bytes, address, run.pitch, width, count)])
            rows = range(count)
            staged = [staging + row * row_bytes for row in rows]
            return Transfers(staged, [address + row * run.pitch for row in rows], [width] * count)
        runs = self._runs_between(start, end, run.chunk_slots)
        if dense:
            rows, slots = staging + runs.starts * width, host + runs.slots * width
            return Transfers(rows.tolist(), slots.tolist(), (runs.lengths * width).tolist())
        pitched = [
            (staging + first * row_bytes, row_bytes, host + slot * run.pitch, run.pitch, width, length)
            for first, slot, length in runs.long
        ]
        rows, slots = staging + runs.short_pairs * row_bytes, host + runs.short_slots * run.pitch
        return Transfers(rows.tolist(), slots.tolist(), [width] * len(rows), pitched)

    def _is_one(self, run: HostRun) -> bool:
        """Whether all pairs are neighbours in one chunk: the case that must cost little."""
        first, last = int(self.pairs.host_slots[0]), int(self.pairs.host_slots[-1])
        return self.pairs.one_run and first // run.chunk_slots == last // run.chunk_slots

    def _runs_between(self, start: int, end: int, chunk_slots: int) -> HostRuns:
        if start or end < self.count:
            return HostRuns.of(self.pairs.host_slots[start:end], chunk_slots)
        if chunk_slots not in self._chunked:
            self._chunked[chunk_slots] = HostRuns.of(self.pairs.host_slots, chunk_slots)
        return self._chunked[chunk_slots]


class Transfers:
    """Copies between host addresses and staging (or planes): contiguous ones, and ones of rows a pitch apart."""

    __slots__ = ("host", "pitched", "sizes", "staging")

    def __init__(
        self,
        staging: list[int],
        host: list[int],
        sizes: list[int],
        pitched: list[tuple[int, int, int, int, int, int]] | None = None,
    ) -> None:
        self.staging = staging
        self.host = host
        self.sizes = sizes
        self.pitched = [] if pitched is None else pitched
        """Staging address and pitch, host address and pitch, bytes a row, rows."""

    def extend(self, other: Transfers) -> None:
        """Add another's copies."""
        self.staging += other.staging
        self.host += other.host
        self.sizes += other.sizes
        self.pitched += other.pitched

    def cut_at(self, borders: Indices) -> Transfers:
        """The same copies, none of which crosses a border in host memory (ascending addresses)."""
        whole = Transfers([], [], [])
        for staging, host, size in zip(self.staging, self.host, self.sizes, strict=True):
            whole.add_cut(staging, host, size, borders)
        for staging, staging_pitch, host, host_pitch, width, rows in self.pitched:
            row = 0
            while row < rows:
                begin = host + row * host_pitch
                border = _next_border(borders, begin)
                # Rows that end at or before the next border; one that contains it is cut by itself.
                fits = rows - row if border is None else min(rows - row, (border - begin - width) // host_pitch + 1)
                if fits > 0:
                    whole.pitched.append((staging + row * staging_pitch, staging_pitch, begin, host_pitch, width, fits))
                    row += fits
                else:
                    whole.add_cut(staging + row * staging_pitch, begin, width, borders)
                    row += 1
        return whole

    def add_cut(self, staging: int, host: int, size: int, borders: Indices) -> None:
        """Add one contiguous copy, cut at the borders inside it."""
        while size:
            border = _next_border(borders, host)
            part = size if border is None else min(size, border - host)
            self.staging.append(staging)
            self.host.append(host)
            self.sizes.append(part)
            staging, host, size = staging + part, host + part, size - part


def _next_border(borders: Indices, address: int) -> int | None:
    """The first border behind an address."""
    at = int(np.searchsorted(borders, address, side="right"))
    return int(borders[at]) if at < len(borders) else None
