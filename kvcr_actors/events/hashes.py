"""What a publisher calls its blocks: an engine's form of the page keys, in the words of a dialect."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from kvcr_actors.core.keys import KeyAdapter
from kvcr_actors.errors import ConfigError
from kvcr_actors.events.wire import Dialect, WireHash
from kvcr_actors.types import KEY_BYTES, PageKey

_SAMPLES: Final = tuple(bytes([byte]) * KEY_BYTES for byte in (0, 0x7F, 0xFF))


class BlockHashes:
    """Names pages for one dialect. ConfigError at once for an adapter whose names the dialect's readers do not take.

    `bytes` is the most that one name takes on the wire.
    """

    __slots__ = ("_dialect", "_encode", "bytes")

    def __init__(self, dialect: Dialect, keys: KeyAdapter[Any]) -> None:
        self._dialect = dialect
        self._encode = keys.encode_to_router
        try:
            self.bytes = max(len(msgspec.msgpack.encode(self.of(key))) for key in _SAMPLES)
        except OverflowError as error:
            raise ConfigError(f"dialect {dialect.name}: router keys must have 64 bits: {error}") from error

    def of(self, key: PageKey) -> WireHash:
        """The name of one page."""
        return self._dialect.block_hash(self._encode(key))
