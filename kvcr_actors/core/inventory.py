"""Inventory events, and the index that rebuilds every tier's content from them alone."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import TypeAlias, assert_never

import attrs

from kvcr_actors.core.values import check_key, checked_keys, shown
from kvcr_actors.errors import InvalidNodeError
from kvcr_actors.types import PageKey, Tier


class Ownership(enum.StrEnum):
    """Who holds the copy that an event speaks of: the engine and its controller, or a store of its own."""

    ENGINE = "engine"
    STORE = "store"


@attrs.frozen
class BlocksStored:
    """Copies came to be in a tier: `keys` root to tail, `parents[i]` the key before `keys[i]` (None at a root)."""

    tier: Tier
    keys: tuple[PageKey, ...]
    parents: tuple[PageKey | None, ...]
    ownership: Ownership = Ownership.ENGINE

    def __attrs_post_init__(self) -> None:
        if len(self.keys) != len(self.parents):
            raise InvalidNodeError(f"{len(self.keys)} keys were stored with {len(self.parents)} parents; give one each")


@attrs.frozen
class BlocksRemoved:
    """Copies went from a tier: `keys` leaves first."""

    tier: Tier
    keys: tuple[PageKey, ...]
    ownership: Ownership = Ownership.ENGINE


@attrs.frozen
class TierCleared:
    """Every copy in a tier went at once."""

    tier: Tier
    ownership: Ownership = Ownership.ENGINE


InventoryEvent: TypeAlias = BlocksStored | BlocksRemoved | TierCleared


def check_event(event: object) -> None:
    """InvalidNodeError for what is no inventory event, or has fields that are malformed."""
    if not isinstance(event, BlocksStored | BlocksRemoved | TierCleared):
        raise InvalidNodeError(f"{shown(event)} is a {type(event).__name__}; give an inventory event")
    what = type(event).__name__
    for field, value, kind in (("tier", event.tier, Tier), ("ownership", event.ownership, Ownership)):
        if type(value) is not kind:
            raise InvalidNodeError(f"{what}: {field} {shown(value)} is not a {kind.__name__}")
    if isinstance(event, TierCleared):
        return
    if checked_keys(what, event.keys) is not event.keys:
        raise InvalidNodeError(f"{what}: keys {shown(event.keys)} is not a tuple, which cannot change")
    if isinstance(event, BlocksStored):
        if type(event.parents) is not tuple:
            raise InvalidNodeError(f"{what}: parents {shown(event.parents)} is not a tuple, which cannot change")
        for parent in event.parents:
            if parent is not None:
                check_key(what, "parent", parent)


Holding: TypeAlias = tuple[Tier, Ownership]
"""Whose copies in which tier: events of one holding say nothing of another."""


class InventoryIndex:
    """The content of each tier as its events tell it.

    A store's own copies (`Ownership.STORE`) are kept apart from the engine's, also within one tier.
    `anomalies` counts what a correct stream never has: a stored key stored again, an absent one removed.
    """

    def __init__(self) -> None:
        self._content: dict[Holding, dict[PageKey, PageKey | None]] = {
            (tier, owner): {} for tier in Tier for owner in Ownership
        }
        self.anomalies = 0
        self.applied = 0

    def __len__(self) -> int:
        return sum(map(len, self._content.values()))

    def publish(self, events: Iterable[InventoryEvent]) -> None:
        """Apply events in order."""
        for event in events:
            self.apply(event)

    def apply(self, event: InventoryEvent) -> None:
        """Apply one event."""
        self.applied += 1
        content = self._content[event.tier, event.ownership]
        match event:
            case BlocksStored():
                before = len(content)
                content.update(zip(event.keys, event.parents, strict=True))
                self.anomalies += len(event.keys) - (len(content) - before)
            case BlocksRemoved():
                before = len(content)
                for key in event.keys:
                    content.pop(key, None)
                self.anomalies += len(event.keys) - (before - len(content))
            case TierCleared():
                content.clear()
            case _:
                assert_never(event)

    def keys(self, tier: Tier) -> frozenset[PageKey]:
        """The keys that a tier holds, whoever owns them."""
        return frozenset[PageKey]().union(*(self._content[tier, owner] for owner in Ownership))

    def residents(self, tier: Tier) -> frozenset[PageKey]:
        """The keys of one of the controller's tiers: a store's own copies are the store's, wherever they lie."""
        if tier is not Tier.STORE:
            return frozenset(self._content[tier, Ownership.ENGINE])
        own = (self._content[other, Ownership.STORE] for other in Tier)
        return frozenset(self._content[tier, Ownership.ENGINE]).union(*own)

    def holding(self, tier: Tier, ownership: Ownership) -> Mapping[PageKey, PageKey | None]:
        """One owner's copies in a tier, each with its parent, in the order in which they came; it changes."""
        return self._content[tier, ownership]

    def parent(self, tier: Tier, key: PageKey) -> PageKey | None:
        """The parent that a held key was stored with; KeyError if the tier does not hold it."""
        for owner in Ownership:
            if key in self._content[tier, owner]:
                return self._content[tier, owner][key]
        raise KeyError(key)
