"""The runner's operations as steps of a job: deposit, fetch and copy, deliver from a peer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from time import monotonic
from typing import TypeVar

import attrs
from kvcr import KVCR
from kvcr.types import BlockKey, MemoryRef, OpEntryResult, ReleaseHandle

from kvcr_actors.ports import PageBatch
from kvcr_actors_kvcr.block_keys import bits
from kvcr_actors_kvcr.hints import FetchHint
from kvcr_actors_kvcr.jobs import Entries, Steps, Wait
from kvcr_actors_kvcr.options import BLOCKS_A_CALL
from kvcr_actors_kvcr.page_index import Block
from kvcr_actors_kvcr.page_layout import DIGEST_BYTES, PageLayout
from kvcr_actors_kvcr.pool_memory import copy_bytes
from kvcr_actors_kvcr.records import StoreCounters, TransferRecord, log_record

T = TypeVar("T")


@attrs.frozen
class Piece:
    """A block and the page of a batch that it belongs to; `mask` are the pools wanted of it."""

    index: int
    block: Block
    mask: int


class DigestSlots:
    """Slots of the staging area for digests; empty where digests are not kept beside the pages."""

    def __init__(self, slots: int) -> None:
        self._free = list(range(slots))
        self._on = slots > 0

    @contextmanager
    def take(self, pieces: int) -> Generator[list[int | None]]:
        """Lend a slot for each piece; None each where digests are off."""
        if not self._on:
            yield [None] * pieces
            return
        taken, self._free = self._free[:pieces], self._free[pieces:]
        if len(taken) < pieces:
            self._free += taken
            raise RuntimeError("no slots for digests are left: too many transfers are not quiet")
        try:
            yield list(taken)
        finally:
            self._free += taken


class Transfers:
    """Steps of jobs. All of it runs on the owner thread; a call carries `BLOCKS_A_CALL` blocks at most."""

    def __init__(
        self,
        kvcr: Callable[[], KVCR],
        layout: PageLayout,
        counters: StoreCounters,
        *,
        verify: bool,
        records: bool,
        digest_slots: int,
    ) -> None:
        self._kvcr = kvcr
        self._layout = layout
        self._counters = counters
        self._verify = verify
        self._records = records
        self._in_pool = digest_slots > 0
        self._digest_slots = DigestSlots(digest_slots)
        self._request_ids = count(1)

    def digest(self, batch: PageBatch, piece: Piece, stored: list[MemoryRef] | None = None) -> bytes:
        """The digest of a block, name and order included: of host memory, and of the pool for what was not copied."""
        block = piece.block
        state = hashlib.blake2b(block.key + block.mask.to_bytes(4, "big"), digest_size=DIGEST_BYTES)
        for pool in bits(block.mask):
            if piece.mask >> pool & 1:
                state.update(self._layout.host_view(pool, int(batch.slots[pool][piece.index])))
            else:
                state.update(self._layout.pool_bytes_of(pool, stored or []))
        return state.digest()

    def deposit(self, batch: PageBatch, pieces: Sequence[Piece], protect: Iterable[Block]) -> Steps[Entries]:
        """Store blocks out of host slots; `protect` are blocks that must not be evicted for them."""
        started = monotonic()
        with self._digest_slots.take(len(pieces)) as slots:
            blocks: dict[BlockKey, list[MemoryRef]] = {}
            for piece, slot in zip(pieces, slots, strict=True):
                if self._verify:
                    piece.block.digest = self.digest(batch, piece)
                if slot is not None and piece.block.digest is not None:
                    self._layout.digest_view(slot)[:] = piece.block.digest
                blocks[piece.block.key] = self._layout.references(piece.mask, batch.slots, piece.index, slot)
            some = next(iter(blocks.values()))
            for block in protect:
                # Held already: naming it in the call is what keeps it, and what it is said to lie in is not looked at.
                blocks.setdefault(block.key, some)
            handle = self._kvcr().deposit(blocks)
            entries = yield Wait(handle, self._bytes(pieces))
        done = [piece for piece in pieces if entries[piece.block.key].success]
        self._counters.bytes_written += self._bytes(done)
        self._counters.spans_written += self._spans(done)
        self._record("deposit", "host", pieces, done, started)
        return entries

    def fetch(self, batch: PageBatch, pieces: Sequence[Piece]) -> Steps[list[bool]]:
        """Claim blocks of one layout in the runner's pool, copy the pools wanted to host slots, release."""
        started = monotonic()
        kvcr = self._kvcr()
        handle = kvcr.fetch(
            [piece.block.key for piece in pieces], expected_layout=self._layout.labels(pieces[0].block.mask)
        )
        entries = yield Wait(handle, 0)
        claims: list[ReleaseHandle] = []
        good: list[bool] = []
        try:
            for piece in pieces:
                entry = entries[piece.block.key]
                if entry.release_handle is not None:
                    claims.append(entry.release_handle)
                good.append(entry.success and self._copy(batch, piece, entry))
        finally:
            kvcr.release(claims)
        done = [piece for piece, fine in zip(pieces, good, strict=True) if fine]
        self._counters.bytes_read += self._bytes(done)
        self._counters.spans_read += self._spans(done)
        self._record("fetch", "pool", pieces, done, started)
        return good

    def _copy(self, batch: PageBatch, piece: Piece, entry: OpEntryResult) -> bool:
        stored = entry.descriptors or []
        for destination, source, size in self._layout.moves(piece.mask, batch.slots, piece.index, stored):
            copy_bytes(destination, source, size)
        if not self._verify:
            return True
        expected = self._layout.stored_digest(stored) if self._in_pool else piece.block.digest
        return expected is None or self.digest(batch, piece, stored) == expected

    def deliver(self, batch: PageBatch, pieces: Sequence[Piece], hint: FetchHint) -> Steps[tuple[Entries, list[bool]]]:
        """Have a peer write blocks straight into host slots. Each operation has a request id of its own."""
        started = monotonic()
        kvcr, request = self._kvcr(), f"deliver-{next(self._request_ids)}"
        with self._digest_slots.take(len(pieces)) as slots:
            blocks = {
                piece.block.key: self._layout.references(piece.mask, batch.slots, piece.index, slot)
                for piece, slot in zip(pieces, slots, strict=True)
            }
            kvcr.submit_hint(hint.envelope(request), request)
            try:
                entries = yield Wait(kvcr.deliver(blocks, request), self._bytes(pieces), hint.endpoint)
            finally:
                kvcr.discard_hint(request)
            good = [
                entries[piece.block.key].success
                and (slot is None or self.digest(batch, piece) == bytes(self._layout.digest_view(slot)))
                for piece, slot in zip(pieces, slots, strict=True)
            ]
        done = [piece for piece, fine in zip(pieces, good, strict=True) if fine]
        self._counters.bytes_delivered += self._bytes(done)
        self._counters.spans_delivered += self._spans(done)
        self._record("deliver", hint.endpoint, pieces, done, started)
        return entries, good

    def confirm(self, blocks: Sequence[Block], absent: Sequence[Block], hint: FetchHint) -> Steps[Entries]:
        """Claim blocks of one layout in the runner's own pool; a peer writes those that are absent from it."""
        started = monotonic()
        kvcr, request = self._kvcr(), f"confirm-{next(self._request_ids)}"
        kvcr.submit_hint(hint.envelope(request), request)
        try:
            keys = [block.key for block in blocks]
            handle = kvcr.fetch(keys, request, expected_layout=self._layout.labels(blocks[0].mask))
            entries = yield Wait(handle, 0, hint.endpoint if absent else "")
        finally:
            kvcr.discard_hint(request)
        pieces = [Piece(index, block, block.mask) for index, block in enumerate(absent)]
        done = [piece for piece in pieces if entries[piece.block.key].success]
        self._counters.confirmed += len(done)
        self._counters.bytes_delivered += self._bytes(done)
        self._counters.spans_delivered += self._spans(done)
        self._record("confirm", hint.endpoint, pieces, done, started)
        return entries

    def align(self, blocks: Sequence[Block]) -> None:
        """Make blocks recent, the first the most: each call has a later time than the one before, so it comes last."""
        kvcr = self._kvcr()
        for end in range(len(blocks), 0, -BLOCKS_A_CALL):
            call = blocks[max(0, end - BLOCKS_A_CALL) : end]
            kvcr.align_sequence([block.key for block in call], use_current_time=True)

    def release(self, claims: Sequence[ReleaseHandle]) -> None:
        """Give claims back, once."""
        self._kvcr().release(claims)

    def _bytes(self, pieces: Iterable[Piece]) -> int:
        return sum(self._layout.page_bytes(piece.mask) for piece in pieces)

    def _spans(self, pieces: Iterable[Piece]) -> int:
        return sum(len(self._layout.spans[pool]) for piece in pieces for pool in bits(piece.mask))

    def _record(
        self, direction: str, source: str, pieces: Sequence[Piece], done: Sequence[Piece], started: float
    ) -> None:
        if self._records:
            log_record(
                TransferRecord(
                    direction=direction,
                    source=source,
                    pages=len({piece.index for piece in pieces}),
                    succeeded=len({piece.index for piece in done}),
                    spans=self._spans(done),
                    bytes=self._bytes(done),
                    seconds=monotonic() - started,
                )
            )


def _one(_item: object) -> int:
    return 1


def in_calls(
    items: Sequence[T], size_of: Callable[[T], int], most_bytes: int, blocks_of: Callable[[T], int] = _one
) -> Iterator[Sequence[T]]:
    """Cut items into calls of `BLOCKS_A_CALL` blocks and `most_bytes` at most; one item may be larger."""
    call: list[T] = []
    size = blocks = 0
    for item in items:
        more, others = size_of(item), blocks_of(item)
        if call and (blocks + others > BLOCKS_A_CALL or size + more > most_bytes):
            yield call
            call, size, blocks = [], 0, 0
        call.append(item)
        size += more
        blocks += others
    if call:
        yield call
