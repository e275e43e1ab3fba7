"""Host slots, handed out in contiguous runs: segregated size classes, exact best fit, boundary tags.

Each free run stands under its exact size. `SizeIndex` finds the smallest size that fits, or the largest, in a number
of steps that depends only on the depth of its radix tree, so no operation walks the runs or the slots.
"""

from __future__ import annotations

_BITS = 8
_LOW = (1 << _BITS) - 1


class SizeIndex:
    """A set of positive sizes up to a bound, as a radix tree of 256-bit words that exist only where sizes do."""

    __slots__ = ("_levels",)

    def __init__(self, bound: int) -> None:
        depth = max(1, -(-bound.bit_length() // _BITS))
        self._levels: list[dict[int, int]] = [{} for _ in range(depth)]

    def add(self, size: int) -> None:
        """Add a size that is absent."""
        for words in self._levels:
            prefix, bit = size >> _BITS, 1 << (size & _LOW)
            word = words.get(prefix, 0)
            words[prefix] = word | bit
            if word:
                return
            size = prefix

    def remove(self, size: int) -> None:
        """Remove a size that is present."""
        for words in self._levels:
            prefix = size >> _BITS
            word = words[prefix] & ~(1 << (size & _LOW))
            if word:
                words[prefix] = word
                return
            del words[prefix]
            size = prefix

    def at_least(self, size: int) -> int | None:
        """Return the smallest size present that is `size` or more."""
        position = size
        for level, words in enumerate(self._levels):
            word = words.get(position >> _BITS, 0) >> (position & _LOW)
            if word:
                return self._descend(level, position + (word & -word).bit_length() - 1, smallest=True)
            position = (position >> _BITS) + 1
        return None

    def largest(self) -> int:
        """Return the largest size present; 0 if there is none."""
        if not self._levels[-1]:
            return 0
        return self._descend(len(self._levels), 0, smallest=False)

    def _descend(self, level: int, position: int, *, smallest: bool) -> int:
        """Follow the first (or last) bit down from a position of a level to a size."""
        for words in reversed(self._levels[:level]):
            word = words[position]
            position = position << _BITS | ((word & -word) if smallest else word).bit_length() - 1
        return position


class SlotArena:
    """Slots `[0, slots)` of one pool. Work and memory follow the number of runs, never the number of slots.

    The used map is one byte a slot, which the system backs only where slots were handed out.
    """

    __slots__ = ("_by_size", "_end_of", "_sizes", "_start_of", "_used", "free_slots", "slots")

    def __init__(self, slots: int) -> None:
        if slots < 0:
            raise ValueError(f"an arena cannot have {slots} slots")
        self.slots = slots
        self.free_slots = slots
        self._used = bytearray(slots)
        self._end_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self._by_size: dict[int, dict[int, None]] = {}
        self._sizes = SizeIndex(slots)
        if slots:
            self._add_run(0, slots)

    @property
    def largest_run(self) -> int:
        """The length of the longest free run; 0 if no slot is free."""
        return self._sizes.largest()

    @property
    def runs(self) -> int:
        """The number of free runs; neighbours are always one run."""
        return len(self._end_of)

    def allocate(self, count: int) -> list[range] | None:
        """Take `count` slots: one run, the best fit, if one is long enough, else as few runs as can be.

        None, and nothing taken, if fewer are free.
        """
        if count < 0:
            raise ValueError(f"{count} slots cannot be allocated")
        if count > self.free_slots:
            return None
        taken: list[range] = []
        while count:
            size = self._sizes.at_least(count)
            if size is None:
                size = self._sizes.largest()
            run = self._take(size, min(size, count))
            taken.append(run)
            count -= len(run)
        return taken

    def free(self, start: int, count: int) -> None:
        """Give back slots `[start, start + count)`, which may be part of a run or several.

        ValueError, and nothing changed, if any of them is free already or not of this arena.
        """
        stop = start + count
        if count < 1 or start < 0 or stop > self.slots:
            raise ValueError(f"slots [{start}, {stop}) are not of this arena of {self.slots} slots")
        if (at := self._used.find(0, start, stop)) >= 0:
            raise ValueError(f"slot {at} is free already; whoever frees [{start}, {stop}) did not own it")
        self._used[start:stop] = bytes(count)
        self.free_slots += count
        if start in self._start_of:
            before = self._start_of[start]
            self._drop_run(before, start)
            start = before
        if stop in self._end_of:
            after = self._end_of[stop]
            self._drop_run(stop, after)
            stop = after
        self._add_run(start, stop)

    def check(self) -> None:
        """Raise AssertionError if the free runs and the used map disagree; costs time in proportion to the slots."""
        used = bytearray(b"\1") * self.slots
        for start, end in self._end_of.items():
            if start and start in self._start_of:
                raise AssertionError(f"free runs meet at slot {start}")
            if self._start_of[end] != start or start not in self._by_size[end - start]:
                raise AssertionError(f"free run [{start}, {end}) is not indexed")
            used[start:end] = bytes(end - start)
        if used != self._used or used.count(0) != self.free_slots:
            raise AssertionError("the free runs are not the slots that are free")

    def _take(self, size: int, count: int) -> range:
        """Take the first `count` slots of some run of exactly `size`."""
        starts = self._by_size[size]
        start, _ = starts.popitem()
        del self._end_of[start], self._start_of[start + size]
        if not starts:
            self._drop_size(size)
        if count < size:
            self._add_run(start + count, start + size)
        self._used[start : start + count] = b"\1" * count
        self.free_slots -= count
        return range(start, start + count)

    def _add_run(self, start: int, end: int) -> None:
        self._end_of[start] = end
        self._start_of[end] = start
        size = end - start
        starts = self._by_size.get(size)
        if starts is None:
            self._by_size[size] = {start: None}
            self._sizes.add(size)
        else:
            starts[start] = None

    def _drop_run(self, start: int, end: int) -> None:
        del self._end_of[start], self._start_of[end]
        size = end - start
        starts = self._by_size[size]
        del starts[start]
        if not starts:
            self._drop_size(size)

    def _drop_size(self, size: int) -> None:
        del self._by_size[size]
        self._sizes.remove(size)
