"""The checks that a plan passes before a device copies by it, and the widths it copies in."""

from __future__ import annotations

from array import array
from typing import Any, TypeAlias

import attrs
import numpy as np
import torch

from kvcr_actors.core.copy_plan import Direction, PoolCopy
from kvcr_actors.errors import DeviceError
from kvcr_actors.types import CacheLayout

Indices: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

_FEW = 48
"""Up to this many numbers, the built-in minimum is faster than numpy's."""


def index_array(values: array[int]) -> Indices:
    """View an int64 array without a copy; the array may not grow meanwhile."""
    return np.frombuffer(values, dtype=np.int64)


@attrs.frozen(eq=False)
class Pairs:
    """One pool's pairs that passed `check_pairs`: device pages and host slots (int64), slots ascending.

    `one_run` says that the slots are neighbours.
    """

    pool: int
    device_pages: Indices
    host_slots: Indices
    one_run: bool

    def __len__(self) -> int:
        """Pairs."""
        return len(self.host_slots)


def check_pairs(layout: CacheLayout, direction: Direction, copy: PoolCopy, pages: int, slots: int) -> Pairs:
    """Take one pool's pairs, given how many pages and slots there are; DeviceError says what is wrong with them."""
    name = layout.pools[copy.pool].name
    count = len(copy.host_slots)
    if len(copy.device_pages) != count:
        raise DeviceError(f"pool {name}: {len(copy.device_pages)} device pages for {count} host slots")
    device, host = index_array(copy.device_pages), index_array(copy.host_slots)
    if count == 0:
        return Pairs(copy.pool, device, host, one_run=False)
    few = count <= _FEW
    lowest, highest = (min(copy.device_pages), max(copy.device_pages)) if few else (device.min(), device.max())
    if lowest < 0 or highest >= pages:
        raise DeviceError(f"pool {name}: device page {_outside(device, pages)} is not one of its {pages} pages")
    first, last = copy.host_slots[0], copy.host_slots[-1]
    one_run = last - first == count - 1 and is_one_run(host)
    if not one_run:
        steps = host[1:] - host[:-1]
        # A restore may read one slot into several pages.
        if int(steps.min()) < (1 if direction is Direction.TO_HOST else 0):
            raise DeviceError(f"pool {name}: host slots must be sorted, each written only once; use plan_copy")
    if first < 0 or last >= slots:
        raise DeviceError(f"pool {name}: host slot {_outside(host, slots)} is not one of its {slots} slots")
    return Pairs(copy.pool, device, host, one_run)


def is_one_run(slots: Indices) -> bool:
    """Whether slots are neighbours in host memory."""
    return len(slots) < 2 or bool((slots[1:] - slots[:-1] == 1).all())


def word_type(size: int) -> torch.dtype:
    """The widest integer type whose size divides `size`: index operations move words, not bytes."""
    for width, dtype in ((8, torch.int64), (4, torch.int32), (2, torch.int16)):
        if size % width == 0:
            return dtype
    return torch.uint8


def _outside(values: Indices, bound: int) -> int:
    return int(values[(values < 0) | (values >= bound)][0])
