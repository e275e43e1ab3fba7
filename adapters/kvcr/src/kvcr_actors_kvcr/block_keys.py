"""The runner's block keys: the router's 64 bits of a page in front, so that hints can be matched, then its storage key.

A page is one block, or several: what was written together is one block, what came later is another.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvcr.types import BlockKey

from kvcr_actors import KeyFormatError, Namespace, PageKey, router_key
from kvcr_actors.ports import KEY_BYTES

_ROUTER_BYTES = 8
_WHOLE = _ROUTER_BYTES + KEY_BYTES
_MASK_BYTES = 4


class BlockKeyAdapter:
    """What the runner asks of a key adapter, in its present form (`encode`, `decode`) and in its coming one.

    The framework's key is the page's. No block key has an inverse: it is a digest.
    """

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace

    def encode(self, framework_key: object) -> BlockKey:
        """The block of a page with all its pools."""
        if not isinstance(framework_key, bytes):
            raise KeyFormatError(f"a page key is {KEY_BYTES} bytes, not {framework_key!r}")
        storage = self._namespace.storage_key(framework_key)
        return BlockKey(router_key(framework_key).to_bytes(_ROUTER_BYTES, "big") + storage)

    def decode(self, key: BlockKey) -> int:
        """The router's number of a block: what stands in a hint's `block_hashes`."""
        if len(key) not in (_WHOLE, _WHOLE + _MASK_BYTES):
            raise KeyFormatError(f"a block key has {_WHOLE} or {_WHOLE + _MASK_BYTES} bytes, not {key!r}")
        return int.from_bytes(key[:_ROUTER_BYTES], "big")

    def encode_from_framework(self, framework_key: object) -> BlockKey:
        """The block of a page, as `encode`."""
        return self.encode(framework_key)

    def decode_to_framework(self, key: BlockKey) -> PageKey:
        """Raise KeyFormatError, always."""
        raise KeyFormatError(f"block key {key.hex()} has no inverse: keep the page keys that it was made from")

    def encode_to_router(self, key: BlockKey) -> int:
        """The router's number of a block, as `decode`."""
        return self.decode(key)

    def decode_from_router(self, key: int) -> BlockKey:
        """Raise KeyFormatError, always."""
        raise KeyFormatError(f"router key {key:#x} has no inverse: keep the page keys that it was made from")


def with_mask(block: BlockKey, mask: int) -> BlockKey:
    """The block of some pools of a page, apart from the block of all of them."""
    return BlockKey(block + mask.to_bytes(_MASK_BYTES, "big"))


def bits(mask: int) -> Iterator[int]:
    """The pools in a bit set, in order."""
    pool = 0
    while mask:
        if mask & 1:
            yield pool
        mask >>= 1
        pool += 1
