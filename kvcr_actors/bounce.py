"""Bounce slots: memory between a caller and a store, so that what a store does late never touches the caller's.

A part of a batch leases as many slots as it has pages. The lease has two holders: the call, until it has copied or
given up, and the store's operation, until it is quiet. The slots are free when neither holds them, so a read that
answers an hour late writes where nobody looks, and its slots come back then. Only `copy_pages` is for any thread.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import anyio
import attrs

from kvcr_actors.core.arena import SlotArena
from kvcr_actors.ports import HostMemory
from kvcr_actors.transfers import Operation
from kvcr_actors.types import NO_SLOT, Components


@attrs.define(eq=False)
class Lease:
    """The slots of one part. Made by the call, on its thread, before it has any."""

    slots: tuple[int, ...] = ()
    """One a page, once they are taken; they stay known after the end."""
    is_wanted: bool = True
    """Whether the call still waits, or copies."""
    in_use: bool = False
    """Whether an operation may touch the slots."""
    runs: list[range] = attrs.field(factory=list[range])
    """What the arena gave, and gets back."""

    def components(self, wanted: Components) -> Components:
        """The leased slots in the place of the caller's, pool by pool."""
        return tuple(
            tuple(NO_SLOT if slot == NO_SLOT else own for slot, own in zip(slots, self.slots, strict=True))
            for slots in wanted
        )


class BounceSlots:
    """Gives slots to leases, first come, first served."""

    def __init__(self, slots: int) -> None:
        self.capacity = slots
        self._arena = SlotArena(slots)
        self._taken = 0
        self._queue: deque[tuple[Lease, int, anyio.Event]] = deque()

    @property
    def free(self) -> int:
        """Slots that nobody holds."""
        return self.capacity - self._taken

    async def take(self, lease: Lease, pages: int) -> bool:
        """Wait for slots, `capacity` at most; False if the call gave up first. The caller sets the deadline."""
        if not lease.is_wanted:
            return False
        if not self._queue and self._grant(lease, pages):
            return True
        entry = (lease, pages, anyio.Event())
        self._queue.append(entry)
        try:
            await entry[2].wait()
        finally:
            if entry in self._queue:
                self._queue.remove(entry)
                self._serve()
        return bool(lease.slots)

    def lend(self, lease: Lease, operation: Operation[Any]) -> None:
        """Let an operation hold the slots until it is quiet."""
        lease.in_use = True

        def give_back() -> None:
            lease.in_use = False
            self._end(lease)

        operation.when_quiet(give_back)

    def let_go(self, lease: Lease) -> None:
        """The call needs the slots no more, or waits for them no more."""
        lease.is_wanted = False
        for _, _, turn in [entry for entry in self._queue if entry[0] is lease]:
            turn.set()
        self._end(lease)

    def _grant(self, lease: Lease, pages: int) -> bool:
        runs = self._arena.allocate(pages)
        if runs is None:
            return False
        self._taken += pages
        lease.runs = runs
        lease.slots = tuple(slot for run in runs for slot in run)
        return True

    def _end(self, lease: Lease) -> None:
        if lease.is_wanted or lease.in_use:
            return
        runs, lease.runs = lease.runs, []
        for run in runs:
            self._arena.free(run.start, len(run))
            self._taken -= len(run)
        self._serve()

    def _serve(self) -> None:
        while self._queue:
            lease, pages, turn = self._queue[0]
            if lease.is_wanted and not self._grant(lease, pages):
                return
            self._queue.popleft()
            turn.set()


class CopySide:
    """Where the pools of a host memory begin, for copies between two of them; it keeps the memory alive."""

    def __init__(self, memory: HostMemory) -> None:
        self.layout = memory.layout
        self._exports = [
            (ctypes.c_char * 1).from_buffer(memory.buffer(pool)) for pool in range(len(memory.layout.pools))
        ]
        self.addresses = [ctypes.addressof(export) for export in self._exports]


def copy_pages(
    destination: CopySide, to: Components, source: CopySide, out_of: Components, pages: Iterable[int]
) -> None:
    """Copy the components of some of a batch's pages, by their numbers (ascending), between slots of two memories.

    Neighbours on both sides go as one copy, without the GIL.
    """
    numbers = tuple(pages)
    for pool, spec in enumerate(source.layout.pools):
        size = spec.page_bytes
        there, here = destination.addresses[pool], source.addresses[pool]
        for first_to, first_out_of, count in _runs(to[pool], out_of[pool], numbers):
            ctypes.memmove(there + first_to * size, here + first_out_of * size, count * size)


def _runs(to: Sequence[int], out_of: Sequence[int], pages: Iterable[int]) -> Iterator[tuple[int, int, int]]:
    start_to = start_out_of = count = 0
    for page in pages:
        if to[page] == NO_SLOT:
            continue
        if count and to[page] == start_to + count and out_of[page] == start_out_of + count:
            count += 1
            continue
        if count:
            yield start_to, start_out_of, count
        start_to, start_out_of, count = to[page], out_of[page], 1
    if count:
        yield start_to, start_out_of, count
