"""The store's operations as jobs of the owner thread: write, read, align."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic

import structlog
from kvcr.types import CacheTier

from kvcr_actors import CacheLayout, PageKey, router_key
from kvcr_actors.ports import BatchOutcome, PageBatch, PageOutcome
from kvcr_actors_kvcr.blocks import PageBlocks
from kvcr_actors_kvcr.hints import FetchHint
from kvcr_actors_kvcr.jobs import Steps
from kvcr_actors_kvcr.options import BLOCKS_A_CALL, KvcrOptions
from kvcr_actors_kvcr.page_index import Block, PageIndex
from kvcr_actors_kvcr.page_layout import PageLayout, batch_mask
from kvcr_actors_kvcr.peers import Peers
from kvcr_actors_kvcr.records import StoreCounters
from kvcr_actors_kvcr.requests import OpenRequest
from kvcr_actors_kvcr.transfers import Piece, Transfers, in_calls

log = structlog.get_logger()


class Mover:
    """What the store does, step by step. All of it runs on the owner thread.

    `retired` says that local copies cannot be trusted any more: nothing is written or read then.
    `writes` are the pools that this rank stores; the others are left to the owner of replicated pages. `lost` hears of
    pages that the owner turned out not to have.
    """

    def __init__(
        self,
        layout: CacheLayout,
        pages: PageLayout,
        blocks: PageBlocks,
        index: PageIndex,
        transfers: Transfers,
        counters: StoreCounters,
        options: KvcrOptions,
        capacity_pages: int,
        *,
        retired: Callable[[], bool],
        peers: Peers,
        writes: int,
        lost: Callable[[Sequence[PageKey]], None],
    ) -> None:
        self._layout = layout
        self._pages = pages
        self._blocks = blocks
        self._index = index
        self._transfers = transfers
        self._counters = counters
        self._options = options
        self._capacity = capacity_pages
        self._retired = retired
        self._peers = peers
        self._writes = writes
        self._lost = lost

    # Writing.

    def write(self, batch: PageBatch, clears: int) -> Steps[BatchOutcome]:
        """Store pages, heads first, one call's worth at a time; none after a clear beyond the `clears` before."""
        outcomes = [PageOutcome.FAILED] * len(batch.keys)
        if self._retired():
            return BatchOutcome(tuple(outcomes), "the store is retired: restart the process")
        self.align(batch.keys)
        error: str | None = None
        masks = [batch_mask(batch.slots, index) & self._writes for index in range(len(batch.keys))]
        for call in in_calls(
            range(len(batch.keys)),
            lambda i: self._pages.page_bytes(masks[i]),
            self._options.chunk_bytes,
            lambda i: max(1, sum(1 for _ in self._blocks.groups(masks[i]))),
        ):
            if self._blocks.clears != clears:
                return BatchOutcome((PageOutcome.FAILED,) * len(batch.keys), "the store was cleared")
            error = (yield from self._write_call(batch, call, masks, outcomes)) or error
            self.align(batch.keys)
        return BatchOutcome(tuple(outcomes), error)

    def _write_call(
        self, batch: PageBatch, call: Sequence[int], masks: Sequence[int], outcomes: list[PageOutcome]
    ) -> Steps[str | None]:
        parents = batch.parents or (None,) * len(batch.keys)
        pieces: dict[int, list[Piece]] = {}
        for index in call:
            new = self._blocks.missing(batch.keys[index], parents[index], masks[index])
            if new:
                pieces[index] = [Piece(index, block, block.mask) for block in new]
            elif masks[index]:
                outcomes[index] = PageOutcome.OK
                self._counters.already_held += 1
            elif batch_mask(batch.slots, index):
                outcomes[index] = PageOutcome.OK  # all of it is left to the owner
        flat = [piece for some in pieces.values() for piece in some]
        if not flat:
            return None if all(outcomes[index] is PageOutcome.OK for index in call) else "a page without components"
        started = monotonic()
        protected = self._protected(batch.keys, len(pieces))[: max(0, BLOCKS_A_CALL - len(flat))]
        entries = yield from self._transfers.deposit(batch, flat, protected)
        self._index.forget(piece.block for piece in flat)
        stored = {index for index, some in pieces.items() if all(entries[piece.block.key].success for piece in some)}
        for index in stored:
            outcomes[index] = PageOutcome.OK
        self._counters.written += len(stored)
        refused = [index for index in pieces if index not in stored]
        if not refused:
            return None
        return self._note_refused(refused, outcomes, any_stored=bool(stored), seconds=monotonic() - started)

    def _note_refused(
        self, refused: Sequence[int], outcomes: list[PageOutcome], *, any_stored: bool, seconds: float
    ) -> str:
        """The runner says FAILED for no room and for a fault alike: no room is what it says at once of some pages."""
        in_time = seconds < self._options.operation_timeout_ms / 1_000
        if in_time and (any_stored or len(self._index) + len(refused) > self._capacity):
            for index in refused:
                outcomes[index] = PageOutcome.FULL
            self._counters.full += len(refused)
            return f"the store's {self._capacity} pages are held by claims and by the batch itself"
        self._counters.failed += len(refused)
        return f"the runner failed to copy {len(refused)} pages after {seconds:.3f} s"

    def _protected(self, keys: Sequence[PageKey], new: int) -> list[Block]:
        """The blocks of the batch that are held already, where its own new pages might evict them."""
        if len(self._index) + new <= self._capacity:
            return []
        held = [block for key in keys for block in self._blocks.all_held(key)]
        return [block for block in held if CacheTier.LOCAL_G2 in block.tiers]

    def align(self, keys: Sequence[PageKey]) -> None:
        """Make a prefix (root to tail) recent, its head the most."""
        if self._options.align_storage_prefix:
            self._transfers.align([block for key in keys for block in self._blocks.all_held(key)])

    # Reading.

    def read(self, batch: PageBatch, request: OpenRequest | None, owner: FetchHint | None) -> Steps[BatchOutcome]:
        """Read what is held here out of the pool, then what a hint or the owner rank promises, from there."""
        outcomes = [PageOutcome.MISS] * len(batch.keys)
        masks = [batch_mask(batch.slots, index) for index in range(len(batch.keys))]
        errors: list[str] = []
        if not self._retired():
            local = [index for index, key in enumerate(batch.keys) if self._blocks.held(key, masks[index])]
            yield from self._read_local(batch, local, masks, outcomes)
            left = sorted({*range(len(batch.keys))}.difference(local))
            if request is not None:
                errors += yield from self._read_remote(batch, left, masks, outcomes, request.hint)
            if owner is not None:
                errors += yield from self._read_owners(batch, left, masks, outcomes, owner)
            read = [key for key, outcome in zip(batch.keys, outcomes, strict=True) if outcome is PageOutcome.OK]
            if len(read) > 1:  # one page is as recent as its fetch made it
                self.align(read)
        self._counters.read += outcomes.count(PageOutcome.OK)
        self._counters.missed += outcomes.count(PageOutcome.MISS)
        return BatchOutcome(tuple(outcomes), errors[0] if errors else None)

    def _passes(self) -> list[int]:
        """The pools that are read together."""
        pools = len(self._layout.pools)
        return [(1 << pools) - 1] if self._options.combine_page_reads else [1 << pool for pool in range(pools)]

    def _read_local(
        self, batch: PageBatch, local: Sequence[int], masks: Sequence[int], outcomes: list[PageOutcome]
    ) -> Steps[None]:
        for index in local:
            outcomes[index] = PageOutcome.OK
        for pools in self._passes():
            for pieces in self._by_layout(batch, local, masks, pools, outcomes):
                for call in in_calls(pieces, self._piece_bytes, self._options.chunk_bytes):
                    held = [piece for piece in call if self._index.block(piece.block.key) is piece.block]
                    good = yield from self._transfers.fetch(batch, held) if held else _nothing()
                    fine = {id(piece) for piece, ok in zip(held, good, strict=True) if ok}
                    for piece in call:
                        if id(piece) not in fine:
                            self._note_unread(batch.keys[piece.index], piece, outcomes)

    def _by_layout(
        self, batch: PageBatch, local: Sequence[int], masks: Sequence[int], pools: int, outcomes: list[PageOutcome]
    ) -> list[list[Piece]]:
        """The blocks to read, those of one layout together. A page that went since the last pass is a miss."""
        by_layout: dict[int, list[Piece]] = {}
        for index in local:
            held = self._blocks.held(batch.keys[index], masks[index])
            if held is None:
                outcomes[index] = PageOutcome.MISS
            elif outcomes[index] is PageOutcome.OK:
                for block in held:
                    if block.mask & masks[index] & pools:
                        piece = Piece(index, block, block.mask & masks[index] & pools)
                        by_layout.setdefault(block.mask, []).append(piece)
        return list(by_layout.values())

    def _note_unread(self, key: PageKey, piece: Piece, outcomes: list[PageOutcome]) -> None:
        if self._index.block(piece.block.key) is piece.block:
            self._counters.damaged += 1
            self._blocks.damaged(key)
        outcomes[piece.index] = PageOutcome.MISS

    def _read_owners(
        self, batch: PageBatch, left: Sequence[int], masks: Sequence[int], outcomes: list[PageOutcome], owner: FetchHint
    ) -> Steps[list[str]]:
        """Read the owner rank's copies; it has no other rank's shards, so a page that lacks one here is not asked."""
        shards = self._blocks.sharded
        asked = [
            index
            for index in left
            if outcomes[index] is PageOutcome.MISS and not masks[index] & shards & ~self._index.mask(batch.keys[index])
        ]
        errors = yield from self._read_remote(batch, asked, masks, outcomes, owner)
        if self._peers.refuses(owner.endpoint) is None:  # else it did not say that it lacks them
            self._lost([batch.keys[index] for index in asked if outcomes[index] is not PageOutcome.OK])
        return errors

    def _read_remote(
        self,
        batch: PageBatch,
        left: Sequence[int],
        masks: Sequence[int],
        outcomes: list[PageOutcome],
        hint: FetchHint,
    ) -> Steps[list[str]]:
        """Read what is still missing of the pages `left` and named by a hint, all but the pools that are held here."""
        errors: list[str] = []
        wanted = [
            index
            for index in left
            if outcomes[index] is PageOutcome.MISS and router_key(batch.keys[index]) in hint.hashes
        ]
        if not wanted:
            return errors
        self._counters.hinted += len(wanted)
        good = dict.fromkeys(wanted, True)
        # Decided once: what is evicted meanwhile was not asked of the peer, and is a miss below.
        here = [self._index.mask(key) & mask for key, mask in zip(batch.keys, masks, strict=True)]
        for pools in self._passes():
            pieces = [
                Piece(index, Block(self._blocks.key(batch.keys[index], group), batch.keys[index], None, group), group)
                for index in wanted
                for group in self._blocks.groups(masks[index] & ~here[index] & pools)
            ]
            for call in in_calls(pieces, self._piece_bytes, self._options.chunk_bytes):
                error = yield from self._deliver_call(batch, call, hint, good)
                errors += [error] if error else []
        delivered = [index for index, fine in good.items() if fine]
        for index in delivered:
            outcomes[index] = PageOutcome.OK
        yield from self._read_local(batch, [index for index in delivered if here[index]], here, outcomes)
        self._counters.delivered += len(delivered)
        self._counters.partial_deliveries += 0 < len(delivered) < len(good)
        return errors

    def _deliver_call(
        self, batch: PageBatch, call: Sequence[Piece], hint: FetchHint, good: dict[int, bool]
    ) -> Steps[str | None]:
        refusal = self._peers.refuses(hint.endpoint)
        if refusal is not None:
            good.update(dict.fromkeys((piece.index for piece in call), False))
            return f"{hint.endpoint} is not asked: {refusal.value}"
        started = monotonic()
        entries, verified = yield from self._transfers.deliver(batch, call, hint)
        for piece, fine in zip(call, verified, strict=True):
            good[piece.index] = good[piece.index] and fine
            self._counters.damaged += entries[piece.block.key].success and not fine
        missing = sum(not entries[piece.block.key].success for piece in call)
        if not missing:
            return None
        self._counters.failed_deliveries += missing == len(call)
        seconds = monotonic() - started
        why = self._peers.note_missing(hint.endpoint, missing, len(call), seconds)
        log.warning("kvcr.not_delivered", reason=why, seconds=round(seconds, 3))
        return why

    def _piece_bytes(self, piece: Piece) -> int:
        return self._pages.page_bytes(piece.mask)


def _nothing() -> Steps[list[bool]]:
    return []
    yield  # a generator without steps
