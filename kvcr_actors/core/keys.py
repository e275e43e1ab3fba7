"""A page's name: one injective, domain-tagged, process-independent function for every writer, reader and event.

A page chain starts at a seed (page size, salt, adapter, extra keys) and hashes each page's tokens onto the key before.
It says nothing of model, data type or rank, so that routers can compare it; a `Namespace` adds those for a store.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Protocol, TypeAlias, TypeVar

import attrs

from kvcr_actors.errors import KeyFormatError
from kvcr_actors.types import KEY_BYTES, CacheLayout, PageKey

"""Length of seeds, page keys, digests and storage keys: a SHA-256."""

# Tags have one length and end in the width of a token. A 16-byte tag, a key and a 4-byte token fill one SHA-256 block.
_SEED = b"kvcr-actors/sd/1"
_PAGE_U32 = b"kvcr-actors/pg/4"
_PAGE_I64 = b"kvcr-actors/pg/8"
_NAMESPACE = b"kvcr-actors/ns/1"
_STORAGE = b"kvcr-actors/st/1"

_sha256 = hashlib.sha256
_pack = struct.pack
_pack_token = struct.Struct("<I").pack


def _field(value: str | int | None) -> bytes:
    """Encode one value as type, length and bytes, so that no two sequences of fields meet."""
    if value is None:
        return b"-"
    kind, text = (b"s", value) if isinstance(value, str) else (b"i", str(int(value)))
    data = text.encode("utf-8", "surrogatepass")
    return kind + len(data).to_bytes(8, "little") + data


def chain_seed(
    *,
    page_tokens: int = 1,
    salt: str | None = None,
    adapter: str | None = None,
    extra: Sequence[str | int] = (),
) -> bytes:
    """Return the 32 bytes that a request's page chain starts from.

    `salt` isolates tenants, `adapter` names a LoRA adapter, `extra` is what else tells contents apart (such as an
    image's hash).
    None and the empty string differ.
    """
    if page_tokens < 1:
        raise KeyFormatError(f"page_tokens {page_tokens}: a page has 1 token or more")
    fields = [_field(page_tokens), _field(salt), _field(adapter), *map(_field, extra)]
    return _sha256(_SEED + b"".join(fields)).digest()


def page_key(parent_or_seed: bytes, tokens: Sequence[int]) -> PageKey:
    """Return the key of the page that holds `tokens` after the page (or seed) given.

    Tokens are whole numbers of 64 bits with a sign; tag and key have fixed lengths, so the hashed length gives the
    number of tokens. A parent that is not a key, or no tokens at all, is a KeyFormatError.
    """
    count = len(tokens)
    if len(parent_or_seed) != KEY_BYTES or not count:
        raise KeyFormatError(f"a page key takes {KEY_BYTES} bytes and 1 token or more, not {parent_or_seed!r}, {count}")
    try:
        data = _pack_token(tokens[0]) if count == 1 else _pack(f"<{count}I", *tokens)
    except struct.error:
        return _sha256(_PAGE_I64 + parent_or_seed + _wide(tokens)).digest()
    return _sha256(_PAGE_U32 + parent_or_seed + data).digest()


def _wide(tokens: Sequence[int]) -> bytes:
    """Encode a page of which a token does not fit 32 bits unsigned; the width stands in the tag."""
    try:
        return _pack(f"<{len(tokens)}q", *tokens)
    except struct.error as error:
        raise KeyFormatError(f"tokens must be whole numbers of 64 bits: {error}") from error


def page_keys(tokens: Sequence[int], page_tokens: int, seed: bytes) -> tuple[PageKey, ...]:
    """Return the keys of the whole pages of `tokens`, root to tail; a partial last page has none."""
    if page_tokens < 1:
        raise KeyFormatError(f"page_tokens {page_tokens}: a page has 1 token or more")
    keys: list[PageKey] = []
    key = seed
    for start in range(0, len(tokens) - page_tokens + 1, page_tokens):
        key = page_key(key, tokens[start : start + page_tokens])
        keys.append(key)
    return tuple(keys)


def router_key(key: PageKey) -> int:
    """Return a page key's first 64 bits, unsigned: what routers and their hints speak of. It has no inverse."""
    return int.from_bytes(key[:8], "big")


def layout_name(layout: CacheLayout) -> str:
    """Describe the bytes of a layout's pages for `Namespace.layout`; hit policies change no bytes and are left out."""
    pools = ",".join(f"{pool.name}:{pool.planes}x{pool.plane_bytes}" for pool in layout.pools)
    return f"page-first/{layout.page_tokens}/{pools}"


@attrs.frozen
class Namespace:
    """Everything about stored bytes that a page key leaves out; any field that differs is a miss.

    `weights` is a version or digest of the weights, `layout` the order of bytes in a page (see `layout_name`).
    `ranks` lists (kind, index, size) for each axis along which this copy is a shard, such as ("tensor", 0, 8); a
    replicated copy leaves the axis out, which shares it on purpose.
    """

    model: str
    weights: str
    dtype: str
    layout: str
    page_bytes: int
    ranks: tuple[tuple[str, int, int], ...] = ()

    def __attrs_post_init__(self) -> None:
        for kind, index, size in self.ranks:
            if not 0 <= index < size:
                raise KeyFormatError(f"namespace of {self.model}: {kind} rank {index} of {size} does not exist")

    @cached_property
    def digest(self) -> bytes:
        """Return 32 bytes that stand for all fields."""
        fields: list[str | int] = [self.model, self.weights, self.dtype, self.layout, self.page_bytes]
        for rank in self.ranks:
            fields.extend(rank)
        return _sha256(_NAMESPACE + b"".join(map(_field, fields))).digest()

    def storage_key(self, key: PageKey, pool: str | None = None) -> bytes:
        """Return the 32 bytes under which a store keeps a page of this namespace, or one pool's component of it."""
        if len(key) != KEY_BYTES:
            raise KeyFormatError(f"a page key has {KEY_BYTES} bytes, not {len(key)}: {key!r}")
        return _sha256(_STORAGE + self.digest + key + _field(pool)).digest()


FrameworkKeyT = TypeVar("FrameworkKeyT")

RouterKey: TypeAlias = int | bytes | str
"""What routers know a page by: a number of 64 bits, the whole key, or its hexadecimal digits."""


class RouterForm(enum.StrEnum):
    """How much of a page key routers are told, and how; it must be what the engine's own events say."""

    FIRST_64 = "first_64"
    """The first 64 bits, unsigned, see `router_key`: what Dynamo and SGLang speak of."""
    LAST_64 = "last_64"
    """The last 64 bits, unsigned: vLLM where its block hashes are numbers."""
    WHOLE = "whole"
    """The 32 bytes: vLLM where its block hashes are bytes."""
    HEX = "hex"
    """64 hexadecimal digits, lower case, for sinks of one's own; no dialect of ours has them."""


class KeyAdapter(Protocol[FrameworkKeyT]):
    """Converts page keys to and from the keys of an engine (framework) and of a router."""

    def encode_to_framework(self, key: PageKey) -> FrameworkKeyT:
        """Return the engine's form of a page key."""
        ...

    def decode_from_framework(self, key: FrameworkKeyT) -> PageKey:
        """Return the page key of an engine's key; KeyFormatError if it is none."""
        ...

    def encode_to_router(self, key: PageKey) -> RouterKey:
        """Return the router's form of a page key: of one kind and, but for numbers, of one length for all keys."""
        ...

    def decode_from_router(self, key: RouterKey) -> PageKey:
        """Return the page key of a router key, where that is possible; else KeyFormatError."""
        ...


_TO_ROUTER: dict[RouterForm, Callable[[PageKey], RouterKey]] = {
    RouterForm.FIRST_64: router_key,
    RouterForm.LAST_64: lambda key: int.from_bytes(key[-8:], "big"),
    RouterForm.WHOLE: lambda key: key,
    RouterForm.HEX: lambda key: key.hex(),
}


@attrs.frozen
class PageKeyAdapter:
    """The default: engines that name a page by the 64 hexadecimal digits of its key, and routers by `router_form`."""

    router_form: RouterForm = RouterForm.FIRST_64

    def encode_to_framework(self, key: PageKey) -> str:
        """Return 64 hexadecimal digits, lower case."""
        return key.hex()

    def decode_from_framework(self, key: str) -> PageKey:
        """Return the page key; only the exact form that `encode_to_framework` gives is taken."""
        try:
            decoded = bytes.fromhex(key)
        except ValueError as error:
            raise KeyFormatError(f"framework key {key!r}: {error}") from error
        if len(decoded) != KEY_BYTES or decoded.hex() != key:
            raise KeyFormatError(f"framework key {key!r}: give {2 * KEY_BYTES} lower-case hexadecimal digits")
        return decoded

    def encode_to_router(self, key: PageKey) -> RouterKey:
        """Return the form chosen."""
        return _TO_ROUTER[self.router_form](key)

    def decode_from_router(self, key: RouterKey) -> PageKey:
        """Return the page key of a whole or hexadecimal one; KeyFormatError for a number, a quarter of a page key."""
        if isinstance(key, str):
            return self.decode_from_framework(key)
        if isinstance(key, int):
            raise KeyFormatError(f"router key {key:#x} has no inverse: keep the page keys that it was made from")
        if len(key) != KEY_BYTES:
            raise KeyFormatError(f"router key {key!r} has {len(key)} bytes, not {KEY_BYTES}")
        return key
