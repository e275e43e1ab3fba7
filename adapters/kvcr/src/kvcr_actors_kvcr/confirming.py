"""Confirming a hint for hybrid layouts: a promise of side pools counts once the peer has delivered them."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

from kvcr_actors.types import CacheLayout, PageKey, TrailingPages
from kvcr_actors_kvcr.block_keys import bits
from kvcr_actors_kvcr.blocks import PageBlocks
from kvcr_actors_kvcr.jobs import Steps
from kvcr_actors_kvcr.page_index import Block, PageIndex
from kvcr_actors_kvcr.peers import Peers
from kvcr_actors_kvcr.requests import OpenRequest
from kvcr_actors_kvcr.transfers import Transfers


class Confirmer:
    """Brings the trailing pages of a boundary from the hinted source, and keeps claims on them.

    Lives on the owner thread.
    """

    def __init__(
        self, layout: CacheLayout, blocks: PageBlocks, index: PageIndex, transfers: Transfers, peers: Peers
    ) -> None:
        self._layout = layout
        self._blocks = blocks
        self._index = index
        self._transfers = transfers
        self._peers = peers

    def confirm(self, keys: Sequence[PageKey], request: OpenRequest) -> Steps[bool]:
        """Bring here the side blocks that a prefix ends in; False if the source does not have all of them.

        What was delivered stays claimed until the request ends, also if something else was missing.
        """
        for pool in bits(self._blocks.side):
            missing = self._missing(keys, pool, request)
            if not missing:
                continue
            if request.ended or self._peers.refuses(request.hint.endpoint) is not None:
                return False
            for block in missing:
                self._index.expect(block)
            started = monotonic()
            entries = yield from self._transfers.confirm(missing, request.hint)
            self._index.forget(block.key for block in missing)
            claims = [entry.release_handle for entry in entries.values() if entry.release_handle is not None]
            if request.ended:
                self._transfers.release(claims)  # the answer came after the request's end
                return False
            request.claims += claims
            if len(claims) < len(missing):
                self._peers.note_failure(request.hint.endpoint, monotonic() - started)
                return False
        return True

    def _missing(self, keys: Sequence[PageKey], pool: int, request: OpenRequest) -> list[Block]:
        """The blocks of one side pool that the prefix needs at its end, that were promised and are not here."""
        policy = self._layout.pools[pool].policy
        window = policy.count if isinstance(policy, TrailingPages) else 1
        return [
            Block(self._blocks.key(keys[i], 1 << pool), keys[i], keys[i - 1] if i else None, 1 << pool)
            for i in range(max(0, len(keys) - window), len(keys))
            if keys[i] in request.promised and not self._index.mask(keys[i]) >> pool & 1
        ]

    def end_request(self, request: OpenRequest) -> None:
        """Release what the request's confirmations claimed, once."""
        claims, request.claims = request.claims, []
        if claims:
            self._transfers.release(claims)
