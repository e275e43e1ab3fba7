"""The eviction policies by name, as options and tables write them."""

from __future__ import annotations

from typing import assert_never

from kvcr_actors.core.eviction import EvictionPolicy, LruEviction
from kvcr_actors.core.frequency import LfuEviction, S3FifoEviction, SieveEviction, TwoQueueEviction
from kvcr_actors.core.prefix_tree import PageT
from kvcr_actors.core.retention import LIFETIME_CAPACITIES, SessionEviction, TailLruEviction
from kvcr_actors.types import Eviction


def eviction_policy(name: Eviction, capacity: int, page_type: type[PageT]) -> EvictionPolicy[PageT]:
    """Make the policy of that name for a tier of `capacity` pages of `page_type`."""
    match name:
        case Eviction.LRU:
            return LruEviction[PageT]()
        case Eviction.LFU:
            return LfuEviction[PageT]()
        case Eviction.SIEVE:
            return SieveEviction[PageT]()
        case Eviction.S3_FIFO:
            return S3FifoEviction[PageT](capacity)
        case Eviction.TWO_QUEUES:
            return TwoQueueEviction[PageT](capacity)
        case Eviction.TAIL_LRU:
            return TailLruEviction[PageT]()
        case Eviction.SESSION:
            return SessionEviction[PageT](LIFETIME_CAPACITIES * capacity)
        case _:
            assert_never(name)
