"""Confirming a hint for hybrid layouts: a promise of side pools counts once the peer has delivered them."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

from kvcr_actors import CacheLayout, PageKey, TrailingPages
from kvcr_actors_kvcr.block_keys import bits
from kvcr_actors_kvcr.blocks import PageBlocks
from kvcr_actors_kvcr.jobs import Steps
from kvcr_actors_kvcr.page_index import Block, PageIndex
from kvcr_actors_kvcr.peers import Peers
from kvcr_actors_kvcr.requests import OpenRequest
from kvcr_actors_kvcr.transfers import Transfers, in_calls


class Confirmer:
    """Brings the trailing pages of a boundary from the hinted source, and keeps claims on them.

    Lives on the owner thread.
    """

    def __init__(
        self,
        layout: CacheLayout,
        blocks: PageBlocks,
        index: PageIndex,
        transfers: Transfers,
        peers: Peers,
        chunk_bytes: int,
    ) -> None:
        self._layout = layout
        self._blocks = blocks
        self._index = index
        self._transfers = transfers
        self._peers = peers
        self._chunk_bytes = chunk_bytes

    @property
    def has_side_pools(self) -> bool:
        """Whether the layout has anything to confirm."""
        return bool(self._blocks.side)

    def confirm(self, keys: Sequence[PageKey], request: OpenRequest) -> Steps[bool]:
        """Claim the side blocks that a prefix ends in, from the source what is not here; False if any is missing.

        What was claimed stays so until the request ends, also if something else was missing.
        """
        for pool in bits(self._blocks.side):
            size = self._layout.pools[pool].page_bytes
            for call in in_calls(self._wanted(keys, pool, request), lambda _, size=size: size, self._chunk_bytes):
                if not (yield from self._claim(call, request)):
                    return False
        return True

    def _wanted(self, keys: Sequence[PageKey], pool: int, request: OpenRequest) -> list[Block]:
        """The blocks of one side pool at the prefix's end that are held here or were promised, and not claimed yet."""
        policy = self._layout.pools[pool].policy
        window = policy.count if isinstance(policy, TrailingPages) else 1
        wanted: list[Block] = []
        for index in range(max(0, len(keys) - window), len(keys)):
            key = self._blocks.key(keys[index], 1 << pool)
            held = self._index.block(key)
            if key not in request.claims and (held is not None or keys[index] in request.promised):
                parent = keys[index - 1] if index else None
                wanted.append(held if held is not None else Block(key, keys[index], parent, 1 << pool))
        return wanted

    def _claim(self, call: Sequence[Block], request: OpenRequest) -> Steps[bool]:
        absent = [block for block in call if not block.tiers]
        if request.ended or (absent and self._peers.refuses(request.hint.endpoint) is not None):
            return False
        for block in absent:
            self._index.expect(block)
        started = monotonic()
        entries = yield from self._transfers.confirm(call, absent, request.hint)
        self._index.forget(absent)
        claims = {key: entry.release_handle for key, entry in entries.items() if entry.release_handle is not None}
        if request.ended:
            self._transfers.release(list(claims.values()))  # the answer came after the request's end
            return False
        request.claims |= claims
        if missing := sum(block.key not in claims for block in absent):
            self._peers.note_missing(request.hint.endpoint, missing, len(absent), monotonic() - started)
        return len(claims) == len(call)

    def end_request(self, request: OpenRequest) -> None:
        """Release what the request's confirmations claimed, once."""
        claims, request.claims = request.claims, {}
        if claims:
            self._transfers.release(list(claims.values()))
