"""The faults of a store that need no time: what they do to the answers and the bytes of one operation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvcr_actors.ports import BatchOutcome, HostMemory, PageBatch, PageOutcome
from kvcr_actors.stores.backend import PageBackend
from kvcr_actors.testing.faults import Fault
from kvcr_actors.testing.host_memory import BytesHostMemory
from kvcr_actors.types import NO_SLOT, PageKey

SCRIBBLE = 0xEE
"""What a read that goes wrong leaves in its host slots."""


class FaultyCalls:
    """A backend's calls, each with a fault of its own (None: as the backend does it).

    `FAIL`, `STALL`, `DROP`, `DUPLICATE` and `LATE` are a matter of when and whether; they change nothing here.
    """

    __slots__ = ("_backend", "_host")

    def __init__(self, backend: PageBackend, host: HostMemory) -> None:
        self._backend = backend
        self._host = host

    def lookup(self, keys: Sequence[PageKey], fault: Fault | None) -> tuple[int, ...]:
        """Look up; truncated: nothing of the second half; corrupt: the first is a miss; silently: all is promised."""
        masks = tuple(map(self._backend.lookup, keys))
        match fault:
            case Fault.TRUNCATE:
                return tuple(mask if index < len(masks) // 2 else 0 for index, mask in enumerate(masks))
            case Fault.CORRUPT:
                return (0, *masks[1:])
            case Fault.CORRUPT_SILENTLY:
                return ((1 << len(self._host.layout.pools)) - 1,) * len(masks)
            case _:
                return masks

    def read(self, batch: PageBatch, fault: Fault | None) -> BatchOutcome:
        """Read; truncated: the second half fails; corrupt: the first page is found damaged; silently: it is not."""
        if fault is Fault.TRUNCATE:
            half = len(batch.keys) // 2
            return self._half_failed(self._backend.read(_head(batch, half), self._host), len(batch.keys))
        outcome = self._backend.read(batch, self._host)
        if outcome.pages[0] is not PageOutcome.OK:
            return outcome
        if fault is Fault.CORRUPT:
            self._backend.discard(batch.keys[:1])
            self.scribble(_head(batch, 1))
            return BatchOutcome((PageOutcome.MISS, *outcome.pages[1:]), "injected: the checksum is wrong")
        if fault is Fault.CORRUPT_SILENTLY:
            for view in _views(batch, 0, self._host):
                view[0] ^= 1
        return outcome

    def write(self, batch: PageBatch, fault: Fault | None) -> BatchOutcome:
        """Write; truncated: the second half fails; corrupt: the first page fails; silently: its bytes are wrong."""
        if fault is Fault.TRUNCATE:
            half = len(batch.keys) // 2
            return self._half_failed(self._backend.write(_head(batch, half), self._host), len(batch.keys))
        if fault is Fault.CORRUPT:
            rest = PageBatch(batch.keys[1:], tuple(slots[1:] for slots in batch.slots), batch.parents[1:])
            outcome = self._backend.write(rest, self._host)
            return BatchOutcome((PageOutcome.FAILED, *outcome.pages), "injected: the checksum is wrong")
        if fault is Fault.CORRUPT_SILENTLY:
            return self._backend.write(*self._damaged_copy(batch))
        return self._backend.write(batch, self._host)

    def scribble(self, batch: PageBatch) -> None:
        """Write nonsense over every host slot of a batch."""
        for index in range(len(batch.keys)):
            for view in _views(batch, index, self._host):
                view[:] = bytes([SCRIBBLE]) * len(view)

    def _half_failed(self, done: BatchOutcome, pages: int) -> BatchOutcome:
        failed = (PageOutcome.FAILED,) * (pages - len(done.pages))
        return BatchOutcome(done.pages + failed, "injected: the rest was not done")

    def _damaged_copy(self, batch: PageBatch) -> tuple[PageBatch, BytesHostMemory]:
        """Copy a batch's slots, one bit of the first page flipped; the host memory itself stays as it is."""
        copy = BytesHostMemory(self._host.layout, len(batch.keys))
        for pool, slots in enumerate(batch.slots):
            size = self._host.layout.pools[pool].page_bytes
            for index, slot in enumerate(slots):
                if slot != NO_SLOT:
                    copy.page(pool, index)[:] = self._host.buffer(pool)[slot * size : (slot + 1) * size]
        slots = tuple(
            tuple(NO_SLOT if slot == NO_SLOT else index for index, slot in enumerate(pool)) for pool in batch.slots
        )
        damaged = PageBatch(batch.keys, slots, batch.parents)
        for view in _views(damaged, 0, copy):
            view[0] ^= 1
        return damaged, copy


def _head(batch: PageBatch, pages: int) -> PageBatch:
    return PageBatch(batch.keys[:pages], tuple(slots[:pages] for slots in batch.slots), batch.parents[:pages])


def _views(batch: PageBatch, index: int, host: HostMemory) -> Iterator[memoryview]:
    for pool, slots in enumerate(batch.slots):
        if slots[index] != NO_SLOT:
            size = host.layout.pools[pool].page_bytes
            yield host.buffer(pool)[slots[index] * size : (slots[index] + 1) * size]
