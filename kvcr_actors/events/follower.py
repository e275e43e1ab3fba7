"""The reader's side of the protocol, without sockets: batches in order, gaps noticed and repaired by a replay."""

from __future__ import annotations

from collections import deque
from typing import Any, Final, TypeAlias

import attrs
import msgspec

from kvcr_actors.errors import EventFormatError
from kvcr_actors.events.wire import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    WireEvent,
    WireHash,
    decode_batch,
    tier_of,
)
from kvcr_actors.types import Tier

_HELD_BATCHES: Final = 10_000
_HELD_BYTES: Final = 256 << 20
"""Live batches that wait for the end of a replay; older ones are lost."""
_HOLDINGS: Final = 64
"""Kinds of holdings that a publisher may speak of."""
_OWNER_SHOWN: Final = 40


WireHolding: TypeAlias = tuple[Tier, str | None] | tuple[Tier, str | None, int]
"""A tier, an owner (None is the engine) and, if the publisher tells its cache groups apart, the group."""


class WireIndex:
    """What a publisher's blocks are, by holding, as its wire events tell it."""

    def __init__(self) -> None:
        self.content: dict[WireHolding, dict[WireHash, WireHash | None]] = {}
        self.repeated = 0
        """Blocks stored while held: device blocks that were cut off are stated again."""
        self.anomalies = 0
        """Blocks removed while not held."""

    def keys(self, tier: Tier, owner: str | None = None, group: int | None = None) -> frozenset[WireHash]:
        """The hashes held in a tier by one owner, in one cache group."""
        return frozenset(self.content.get(_holding(tier, owner, group), ()))

    def apply(self, event: WireEvent) -> None:
        """Apply one event; EventFormatError, with nothing changed, for a medium that is not known."""
        match event:
            case BlockStored():
                held = self._held(event)
                parent = event.parent_block_hash
                for block in event.block_hashes:
                    self.repeated += block in held
                    held[block] = parent
                    parent = block
            case BlockRemoved():
                held = self._held(event)
                for block in event.block_hashes:
                    self.anomalies += held.pop(block, msgspec.UNSET) is msgspec.UNSET
            case AllBlocksCleared():
                for (_, owner, *_), held in self.content.items():
                    if owner == event.ownership:
                        held.clear()

    def _held(self, event: BlockStored | BlockRemoved) -> dict[WireHash, WireHash | None]:
        holding = _holding(tier_of(event.medium), event.ownership, event.group_idx)
        if holding not in self.content and len(self.content) >= _HOLDINGS:
            raise EventFormatError(f"more than {_HOLDINGS} tiers, owners and cache groups")
        return self.content.setdefault(holding, {})


def _holding(tier: Tier, owner: str | None, group: int | None) -> WireHolding:
    return (tier, owner) if group is None else (tier, owner, group)


def _holding_name(holding: WireHolding) -> str:
    tier, owner = holding[:2]
    words = [owner[:_OWNER_SHOWN]] if owner else []
    if len(holding) == 3:
        words.append(f"group {holding[2]}")
    return f"{tier.value} ({', '.join(words)})" if words else tier.value


@attrs.define
class FollowTotals:
    """What a follower saw."""

    batches: int = 0
    events: int = 0
    gaps: int = 0
    """Times that a batch came before its predecessor."""
    lost: int = 0
    """Sequence numbers that no replay gave."""
    stale: int = 0
    """Batches with a number that was applied before."""
    restarts: int = 0
    """Times that live numbers did not rise: the publisher began again, or there are two."""
    contradictions: int = 0
    """Blocks removed while not held, although nothing was missing."""
    malformed: int = 0
    cut_off: int = 0
    """Connections that ended because of what the publisher sent: a frame that is too large, mostly."""


