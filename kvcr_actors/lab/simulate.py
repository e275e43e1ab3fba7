"""One tier under any policy, without bytes: the tree and the policy that a controller's host tier runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat

from kvcr_actors.core.policy_names import eviction_policy
from kvcr_actors.core.prefix_tree import PrefixTree, TreePage
from kvcr_actors.types import Eviction, PageKey


class SimulatedTier:
    """A tier of `capacity` pages. It does to its tree what a controller's prefetch and backup do, in that order.

    A request is looked up and what is found made recent; then room is made, never at the cost of what was found, and
    the rest comes in. Of a request larger than the tier the head comes in, as in the sequential rule; a controller
    would refuse it.
    """

    def __init__(self, eviction: Eviction, capacity: int) -> None:
        self._tree = PrefixTree(eviction_policy(eviction, capacity, TreePage), TreePage)
        self._capacity = capacity

    def would_find(self, keys: Sequence[PageKey]) -> int:
        """Pages of a path that are held; changes nothing."""
        return len(self._tree.match(keys))

    def ask(self, keys: Sequence[PageKey]) -> int:
        """Serve a request (root to tail), and return how many of its pages were found."""
        tree = self._tree
        path = tree.match(keys)
        found = len(path)
        tree.touch(path)
        new = keys[found : self._capacity]
        if new:
            tail = path[-1] if path else None
            excess = len(tree) + len(new) - self._capacity
            if excess > 0:
                if tail is None:
                    tree.evict(excess)
                else:
                    tree.pin(tail)
                    tree.evict(excess)
                    tree.unpin(tail)
            tree.insert_path(new, tail, repeat(None), ready=True)
        return found


def simulate(requests: Iterable[Sequence[PageKey]], eviction: Eviction, capacity: int) -> list[int]:
    """Give the pages found by each request, one after the other."""
    tier = SimulatedTier(eviction, capacity)
    return [tier.ask(keys) for keys in requests]
