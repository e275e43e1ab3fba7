"""The wire form that routers read: msgpack batches of map events, in the dialects of vLLM, SGLang and Dynamo.

A batch is `[timestamp, [events], data-parallel rank]`; it travels behind a topic and an 8-byte big-endian sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, TypeAlias

import attrs
import msgspec

from kvcr_actors.core.inventory import Ownership
from kvcr_actors.core.keys import RouterKey
from kvcr_actors.errors import ConfigError, EventFormatError
from kvcr_actors.types import Tier

SEQUENCE_BYTES: Final = 8
END_OF_REPLAY: Final = b"\xff" * SEQUENCE_BYTES
MAX_EVENTS: Final = 128
MAX_BLOCKS: Final = 8_192
MAX_PAYLOAD_BYTES: Final = 8 << 20
"""What a batch may hold at most; Dynamo's state agent refuses more."""

STORE_OWNER: Final = "kvcr"
"""The wire's word for copies that a store holds of its own accord."""

WireHash: TypeAlias = int | bytes


class BlockStored(msgspec.Struct, tag="BlockStored", omit_defaults=True, gc=False):
    """Blocks came to be: a chain, root to tail, that hangs from `parent_block_hash`."""

    block_hashes: list[WireHash]
    parent_block_hash: WireHash | None
    token_ids: list[int]
    block_size: int
    # Readers insist on these three, so they are written even when they say nothing; some publishers leave them out.
    lora_id: int | msgspec.UnsetType | None = msgspec.UNSET
    medium: str | msgspec.UnsetType | None = msgspec.UNSET
    lora_name: str | msgspec.UnsetType | None = msgspec.UNSET
    extra_keys: list[Any] | None = None
    ownership: str | None = None
    cache_salt: str | None = None
    group_idx: int | None = None
    """Which of an engine's cache groups holds them; each has an event of its own for the same hashes."""


class BlockRemoved(msgspec.Struct, tag="BlockRemoved", omit_defaults=True, gc=False):
    """Blocks went from one medium."""

    block_hashes: list[WireHash]
    medium: str | msgspec.UnsetType | None = msgspec.UNSET
    ownership: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", omit_defaults=True, gc=False):
    """Every block of the publisher's rank went, in every tier; with an owner, only what that owner holds."""

    ownership: str | None = None


WireEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """What one message carries."""

    ts: float
    events: list[WireEvent]
    data_parallel_rank: int | None = None


class _MapBatch(msgspec.Struct, gc=False):
    """The same as a map, as vLLM's newest send it."""

    ts: float
    events: list[WireEvent]
    data_parallel_rank: int | None = None


class _StoredArray(msgspec.Struct, tag="BlockStored", array_like=True, gc=False):
    """vLLM's events before June 2026 were arrays."""

    block_hashes: list[WireHash]
    parent_block_hash: WireHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None


class _RemovedArray(msgspec.Struct, tag="BlockRemoved", array_like=True, gc=False):
    block_hashes: list[WireHash]
    medium: str | None = None
    group_idx: int | None = None


class _ClearedArray(msgspec.Struct, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


class _ArrayBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_StoredArray | _RemovedArray | _ClearedArray]
    data_parallel_rank: int | None = None


@attrs.frozen
class Dialect:
    """What differs between the readers of the wire form."""

    name: str
    media: Mapping[Tier, str]
    signed_hashes: bool = False
    """64-bit hashes as signed numbers."""
    byte_hashes: bool = False
    """Whether hashes may be bytes instead of numbers."""
    extra_keys: bool = False
    """Whether salt and adapter travel as `extra_keys`, one entry a block."""
    ownership: bool = False
    """Whether blocks, and clears, can be said to be a store's own; without, such blocks are not told."""

    def block_hash(self, router_key: RouterKey) -> WireHash:
        """Give a router key in the dialect's form; ConfigError for one that its readers do not take."""
        if isinstance(router_key, int):
            return router_key - (1 << 64) if self.signed_hashes and router_key >> 63 == 1 else router_key
        if isinstance(router_key, bytes) and self.byte_hashes:
            return router_key
        raise ConfigError(
            f"dialect {self.name}: its readers take no block hash such as {router_key!r}; give the first or last 64 "
            "bits of the page key" + (", or the whole key as bytes" if self.byte_hashes else "")
        )

    def owner(self, ownership: Ownership) -> str | None:
        """Give the wire's word for an owner."""
        return STORE_OWNER if ownership is Ownership.STORE else None


