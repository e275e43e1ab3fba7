"""The slots of host memory, pool by pool: dealt out to pages in runs as long as can be, and given back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise

from kvcr_actors.core.arena import SlotArena
from kvcr_actors.types import NO_SLOT


class HostSlots:
    """An arena of `slots` slots for each of `pools` pools. A page's slots are a tuple, `NO_SLOT` where it has none."""

    __slots__ = ("_freed", "arenas")

    def __init__(self, pools: int, slots: int) -> None:
        self.arenas = tuple(SlotArena(slots) for _ in range(pools))
        self._freed: tuple[list[int], ...] = tuple([] for _ in range(pools))

    def free_in_each(self) -> list[int]:
        """Free slots of each pool."""
        return [arena.free_slots for arena in self.arenas]

    def needs(self, masks: Sequence[int]) -> list[int]:
        """Slots needed in each pool by pages that keep something in the pools of their bit sets."""
        needs = [0] * len(self.arenas)
        for mask in set(masks):
            pages = masks.count(mask)
            for pool in range(len(needs)):
                needs[pool] += pages * (mask >> pool & 1)
        return needs

    def deal(self, masks: Sequence[int], needs: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Take the slots that `masks` need, one run a pool where one is long enough, and deal them out page by page."""
        dealt: list[Iterable[int]] = []
        for pool, (arena, need) in enumerate(zip(self.arenas, needs, strict=True)):
            runs = arena.allocate(need)
            if runs is None:
                raise AssertionError(f"pool {pool} lacks the room that was just made in it")
            slots = chain.from_iterable(runs)
            if need == len(masks):
                dealt.append(slots)
            else:
                bit = 1 << pool
                dealt.append([next(slots) if mask & bit else NO_SLOT for mask in masks])
        return zip(*dealt, strict=True)

    def free(self, rows: Sequence[tuple[int, ...]]) -> None:
        """Give slots back, one tuple a page, neighbours as one run."""
        if not rows:
            return
        for arena, freed, column in zip(self.arenas, self._freed, zip(*rows, strict=True), strict=True):
            slots = sorted(column)
            if slots[0] == NO_SLOT:
                slots = slots[slots.count(NO_SLOT) :]
            freed.extend(slots)
            breaks = [at for at in range(1, len(slots)) if slots[at] - slots[at - 1] != 1]
            for first, stop in pairwise([0, *breaks, len(slots)] if slots else ()):
                arena.free(slots[first], stop - first)

    def take_freed(self) -> tuple[tuple[int, ...], ...]:
        """Return what was given back since the last call, for each pool; empty if nothing was."""
        if not any(self._freed):
            return ()
        freed = tuple(map(tuple, self._freed))
        for slots in self._freed:
            slots.clear()
        return freed
