"""One stored event in the making: a chain of blocks of one context, within the wire's limits."""

from __future__ import annotations

from typing import Final

import attrs

from kvcr_actors.core.inventory import Holding
from kvcr_actors.core.keys import router_key
from kvcr_actors.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, Dialect, WireEvent, WireHash
from kvcr_actors.types import PageContext, PageKey

HASH_BYTES: Final = 9
EVENT_BYTES: Final = 512
"""The most that msgpack takes for a hash, and for an event without its blocks, salt and adapter."""

_TOKEN_BYTES = 5


@attrs.frozen
class Limits:
    """What one stored or removed event may hold."""

    blocks: int
    bytes: int

    @property
    def hashes(self) -> int:
        """The most hashes of an event that has nothing else."""
        return max(1, min(self.blocks, (self.bytes - EVENT_BYTES) // HASH_BYTES))


class Chain:
    """Blocks root to tail below `parent`, `room` of them at most; 0 is a context whose blocks are too large."""

    __slots__ = ("_context", "_hashes", "_names", "_parent", "_pieces", "room")

    def __init__(self, parent: PageKey | None, context: PageContext, limits: Limits) -> None:
        self._parent = parent
        self._context = context
        self._names = len((context.salt or "").encode()) + len((context.adapter or "").encode())
        self._hashes: list[WireHash] = []
        self._pieces: list[tuple[PageContext, int, int]] = []
        block = HASH_BYTES + _TOKEN_BYTES * context.page_tokens + 1
        if context.adapter is not None:
            block += self._names + 8
        self.room = max(0, min(limits.blocks, (limits.bytes - EVENT_BYTES - 2 * self._names) // block))

    def takes(self, context: PageContext) -> bool:
        """Whether a further block of that context may join."""
        mine = self._context
        return self.room > 0 and (
            context is mine
            or (
                context.page_tokens == mine.page_tokens
                and context.salt == mine.salt
                and context.adapter == mine.adapter
            )
        )

    def add(self, block_hash: int, context: PageContext, page: int) -> None:
        """Append a block that it takes."""
        self.room -= 1
        self._hashes.append(block_hash)
        pieces = self._pieces
        if pieces:
            last, first, end = pieces[-1]
            if last is context and end == page:
                pieces[-1] = (context, first, page + 1)
                return
        pieces.append((context, page, page + 1))

    def event(self, holding: Holding, dialect: Dialect) -> BlockStored:
        """Give the wire event."""
        tier, owner = holding
        context = self._context
        size = context.page_tokens
        tokens: list[int] = []
        for piece, first, end in self._pieces:
            tokens.extend(piece.tokens[first * size : end * size])
        return BlockStored(
            block_hashes=self._hashes,
            parent_block_hash=None if self._parent is None else dialect.block_hash(router_key(self._parent)),
            token_ids=tokens,
            block_size=size,
            lora_id=None,
            medium=dialect.media[tier],
            lora_name=context.adapter,
            extra_keys=self._extra_keys() if dialect.extra_keys else None,
            ownership=dialect.owner(owner),
            cache_salt=context.salt,
        )

    def _extra_keys(self) -> list[tuple[str, ...] | None] | None:
        """The form of vLLM: the adapter on every block, the salt on the first block of a prompt."""
        context = self._context
        adapter = () if context.adapter is None else (context.adapter,)
        salt = () if context.salt is None or self._parent is not None else (context.salt,)
        if not adapter and not salt:
            return None
        return [adapter + salt or None, *[adapter or None] * (len(self._hashes) - 1)]


def measure(event: WireEvent) -> tuple[int, int]:
    """Count an event's blocks, and the most bytes that it takes."""
    match event:
        case BlockStored():
            blocks, names = len(event.block_hashes), 0
            for name in (event.lora_name, event.cache_salt):
                names += len(name.encode()) if isinstance(name, str) else 0
            size = EVENT_BYTES + HASH_BYTES * blocks + _TOKEN_BYTES * len(event.token_ids) + 2 * names
            if event.extra_keys is not None:
                size += blocks * (names + 8)
            return blocks, size
        case BlockRemoved():
            return len(event.block_hashes), EVENT_BYTES + HASH_BYTES * len(event.block_hashes)
        case AllBlocksCleared():
            return 0, EVENT_BYTES
