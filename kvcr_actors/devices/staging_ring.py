"""Who holds which bytes of a bounded ring, so that a later holder waits on the device for an earlier one."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

import attrs

from kvcr_actors.errors import DeviceError

E = TypeVar("E")

_ALIGNMENT = 256
_MOST_REGIONS = 256
"""A ring is given out in units of a 256th, which bounds the events it remembers."""


@attrs.define(eq=False)
class Region(Generic[E]):
    """Bytes `[offset, offset + size)` of a ring. Use them only behind the `released` events of `before`.

    The holder calls `release` once its last use is launched; regions are used in the order in which they were taken.
    """

    offset: int
    size: int
    before: tuple[Region[E], ...]
    released: E | None = None

    def release(self, event: E | None) -> None:
        """Tell what the last use ends with (None: it is over), and forget who was before: else all would be kept."""
        self.released, self.before = event, ()

    def events_before(self) -> list[E]:
        """What to wait for before the first use."""
        return [region.released for region in self.before if region.released is not None]


class StagingRing(Generic[E]):
    """Hands out regions of `size` bytes in order, round and round; it never blocks and never refuses what fits.

    `option` is what its size is called where it can be raised.
    """

    def __init__(self, size: int, option: str) -> None:
        self._option = option
        self._unit = max(1, size // (_MOST_REGIONS * _ALIGNMENT)) * _ALIGNMENT
        self.size = size // self._unit * self._unit
        self._next = 0
        self._held: deque[Region[E]] = deque()
        """Oldest first, which is also the order in which a lap meets them."""

    def take(self, size: int) -> Region[E]:
        """Take the next `size` bytes; DeviceError if the whole ring is smaller."""
        if size == 0:
            return Region[E](self._next, 0, ())  # overlaps nothing, so that no later holder would forget it
        size = -(-size // self._unit) * self._unit
        if size > self.size:
            raise DeviceError(f"{size} bytes asked of a ring of {self.size}: raise {self._option}")
        before: list[Region[E]] = []
        offset = self._next
        if offset + size > self.size:
            while self._held and self._held[0].offset >= offset:
                before.append(self._held.popleft())
            offset = 0
        end = offset + size
        while self._held and offset <= self._held[0].offset < end:
            before.append(self._held.popleft())
        region = Region[E](offset, size, tuple(before))
        self._held.append(region)
        self._next = end
        return region
