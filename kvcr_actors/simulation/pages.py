"""The simulated model: small hybrid pools, prompts that share prefixes, and the bytes that belong to each page."""

from __future__ import annotations

import hashlib
import random
from functools import lru_cache

from kvcr_actors.types import CacheLayout, PageKey, PoolSpec, TrailingPages

LAYOUT = CacheLayout(
    (
        PoolSpec("kv", 2, 8),
        PoolSpec("swa", 1, 5, TrailingPages(2)),
        PoolSpec("mamba", 1, 7, TrailingPages(1)),
    )
)
POOLS = range(len(LAYOUT.pools))
SIZES = tuple(pool.page_bytes for pool in LAYOUT.pools)
_ALL = (1 << len(LAYOUT.pools)) - 1
_MAMBA = 0b100

_LONGEST = 10


@lru_cache(1 << 16)
def key_of(path: tuple[int, ...]) -> PageKey:
    """The key of the page at the end of a path through the tree of all prompts."""
    return hashlib.blake2b(bytes(path), digest_size=32).digest()


@lru_cache(1 << 16)
def computed_mask(key: PageKey) -> int:
    """The pools that keep something for a page when it is computed: a mamba state at two pages of three."""
    return _ALL if key[0] % 3 else _ALL & ~_MAMBA


@lru_cache(1 << 18)
def page_bytes(rank: int, key: PageKey, pool: int, generation: int) -> bytes:
    """The bytes of one rank's component: ranks hold shards, each its own, and so does each version of the weights."""
    salt = bytes((rank, pool)) + generation.to_bytes(2, "big")
    return hashlib.blake2b(key, digest_size=SIZES[pool], salt=salt).digest()


def draw_prompt(rng: random.Random) -> tuple[PageKey, ...]:
    """The keys of a prompt: it follows beaten tracks and leaves them now and then."""
    path = [rng.randrange(2)]
    path += [0 if rng.random() < 0.85 else rng.randrange(1, 3) for _ in range(rng.randrange(_LONGEST))]
    return tuple(key_of(tuple(path[: end + 1])) for end in range(len(path)))