_CPU_AND_STORAGE = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.STORE: "STORAGE"}

DIALECTS: Final[Mapping[str, Dialect]] = {
    dialect.name: dialect
    for dialect in (
        Dialect("vllm", _CPU_AND_STORAGE, byte_hashes=True, extra_keys=True),
        Dialect(
            "sglang",
            {Tier.DEVICE: "GPU", Tier.HOST: "CPU_PINNED", Tier.STORE: "DISK"},
            signed_hashes=True,
        ),
        Dialect("dynamo", _CPU_AND_STORAGE, ownership=True),
    )
}

_MEDIA: Final[Mapping[Tier, tuple[str | None, ...]]] = {
    Tier.DEVICE: (None, "", "GPU", "DEVICE"),
    Tier.HOST: ("CPU", "CPU_PINNED", "CPU_TIER1"),
    Tier.STORE: ("CPU_TIER2", "DISK", "NVME", "STORAGE", "EXTERNAL", "NETWORK", "REMOTE", "SHARED"),
}
_TIERS: Final = {medium: tier for tier, media in _MEDIA.items() for medium in media}

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(EventBatch)
_map_decoder = msgspec.msgpack.Decoder(_MapBatch)
_array_decoder = msgspec.msgpack.Decoder(_ArrayBatch)
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def find_dialect(name: str) -> Dialect:
    """Find a dialect by its name; ConfigError lists them."""
    dialect = DIALECTS.get(name)
    if dialect is None:
        raise ConfigError(f"dialect {name!r} is not known; use {', '.join(DIALECTS)}")
    return dialect


def tier_of(medium: str | msgspec.UnsetType | None) -> Tier:
    """Give the tier that a medium of any dialect stands for; EventFormatError if it is none."""
    tier = Tier.DEVICE if isinstance(medium, msgspec.UnsetType) else _TIERS.get(medium)
    if tier is None:
        raise EventFormatError(f"medium {medium!r} is not known; the publisher speaks a dialect that is not read here")
    return tier


def encode_batch(batch: EventBatch) -> bytes:
    """Give a batch's payload."""
    return _encoder.encode(batch)


def decode_batch(payload: bytes) -> EventBatch:
    """Read a payload of any dialect, and of vLLM's earlier and later forms; unknown fields are ignored.

    EventFormatError says what is wrong with it.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise EventFormatError(f"a batch of {len(payload)} bytes; the most is {MAX_PAYLOAD_BYTES}")
    try:
        return _decoder.decode(payload)
    except _UNREADABLE as error:
        other = _decode_other_forms(payload)
        if other is None:
            raise EventFormatError(f"not a batch of KV events: {error}") from error
        return other


def _decode_other_forms(payload: bytes) -> EventBatch | None:
    with suppress(*_UNREADABLE):
        batch = _map_decoder.decode(payload)
        return EventBatch(batch.ts, batch.events, batch.data_parallel_rank)
    with suppress(*_UNREADABLE):
        arrays = _array_decoder.decode(payload)
        return EventBatch(arrays.ts, [_from_array(event) for event in arrays.events], arrays.data_parallel_rank)
    return None


def _from_array(event: _StoredArray | _RemovedArray | _ClearedArray) -> WireEvent:
    match event:
        case _StoredArray():
            return BlockStored(**msgspec.structs.asdict(event))
        case _RemovedArray():
            return BlockRemoved(**msgspec.structs.asdict(event))
        case _ClearedArray():
            return AllBlocksCleared()


def encode_sequence(sequence: int) -> bytes:
    """Give a sequence number's frame."""
    return sequence.to_bytes(SEQUENCE_BYTES, "big")


def decode_sequence(frame: bytes) -> int:
    """Read a sequence number's frame; EventFormatError if it has not 8 bytes."""
    if len(frame) != SEQUENCE_BYTES:
        raise EventFormatError(f"a sequence of {len(frame)} bytes; it has {SEQUENCE_BYTES}")
    return int.from_bytes(frame, "big")
