"""Many orders, one plan: each pool's pairs side by side as columns, checked and sorted together.

A malformed order must not cost its neighbours their copies: what names a page or a slot that does not exist, or a slot
that an order before it writes in the same step, is left out as a whole, and told by its place in the list.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import attrs
import numpy as np

from kvcr_actors.core.copy_plan import CopyPlan, Direction, PoolCopy
from kvcr_actors.types import NO_SLOT, CacheLayout

Column: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
PageList: TypeAlias = "Sequence[int] | Column"
"""Device pages or host slots of one pool, in an order's own order."""

Order: TypeAlias = "tuple[Sequence[PageList], Sequence[PageList]]"
"""For each pool the device pages, and for each pool as many host slots; `NO_SLOT` on either side is no pair."""


@attrs.frozen
class MergedOrders:
    """One plan for a list of orders. `pools[i]` is the bit set of the pools in which order `i` copies something.

    `refused` has for each order that was left out the pool and the reason; it copies nothing.
    """

    plan: CopyPlan
    pools: tuple[int, ...]
    refused: Mapping[int, tuple[int, str]]


@attrs.define
class _PoolColumns:
    """One pool's pairs of all orders; `owners` says which order each belongs to."""

    pages: Column
    slots: Column
    owners: Column

    def keep(self, wanted: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
        if not wanted.all():
            self.pages, self.slots, self.owners = self.pages[wanted], self.slots[wanted], self.owners[wanted]


def merge_orders(
    direction: Direction, layout: CacheLayout, orders: Sequence[Order], pages: Sequence[int], slots: Sequence[int]
) -> MergedOrders:
    """Merge orders over the pools of a layout; pool `i` has `pages[i]` pages on the device and `slots[i]` slots."""
    names = [spec.name for spec in layout.pools]
    columns = [_columns(orders, pool) for pool in range(len(names))]
    refused: dict[int, tuple[int, str]] = {}
    for pool, column in enumerate(columns):
        for what, values, count in (
            ("device page", column.pages, pages[pool]),
            ("host slot", column.slots, slots[pool]),
        ):
            outside = (values < 0) | (values >= count)
            for at in np.flatnonzero(outside).tolist() if outside.any() else ():
                reason = f"{what} {values[at]} is not one of the {count} of pool {names[pool]}"
                refused.setdefault(int(column.owners[at]), (pool, reason))
    _drop(columns, refused)
    if direction is Direction.TO_HOST:
        _refuse_second_writers(columns, names, refused)
        _drop(columns, refused)
    used = [0] * len(orders)
    copies: list[PoolCopy] = []
    for pool, column in enumerate(columns):
        if not len(column.slots):
            continue
        for owner in np.unique(column.owners).tolist():
            used[owner] |= 1 << pool
        order = np.argsort(column.slots, kind="stable")
        copies.append(PoolCopy(pool, _as_array(column.pages[order]), _as_array(column.slots[order])))
    return MergedOrders(CopyPlan(direction, tuple(copies)), tuple(used), refused)


def _refuse_second_writers(
    columns: Sequence[_PoolColumns], names: Sequence[str], refused: dict[int, tuple[int, str]]
) -> None:
    """An order may not write a slot that it, or an order before it, writes already."""
    for pool, column in enumerate(columns):
        order = np.argsort(column.slots, kind="stable")
        ascending = column.slots[order]
        again = np.flatnonzero(ascending[1:] == ascending[:-1]) + 1
        for at in order[again].tolist():
            reason = f"host slot {column.slots[at]} of pool {names[pool]} is written twice in one step"
            refused.setdefault(int(column.owners[at]), (pool, reason))


def _drop(columns: Sequence[_PoolColumns], refused: Mapping[int, object]) -> None:
    if refused:
        out = np.fromiter(refused, np.int64, len(refused))
        for column in columns:
            column.keep(~np.isin(column.owners, out))


def _columns(orders: Sequence[Order], pool: int) -> _PoolColumns:
    pages, slots = [order[0][pool] for order in orders], [order[1][pool] for order in orders]
    lengths = np.fromiter(map(len, pages), np.int64, len(pages))
    column = _PoolColumns(_joined(pages), _joined(slots), np.repeat(np.arange(len(orders)), lengths))
    column.keep((column.pages != NO_SLOT) & (column.slots != NO_SLOT))
    return column


def _joined(lists: Sequence[PageList]) -> Column:
    if any(isinstance(one, np.ndarray) for one in lists):
        return np.concatenate([np.asarray(one, np.int64) for one in lists])
    return np.fromiter(chain.from_iterable(lists), np.int64, sum(map(len, lists)))


def _as_array(column: Column) -> array[int]:
    values = array("q")
    values.frombytes(column.tobytes())
    return values