class StreamFollower:
    """Applies one publisher's batches to an index in order of their numbers.

    `receive` takes a live batch; it may give the number from which to ask for a replay. The replay's batches go to
    `replayed`, and `end_replay` ends it, also when it never came.
    """

    def __init__(self, *, can_replay: bool, index: WireIndex | None = None) -> None:
        self.index = WireIndex() if index is None else index
        self.totals = FollowTotals()
        self.in_doubt = False
        """Whether batches were lost, and no clear has made up for them."""
        self._can_replay = can_replay
        self._expected: int | None = None
        self._live: int | None = None
        self._replaying = False
        self._held: deque[tuple[int, bytes]] = deque()
        self._held_bytes = 0

    @property
    def expected(self) -> int | None:
        """The number of the next batch; None before the first."""
        return self._expected

    @property
    def is_replaying(self) -> bool:
        """Whether a replay was asked for and is not over."""
        return self._replaying

    def receive(self, sequence: int, payload: bytes) -> int | None:
        """Take a live batch. A number is given back if a replay from there is needed first."""
        if self._live is not None and sequence <= self._live:
            self.totals.restarts += 1
            self.in_doubt = True
        self._live = sequence
        if self._replaying:
            self._hold(sequence, payload)
            return None
        if self._expected is None or sequence > self._expected:
            self.totals.gaps += self._expected is not None
            if self._can_replay:
                self._replaying = True
                self._hold(sequence, payload)
                return self._expected or 0
        self._take(sequence, payload)
        return None

    def replayed(self, sequence: int, payload: bytes) -> None:
        """Take one batch of the replay that was asked for."""
        self._take(sequence, payload)

    def end_replay(self) -> None:
        """Go on with the live batches, whatever the replay gave."""
        self._replaying = False
        held, self._held, self._held_bytes = self._held, deque(), 0
        for sequence, payload in held:
            self._take(sequence, payload)

    def note_malformed(self) -> None:
        """Count a message that could not even be numbered; what it told is lost."""
        self.totals.malformed += 1
        self.in_doubt = True

    def note_cut_off(self) -> None:
        """Count a connection that ended because its messages cannot be taken; what they told is lost."""
        self.totals.cut_off += 1
        self.in_doubt = True

    @property
    def faults(self) -> list[str]:
        """Say in words why the index cannot be trusted; none if it can."""
        totals = self.totals
        checks = [
            (not totals.batches, "no batch came"),
            (
                self.in_doubt,
                f"earlier batches were not seen ({totals.lost} lost in between), and no clear followed",
            ),
            (totals.restarts, f"the publisher began again at lower numbers ({totals.restarts} times)"),
            (totals.malformed, f"{totals.malformed} messages could not be read"),
            (totals.cut_off, f"{totals.cut_off} times the publisher sent a frame that is too large, or no ZeroMQ"),
            (totals.contradictions, f"{totals.contradictions} blocks were removed while not held"),
        ]
        return [words for wrong, words in checks if wrong]

    def describe(self) -> dict[str, Any]:
        """Totals and the size of the index, for people."""
        blocks: dict[str, int] = {}
        for holding in sorted(self.index.content, key=str):  # not of the blocks: there may be millions
            name = _holding_name(holding)
            blocks[name] = blocks.get(name, 0) + len(self.index.content[holding])
        return {
            **attrs.asdict(self.totals),
            "repeated": self.index.repeated,
            "anomalies": self.index.anomalies,
            "in_doubt": self.in_doubt,
            "next": self._expected,
            "blocks": blocks,
        }

    def _hold(self, sequence: int, payload: bytes) -> None:
        self._held.append((sequence, payload))
        self._held_bytes += len(payload)
        while len(self._held) > _HELD_BATCHES or self._held_bytes > _HELD_BYTES:
            self._held_bytes -= len(self._held.popleft()[1])

    def _take(self, sequence: int, payload: bytes) -> None:
        if self._expected is not None and sequence < self._expected:
            self.totals.stale += 1
            return
        if self._expected is None or sequence > self._expected:
            self.totals.lost += 0 if self._expected is None else sequence - self._expected
            self.in_doubt = True
        self._expected = sequence + 1
        try:
            self._apply(decode_batch(payload))
        except EventFormatError:
            self.note_malformed()

    def _apply(self, batch: EventBatch) -> None:
        self.totals.batches += 1
        for event in batch.events:
            self.totals.events += 1
            if isinstance(event, AllBlocksCleared) and event.ownership is None:
                self.in_doubt = False
            before = self.index.anomalies
            self.index.apply(event)
            if not self.in_doubt:
                self.totals.contradictions += self.index.anomalies - before
