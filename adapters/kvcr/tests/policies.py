"""A policy of somebody else's."""

from __future__ import annotations

from kvcr.policy import LRUPolicy
from kvcr.types import BlockMeta, CacheTier


class NewestFirst(LRUPolicy):
    """Evicts what was used last."""

    def eviction_score(self, meta: BlockMeta, source: CacheTier) -> float:
        return -super().eviction_score(meta, source)
