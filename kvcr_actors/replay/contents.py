"""What a page must hold: bytes that derive from its key, its pool and each word's position."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcr_actors.types import CacheLayout, PageKey

_WORD = 8
_CHUNK_BYTES = 1 << 18
"""Pages are compared in chunks that stay in a core's cache."""


class PageContents:
    """The bytes of every page of a layout, so that a page in the wrong place or a stale one is seen.

    Word `w` of a page is its key's seed XOR a table entry for (pool, `w`): two pages differ in every word, and so do
    two pools and two positions. `seed` makes another run's bytes differ. Tensors in and out are on `device`.
    """

    def __init__(self, layout: CacheLayout, seed: int = 0, device: str = "cpu") -> None:
        self._page_bytes = [pool.page_bytes for pool in layout.pools]
        widest = max(self._page_bytes) // _WORD + 1
        positions = torch.arange(len(layout.pools) * widest, dtype=torch.int64).view(len(layout.pools), widest)
        self._device = device
        self._tables = _mix(positions + _wrapped(seed << 40)).to(device)

    def seeds(self, keys: Sequence[PageKey]) -> torch.Tensor:
        """Turn keys (8 bytes or more each, all of one length) into an int64 tensor of one seed a key."""
        if not keys:
            return torch.empty(0, dtype=torch.int64, device=self._device)
        heads = bytearray(b"".join([key[:_WORD] for key in keys]))
        return _mix(torch.frombuffer(heads, dtype=torch.int64).to(self._device))

    def expected(self, pool: int, seeds: torch.Tensor) -> torch.Tensor:
        """Make the uint8 contents, shape (seeds, page bytes of the pool), contiguous."""
        size = self._page_bytes[pool]
        words = -(-size // _WORD)
        pages = torch.bitwise_xor(seeds[:, None], self._tables[pool, None, :words]).view(torch.uint8)
        return pages if pages.shape[1] == size else pages[:, :size].contiguous()

    def mismatches(self, pool: int, seeds: torch.Tensor, actual: torch.Tensor) -> int:
        """Count the pages of `actual` (uint8, as `expected` makes it) that differ from what they must be."""
        step = max(1, _CHUNK_BYTES // self._page_bytes[pool])
        return sum(
            verify(actual[first : first + step], self.expected(pool, seeds[first : first + step]))
            for first in range(0, len(seeds), step)
        )


def verify(actual: torch.Tensor, expected: torch.Tensor) -> int:
    """Count the rows (pages) that differ in at least one byte; the shapes must be equal."""
    if actual.shape != expected.shape:
        raise ValueError(f"pages of shape {tuple(actual.shape)} cannot be compared with {tuple(expected.shape)}")
    if _is_wide(actual) and _is_wide(expected):
        actual, expected = actual.view(torch.int64), expected.view(torch.int64)
    if torch.equal(actual, expected):
        return 0
    return int((actual != expected).any(dim=1).sum())


def _is_wide(pages: torch.Tensor) -> bool:
    """Whether rows can be compared by words, which is several times faster than by bytes."""
    row, column = pages.stride()
    return column == 1 and not any(size % _WORD for size in (pages.shape[1], row, pages.storage_offset()))


def _wrapped(value: int) -> int:
    """Reduce to 64 bits, signed."""
    return ((value + (1 << 63)) % (1 << 64)) - (1 << 63)


def _mix(words: torch.Tensor) -> torch.Tensor:
    """Scatter int64 words over all bits, one to one (the finaliser of SplitMix64)."""
    mixed = words + _wrapped(0x9E3779B97F4A7C15)
    mixed = (mixed ^ _shifted(mixed, 30)) * _wrapped(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shifted(mixed, 27)) * _wrapped(0x94D049BB133111EB)
    return mixed ^ _shifted(mixed, 31)


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right without the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)
