"""Confirming a hint for hybrid layouts: a promise of side pools counts once the peer has delivered them."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

from kvcr_actors.core.hit_policy import boundaries, longest
from kvcr_actors.types import CacheLayout, PageKey, TrailingPages
from kvcr_actors_kvcr.block_keys import bits
from kvcr_actors_kvcr.blocks import PageBlocks
from kvcr_actors_kvcr.jobs import Steps
from kvcr_actors_kvcr.page_index import Block, PageIndex
from kvcr_actors_kvcr.peers import Peers
from kvcr_actors_kvcr.requests import OpenRequest
from kvcr_actors_kvcr.transfers import Transfers

_BOUNDARY_TRIES = 8


class Confirmer:
    """Finds the longest boundary whose trailing pages the hinted source really has. Lives on the owner thread."""

    def __init__(
        self, layout: CacheLayout, blocks: PageBlocks, index: PageIndex, transfers: Transfers, peers: Peers
    ) -> None:
        self._layout = layout
        self._blocks = blocks
        self._index = index
        self._transfers = transfers
        self._peers = peers

    def confirm(self, keys: Sequence[PageKey], request: OpenRequest) -> Steps[tuple[int, ...]]:
        """The pools held or promised for each key; side pools count only once the peer delivered them.

        Boundaries are tried from the longest down; what was delivered stays claimed until the request ends.
        """
        masks = [self._index.mask(key) for key in keys]
        promised = [
            mask | self._blocks.main if request.promises(key) else mask for key, mask in zip(keys, masks, strict=True)
        ]
        full = [
            mask | self._blocks.side if mask & self._blocks.main == self._blocks.main else mask for mask in promised
        ]
        legal = boundaries(full, self._layout)
        for _ in range(_BOUNDARY_TRIES):
            length = longest(legal)
            if not length or request.ended or self._peers.refuses(request.hint.endpoint) is not None:
                break
            if (yield from self._confirm_boundary(keys[:length], request)):
                return tuple((promised[i] if i < length else 0) | self._index.mask(key) for i, key in enumerate(keys))
            legal &= (1 << length) - 1
        return tuple(self._index.mask(key) for key in keys)

    def _confirm_boundary(self, keys: Sequence[PageKey], request: OpenRequest) -> Steps[bool]:
        """Bring the side blocks of the trailing pages of a prefix here, and keep claims on them."""
        for pool in bits(self._blocks.side):
            policy = self._layout.pools[pool].policy
            window = policy.count if isinstance(policy, TrailingPages) else 1
            first = max(0, len(keys) - window)
            missing = [i for i in range(first, len(keys)) if not self._index.mask(keys[i]) >> pool & 1]
            blocks = [
                Block(self._blocks.key(keys[i], 1 << pool), keys[i], keys[i - 1] if i else None, 1 << pool)
                for i in missing
            ]
            if not blocks:
                continue
            for block in blocks:
                self._index.expect(block)
            started = monotonic()
            entries = yield from self._transfers.confirm(blocks, request.hint)
            self._index.forget(block.key for block in blocks)
            claims = [entry.release_handle for entry in entries.values() if entry.release_handle is not None]
            if request.ended:
                self._transfers.release(claims)  # the answer came after the request's end
                return False
            request.claims += claims
            if len(claims) < len(blocks):
                self._peers.note_failure(request.hint.endpoint, monotonic() - started)
                return False
        return True

    def end_request(self, request: OpenRequest) -> None:
        """Release what the request's confirmations claimed, once."""
        claims, request.claims = request.claims, []
        if claims:
            self._transfers.release(claims)
