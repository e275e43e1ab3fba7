"""The copies between staging and scattered host slots: as few and as long as the slots allow."""

from __future__ import annotations

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


class HostPairs:
    """One pool's pairs with what its copies need: `page_bytes`, and how many slots a registered chunk has."""

    __slots__ = ("_chunk_slots", "_first", "_runs", "count", "page_bytes", "pairs", "pool")

    def __init__(self, pairs: Pairs, page_bytes: int, chunk_slots: int) -> None:
        self.pairs = pairs
        self.pool = pairs.pool
        self.count = len(pairs)
        self.page_bytes = page_bytes
        self._chunk_slots = chunk_slots
        first, last = int(pairs.host_slots[0]), int(pairs.host_slots[-1])
        self._first = first if pairs.one_run and first // chunk_slots == last // chunk_slots else None
        """The first slot, if all are neighbours in one chunk: the case that must cost little."""
        self._runs: HostRuns | None = None

    def transfers(self, start: int, end: int, column: int, width: int, staging: int, host: int) -> Transfers:
        """List the copies of pairs `[start, end)`: of each page the `width` bytes from byte `column` on.

        In staging the pages stand one after the other from address `staging` on; `host` is the address of slot 0.
        """
        if self._first is not None:
            return self._one_run(self._first + start, end - start, column, width, staging, host)
        runs = self._runs_between(start, end)
        if width == self.page_bytes:
            rows, slots = staging + runs.starts * width, host + runs.slots * width
            return Transfers(rows.tolist(), slots.tolist(), (runs.lengths * width).tolist())
        host += column
        pitched = [
            (staging + first * width, host + slot * self.page_bytes, width, length, self.page_bytes)
            for first, slot, length in runs.long
        ]
        rows, slots = staging + runs.short_pairs * width, host + runs.short_slots * self.page_bytes
        return Transfers(rows.tolist(), slots.tolist(), [width] * len(rows), pitched)

    def direct_transfers(
        self, planes: range, plane_bytes: int, addresses: Indices, stride: int, host: int
    ) -> Transfers:
        """List the copies of every pair between host and the planes themselves, one a page and plane.

        `addresses` are where the pool's planes begin, `stride` is the bytes from page to page in them.
        """
        inside = self.pairs.device_pages * stride
        slots = self.pairs.host_slots * self.page_bytes + host
        device = (addresses[planes.start : planes.stop, None] + inside).ravel()
        columns = np.arange(planes.start, planes.stop)[:, None] * plane_bytes
        return Transfers(device.tolist(), (columns + slots).ravel().tolist(), [plane_bytes] * len(device))

    def _one_run(self, slot: int, count: int, column: int, width: int, staging: int, host: int) -> Transfers:
        address = host + slot * self.page_bytes + column
        if width == self.page_bytes:
            return Transfers([staging], [address], [count * width])
        if count >= PITCHED_PAGES:
            return Transfers([], [], [], [(staging, address, width, count, self.page_bytes)])
        rows = range(count)
        return Transfers(
            [staging + row * width for row in rows], [address + row * self.page_bytes for row in rows], [width] * count
        )

    def _runs_between(self, start: int, end: int) -> HostRuns:
        if start or end < self.count:
            return HostRuns.of(self.pairs.host_slots[start:end], self._chunk_slots)
        if self._runs is None:
            self._runs = HostRuns.of(self.pairs.host_slots, self._chunk_slots)
        return self._runs


class Transfers:
    """Copies between host addresses and staging (or planes): contiguous ones, and ones pitched in host memory."""

    __slots__ = ("host", "pitched", "sizes", "staging")

    def __init__(
        self,
        staging: list[int],
        host: list[int],
        sizes: list[int],
        pitched: list[tuple[int, int, int, int, int]] | None = None,
    ) -> None:
        self.staging = staging
        self.host = host
        self.sizes = sizes
        self.pitched = [] if pitched is None else pitched
        """Staging address, host address, bytes a row, rows, bytes from row to row in host memory."""

    def extend(self, other: Transfers) -> None:
        """Add another's copies."""
        self.staging += other.staging
        self.host += other.host
        self.sizes += other.sizes
        self.pitched += other.pitched
