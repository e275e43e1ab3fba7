"""A laboratory for caches: what a capacity, a policy, a split or a router gives on a trace, without moving bytes.

Every hit is counted as the sequential replay counts it: one request at a time; the leading run that is held is found;
the request's pages become the most recent, tail first; what is over the capacity leaves, leaves of the tree first. LRU
is exact at every capacity in one pass (`stack`), the bound that no policy beats is exact too (`bound`), and every other
policy runs in the tree that a controller runs (`simulate`).
"""

from kvcr_actors.lab.bound import Bound
from kvcr_actors.lab.money import Costs, Split, best, next_gib, page_bytes, split, splits, tier_hits
from kvcr_actors.lab.replicas import Placement, place
from kvcr_actors.lab.simulate import SimulatedTier, simulate
from kvcr_actors.lab.stack import LruCurve, lru_curve
from kvcr_actors.lab.sweeping import POLICIES, Row, Sweep, sweep
from kvcr_actors.lab.workload import Workload, workload

__all__ = [
    "POLICIES",
    "Bound",
    "Costs",
    "LruCurve",
    "Placement",
    "Row",
    "SimulatedTier",
    "Split",
    "Sweep",
    "Workload",
    "best",
    "lru_curve",
    "next_gib",
    "page_bytes",
    "place",
    "simulate",
    "split",
    "splits",
    "sweep",
    "tier_hits",
    "workload",
]
