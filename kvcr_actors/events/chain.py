"""One stored event in the making: a chain of blocks of one context, within the wire's limits."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

import attrs

from kvcr_actors.core.inventory import Holding
from kvcr_actors.events.hashes import BlockHashes
from kvcr_actors.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, Dialect, WireEvent
from kvcr_actors.types import PageContext, PageKey

EVENT_BYTES: Final = 512
"""The most that msgpack takes for an event without its blocks, salt and adapter."""

_TOKEN_BYTES = 5


@attrs.frozen
class Limits:
    """What one stored or removed event may hold."""

    blocks: int
    bytes: int
    hash_bytes: int
    """The most that msgpack takes for one hash."""

    @property
    def hashes(self) -> int:
        """The most hashes of an event that has nothing else."""
        return max(1, min(self.blocks, (self.bytes - EVENT_BYTES) // self.hash_bytes))


class Chain:
    """Blocks root to tail below `parent`, as many as the limits allow: none of a context whose blocks are too large."""

    __slots__ = ("_context", "_most", "_parent", "_pieces", "keys")

    def __init__(self, parent: PageKey | None, context: PageContext, limits: Limits) -> None:
        self.keys: list[PageKey] = []
        self._parent = parent
        self._context = context
        self._pieces: list[tuple[PageContext, int, int]] = []
        names = len((context.salt or "").encode()) + len((context.adapter or "").encode())
        block = limits.hash_bytes + _TOKEN_BYTES * context.page_tokens + 1
        if context.adapter is not None:
            block += names + 8
        self._most = min(limits.blocks, (limits.bytes - EVENT_BYTES - 2 * names) // block)

    def takes(self, parent: PageKey | None, context: PageContext) -> bool:
        """Whether a further block with that parent and context may join."""
        mine = self._context
        return (
            parent == self.keys[-1]
            and len(self.keys) < self._most
            and (
                context is mine
                or (
                    context.page_tokens == mine.page_tokens
                    and context.salt == mine.salt
                    and context.adapter == mine.adapter
                )
            )
        )

    def add(self, key: PageKey, context: PageContext, page: int) -> None:
        """Append the first block, or one that it takes."""
        self.keys.append(key)
        pieces = self._pieces
        if pieces:
            last, first, end = pieces[-1]
            if last is context and end == page:
                pieces[-1] = (context, first, page + 1)
                return
        pieces.append((context, page, page + 1))

    def event(self, holding: Holding, dialect: Dialect, hashes: BlockHashes) -> BlockStored:
        """Give the wire event, with as many of the blocks, from the first, as the wire can say; maybe none."""
        tier, owner = holding
        context = self._context
        tokens = self._tokens() if self._most > 0 else []
        count = len(tokens) // context.page_tokens
        return BlockStored(
            block_hashes=[hashes.of(key) for key in self.keys[:count]],
            parent_block_hash=None if self._parent is None else hashes.of(self._parent),
            token_ids=tokens,
            block_size=context.page_tokens,
            lora_id=None,
            medium=dialect.media[tier],
            lora_name=context.adapter,
            extra_keys=self._extra_keys(count) if dialect.extra_keys else None,
            ownership=dialect.owner(owner),
            cache_salt=context.salt,
        )

    def _tokens(self) -> list[int]:
        """The tokens of the blocks before the first that has one of more than 32 bits, or lacks some."""
        tokens, size = array("I"), self._context.page_tokens
        for context, first, end in self._pieces:
            piece = context.tokens[first * size : end * size]
            if not _extend(tokens, piece, (end - first) * size):
                for page in range(first, end):
                    if not _extend(tokens, context.page(page), size):
                        break
                break
        return tokens.tolist()

    def _extra_keys(self, count: int) -> list[tuple[str, ...] | None] | None:
        """The form of vLLM: the adapter on every block, the salt on the first block of a prompt."""
        context = self._context
        adapter = () if context.adapter is None else (context.adapter,)
        salt = () if context.salt is None or self._parent is not None else (context.salt,)
        if not adapter and not salt:
            return None
        return [adapter + salt or None, *[adapter or None] * (count - 1)]


def _extend(tokens: array[int], more: Sequence[int], count: int) -> bool:
    """Append `count` tokens; False, with none appended, if there are not as many, or one has not 32 bits."""
    if len(more) != count:
        return False
    if isinstance(more, array) and more.typecode == "I":
        tokens.extend(more)
        return True
    try:
        tokens.fromlist(list(more))
    except (OverflowError, TypeError):
        return False
    return True


def measure(event: WireEvent, hash_bytes: int) -> tuple[int, int]:
    """Count an event's blocks, and the most bytes that it takes."""
    match event:
        case BlockStored():
            blocks, names = len(event.block_hashes), 0
            for name in (event.lora_name, event.cache_salt):
                names += len(name.encode()) if isinstance(name, str) else 0
            size = EVENT_BYTES + hash_bytes * blocks + _TOKEN_BYTES * len(event.token_ids) + 2 * names
            if event.extra_keys is not None:
                size += blocks * (names + 8)
            return blocks, size
        case BlockRemoved():
            return len(event.block_hashes), EVENT_BYTES + hash_bytes * len(event.block_hashes)
        case AllBlocksCleared():
            return 0, EVENT_BYTES
