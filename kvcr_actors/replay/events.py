"""The replay as a publisher: a trace has block ids instead of tokens, so each id stands for tokens of its own."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import shake_128
from typing import Final

import numpy as np

from kvcr_actors.events.config import EventsConfig
from kvcr_actors.events.contexts import Origin
from kvcr_actors.replay.options import ReplayOptions
from kvcr_actors.replay.trace import BLOCK_TOKENS, TraceRequest
from kvcr_actors.types import PageContext, PageKey

_VOCABULARY_MASK: Final = (1 << 17) - 1


def block_tokens(block: int, count: int = BLOCK_TOKENS) -> array[int]:
    """Give the token ids, each below 131,072, that a trace's block id stands for; the same in every process."""
    words = np.frombuffer(shake_128(block.to_bytes(8, "little")).digest(4 * count), dtype="<u4")
    return array("I", (words & _VOCABULARY_MASK).astype(np.uint32).tobytes())


class TraceContexts:
    """What each block of a trace was computed from; tokens are made when they are asked for."""

    def __init__(
        self, requests: Sequence[TraceRequest], keys: Sequence[Sequence[PageKey]], tokens: int = BLOCK_TOKENS
    ) -> None:
        self._tokens = tokens
        self._blocks: dict[PageKey, int] = {}
        for request, chain in zip(requests, keys, strict=True):
            self._blocks.update(zip(chain, request.hash_ids, strict=True))

    def find(self, key: PageKey) -> Origin | None:
        """Find a block by its page key."""
        block = self._blocks.get(key)
        return None if block is None else (PageContext(block_tokens(block, self._tokens), self._tokens), 0)


def events_config(options: ReplayOptions) -> EventsConfig | None:
    """Give the publisher that the options ask for, if any; ConfigError says why it cannot be."""
    if options.events is None:
        return None
    return EventsConfig(options.events, options.events_replay, options.dialect)
