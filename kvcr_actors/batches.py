"""Batches of any length, cut into what a store takes at once, and their outcomes put together again."""

from __future__ import annotations

from collections.abc import Sequence

from kvcr_actors.errors import InvalidNodeError
from kvcr_actors.ports import BatchOutcome, HostMemory, PageBatch, PageOutcome
from kvcr_actors.types import KEY_BYTES, NO_SLOT


def check_batch(batch: PageBatch, host: HostMemory) -> None:
    """Raise InvalidNodeError for a batch that does not fit the pools of a host memory and their slots."""
    layout, pages = host.layout, len(batch.keys)
    if len(batch.slots) != len(layout.pools):
        raise InvalidNodeError(f"the batch lists slots of {len(batch.slots)} pools; the layout has {len(layout.pools)}")
    if batch.parents and len(batch.parents) != pages:
        raise InvalidNodeError(f"the batch names {len(batch.parents)} parents for {pages} keys; give one each, or none")
    for key in batch.keys:
        if len(key) != KEY_BYTES:
            raise InvalidNodeError(f"key {key!r} has {len(key)} bytes, not {KEY_BYTES}")
    for index, (pool, own) in enumerate(zip(layout.pools, batch.slots, strict=True)):
        slots = host.slots_of(index)
        if len(own) != pages:
            raise InvalidNodeError(f"pool {pool.name}: {len(own)} slots for {pages} keys; give one each")
        if pages and not (min(own) >= NO_SLOT and max(own) < slots):
            raise InvalidNodeError(f"pool {pool.name}: slots {min(own)} to {max(own)}; it has {slots}, from 0")


def split_batch(batch: PageBatch, pages: int) -> list[PageBatch]:
    """Cut a batch into parts of so many pages, and a last one of the rest."""
    starts = range(0, len(batch.keys), pages)
    return [_part(batch, slice(start, start + pages)) for start in starts]


def _part(batch: PageBatch, part: slice) -> PageBatch:
    return PageBatch(batch.keys[part], tuple(slots[part] for slots in batch.slots), batch.parents[part])


def late_words(verb: str, store: str, free: int) -> str:
    """What a page's outcome says that did not come in time."""
    return f"{verb}: store {store} did not answer by the deadline ({free} bounce pages are free)"


def joined(outcomes: Sequence[BatchOutcome]) -> BatchOutcome:
    """The outcomes of a batch's parts as one, with the words of the first fault."""
    errors = (outcome.error for outcome in outcomes if outcome.error is not None)
    return BatchOutcome(tuple(page for outcome in outcomes for page in outcome.pages), next(errors, None))


def pages_here(outcome: BatchOutcome) -> list[int]:
    """The numbers of the pages whose bytes were read."""
    return [number for number, page in enumerate(outcome.pages) if page is PageOutcome.OK]
