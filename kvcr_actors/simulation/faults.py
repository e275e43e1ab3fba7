"""Which faults one seed injects, how often, and which of them fired."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from kvcr_actors.errors import ConfigError
from kvcr_actors.testing.faults import Fault, FaultPlan

Kind: TypeAlias = str
"""A fault of an operation, as `read.stall`: the operation, a dot, what goes wrong."""

_STORE = ("fail", "stall", "truncate", "corrupt", "drop", "duplicate", "delay", "reorder", "raise")
_DEVICE = ("fail", "stall", "truncate", "corrupt", "drop", "duplicate", "delay", "pool")
_WORDS = {
    "lookup": (*_STORE, "lie"),
    "read": _STORE,
    "write": _STORE,
    "clear": ("fail", "stall", "delay"),
    "to_host": (*_DEVICE, "raise"),
    "to_device": _DEVICE,
    "fence": ("delay",),
    "round": ("fail", "stall"),
    "order": ("delay", "reset"),
    "event": ("drop", "duplicate", "delay", "reorder"),
    "actor": ("restart",),
    "store": ("restart",),
    "rank": ("freeze", "restart"),
}
KINDS: tuple[Kind, ...] = tuple(f"{operation}.{word}" for operation, words in _WORDS.items() for word in words)

_NEVER_QUIET = frozenset({"read.drop", "write.drop", "to_host.drop", "to_device.drop"})
"""After one of these nobody can tell whether the memory is quiet: most seeds do without, and are checked harder."""

_FAULTS = {
    "fail": Fault.FAIL,
    "stall": Fault.STALL,
    "truncate": Fault.TRUNCATE,
    "corrupt": Fault.CORRUPT,
    "drop": Fault.DROP,
    "duplicate": Fault.DUPLICATE,
    "delay": Fault.LATE,
    "lie": Fault.CORRUPT_SILENTLY,
    "pool": Fault.TRUNCATE,
}

_RARE = {
    "rank.restart": 0.006,
    "rank.freeze": 0.008,
    "store.restart": 0.008,
    "actor.restart": 0.012,
    "order.reset": 0.03,
}
"""The most that a mishap of a whole part may happen in a step."""

_SELDOM = {"read": 5.0, "to_device": 5.0, "write": 2.0, "to_host": 1.0, "clear": 10.0}
"""Operations that are seldom meet faults more often."""


def parse_kinds(text: str) -> tuple[Kind, ...]:
    """The kinds that a list names: `all`, `none`, whole kinds, operations (`read`) or words (`stall`), after commas.

    ConfigError for a name that is none of them.
    """
    if text == "none":
        return ()
    chosen: set[Kind] = set()
    for name in text.split(","):
        found = [kind for kind in KINDS if name == "all" or name == kind or name in kind.split(".")]
        if not found:
            operations = ", ".join(_WORDS)
            words = ", ".join(dict.fromkeys(word for known in _WORDS.values() for word in known))
            raise ConfigError(
                f"--faults: {name!r} is no fault; give all, none, or operations ({operations}), words ({words}) or "
                "both with a dot (read.stall), after commas"
            )
        chosen.update(found)
    return tuple(kind for kind in KINDS if kind in chosen)


class SeedFaults:
    """One seed's draws. Each seed takes a random part of the kinds, at random rates: some seeds are calm, some wild."""

    def __init__(self, kinds: Sequence[Kind], rng: random.Random, note: Callable[[int, str], None]) -> None:
        self.active = True
        self.fired: Counter[Kind] = Counter()
        self.unquiet: set[int] = set()
        """Ranks on which an operation will never tell that it is over."""
        self._rng = rng
        self._note = note
        self._rates: dict[str, dict[str, float]] = {}
        share = 1.0 if len(kinds) < 4 else rng.choice((0.1, 0.2, 0.4))
        endless = len(kinds) < 4 or rng.random() < 0.35
        for kind in kinds:
            operation, word = kind.split(".")
            chosen, rate = rng.random(), rng.choice((0.01, 0.03, 0.1)) * _SELDOM.get(operation, 1.0)
            if kind in _NEVER_QUIET:
                if endless and chosen < 0.85:
                    self._rates.setdefault(operation, {})[word] = 0.05 * _SELDOM[operation]
            elif chosen < share:
                self._rates.setdefault(operation, {})[word] = min(rate, _RARE.get(kind, 1.0))

    def fires(self, rank: int, operation: str, word: str) -> bool:
        """Draw one fault of an operation by itself."""
        rate = self._rates.get(operation, {}).get(word)
        if rate is None or not self.active or self._rng.random() >= rate:
            return False
        self._count(rank, f"{operation}.{word}")
        return True

    def draw(self, rank: int, operation: str, words: Iterable[str]) -> str | None:
        """Draw at most one of several faults of an operation."""
        rates = self._rates.get(operation)
        if rates is None or not self.active:
            return None
        point = self._rng.random()
        for word in words:
            rate = rates.get(word, 0.0)
            if point < rate:
                self._count(rank, f"{operation}.{word}")
                return word
            point -= rate
        return None

    def _count(self, rank: int, kind: Kind) -> None:
        self.fired[kind] += 1
        if kind in _NEVER_QUIET:
            self.unquiet.add(rank)
        self._note(rank, f"fault {kind}")


class EdgeFaults(FaultPlan):
    """The plan that a fake device, store or hub of one rank asks."""

    def __init__(self, faults: SeedFaults, rank: int) -> None:
        super().__init__()
        self._faults = faults
        self._rank = rank

    def decide(self, kind: str) -> Fault | None:
        """Draw the fault of one operation; of a pool's share of a copy (`to_host.kv`) only whether it fails."""
        operation, _, pool = kind.partition(".")
        word = self._faults.draw(self._rank, operation, ("pool",) if pool else _DRAWN[operation])
        return None if word is None else _FAULTS[word]


_DRAWN = {
    operation: tuple(word for word in words if word in _FAULTS and word != "pool")
    for operation, words in _WORDS.items()
}
