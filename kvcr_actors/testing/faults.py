"""The faults that the testing kit injects at an edge, and the plan that says which operation meets which."""

from __future__ import annotations

import enum
import random
from collections import Counter
from collections.abc import Collection, Mapping

import attrs


class Fault(enum.StrEnum):
    """What goes wrong with one operation of a device or a store."""

    FAIL = "fail"
    """It does nothing and says so."""
    STALL = "stall"
    """It does not begin until the test releases it."""
    TRUNCATE = "truncate"
    """Its first part is done, the rest fails."""
    CORRUPT = "corrupt"
    """Bytes are damaged, and the edge notices."""
    CORRUPT_SILENTLY = "corrupt_silently"
    """Bytes are damaged, and the edge reports success."""
    DROP = "drop"
    """It is done, but nobody is ever told: neither settled nor quiet."""
    DUPLICATE = "duplicate"
    """Its completion is delivered twice."""
    LATE = "late"
    """It settles as failed, goes on touching its memory, and is quiet only later."""


@attrs.define
class FaultPlan:
    """Decides the fault of each operation; the same arguments give the same decisions.

    `schedule` maps (kind, n) to the fault of the n-th operation of that kind, counted from 0. Operations that it does
    not name meet a fault of `rates` (probabilities, summing to 1 at most), drawn from `rng`. `kinds` limits the draws
    to some kinds; `limit` bounds how many draws may fire in all.
    """

    schedule: Mapping[tuple[str, int], Fault] = attrs.field(factory=dict[tuple[str, int], Fault])
    rates: Mapping[Fault, float] = attrs.field(factory=dict[Fault, float])
    rng: random.Random | None = None
    kinds: Collection[str] | None = None
    limit: int | None = None
    seen: Counter[str] = attrs.field(factory=Counter[str], init=False)
    """Operations so far, by kind."""
    fired: Counter[tuple[str, Fault]] = attrs.field(factory=Counter[tuple[str, Fault]], init=False)
    """Faults so far, by kind and fault."""
    _drawn: int = attrs.field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        if self.rates and self.rng is None:
            raise ValueError("rates need an rng: pass random.Random(seed)")
        if sum(self.rates.values()) > 1:
            raise ValueError(f"rates sum to {sum(self.rates.values())}, more than 1")

    @classmethod
    def always(cls, fault: Fault, *kinds: str, limit: int | None = None) -> FaultPlan:
        """Meet every operation of the kinds given (all kinds if none) with one fault, `limit` times at most."""
        return cls(rates={fault: 1.0}, rng=random.Random(0), kinds=kinds or None, limit=limit)

    def decide(self, kind: str) -> Fault | None:
        """Count one operation and return its fault, None for none."""
        fault = self.schedule.get((kind, self.seen[kind]))
        self.seen[kind] += 1
        if fault is None:
            fault = self._draw(kind)
        if fault is not None:
            self.fired[kind, fault] += 1
        return fault

    def _draw(self, kind: str) -> Fault | None:
        if self.rng is None or (self.kinds is not None and kind not in self.kinds):
            return None
        # Drawn even past the limit, so that a limit does not shift the decisions of later operations.
        point = self.rng.random()
        if self.limit is not None and self._drawn >= self.limit:
            return None
        for fault, rate in self.rates.items():
            if point < rate:
                self._drawn += 1
                return fault
            point -= rate
        return None
