"""The publisher without its sockets: numbered batches, what a replay gives, and when a snapshot repairs the rest."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeAlias

import attrs

from kvcr_actors.core.backlog import EventBacklog
from kvcr_actors.core.inventory import InventoryEvent
from kvcr_actors.core.keys import KeyAdapter, PageKeyAdapter
from kvcr_actors.errors import ConfigError
from kvcr_actors.events.announcer import Announcer
from kvcr_actors.events.chain import EVENT_BYTES, Limits, measure
from kvcr_actors.events.contexts import ContextSource
from kvcr_actors.events.hashes import BlockHashes
from kvcr_actors.events.wire import (
    MAX_BLOCKS,
    MAX_EVENTS,
    MAX_PAYLOAD_BYTES,
    AllBlocksCleared,
    Dialect,
    EventBatch,
    WireEvent,
    encode_batch,
)

Message: TypeAlias = tuple[int, bytes]
"""A sequence number and a payload."""

_SLICE_BLOCKS = 512
"""Blocks that a snapshot adds at a time."""
_SNAPSHOT_REST = 9.0
"""A reader too slow for a snapshot asks for the next: for all others the index must be whole most of the time."""


def _between(least: int, most: int | None = None) -> Callable[[object, attrs.Attribute[int], int], None]:
    def check(limits: object, field: attrs.Attribute[int], value: int) -> None:
        if value < least or (most is not None and value > most):
            bounds = f"{least} or more" if most is None else f"{least} to {most}"
            raise ConfigError(f"{field.name} {value}: give {bounds}")

    return check


@attrs.frozen
class StreamLimits:
    """Bounds of one publisher's memory and messages."""

    events: int = attrs.field(default=MAX_EVENTS, validator=_between(1, MAX_EVENTS))
    blocks: int = attrs.field(default=MAX_BLOCKS, validator=_between(1, MAX_BLOCKS))
    payload_bytes: int = attrs.field(default=256 << 10, validator=_between(2 * EVENT_BYTES, MAX_PAYLOAD_BYTES))
    """Of one batch. Far below what readers take, because a socket's queue counts batches and not bytes."""
    backlog_changes: int = attrs.field(default=1 << 20, validator=_between(1))
    """Key changes that may wait to be sent."""
    buffer_batches: int = attrs.field(default=10_000, validator=_between(1))
    buffer_bytes: int = attrs.field(default=64 << 20, validator=_between(1))
    """What is kept for replays; the newest batch always is."""
    snapshot_pause_s: float = 1.0
    """The least time from the end of one snapshot to the next; nine times what it took, if that is longer."""


class EventStream:
    """Turns inventory events into numbered batches. One thread at a time; `now` is any clock that only grows.

    It starts with a snapshot, so that what readers knew of an earlier publisher is cleared. `numbers` gives each
    batch its sequence number; what it raises, `next_message` raises, and nothing is lost. After what anything else
    raises there, `begin_anew`. `keys` says what readers know the pages by.
    """

    def __init__(
        self,
        dialect: Dialect,
        contexts: ContextSource,
        numbers: Callable[[], int],
        *,
        rank: int = 0,
        limits: StreamLimits | None = None,
        keys: KeyAdapter[Any] | None = None,
    ) -> None:
        self.limits = limits or StreamLimits()
        self.backlog = EventBacklog(self.limits.backlog_changes)
        self.snapshots = 0
        self.batches = 0
        hashes = BlockHashes(dialect, keys or PageKeyAdapter())
        self._hash_bytes = hashes.bytes
        limit = Limits(self.limits.blocks, self.limits.payload_bytes, hashes.bytes)
        self._announcer = Announcer(dialect, hashes, contexts, limit)
        self._numbers = numbers
        self._rank = rank
        self._pending: deque[WireEvent] = deque()
        self._unsent: list[WireEvent] = []
        self._wants_snapshot = True
        self._snapshot: Iterator[list[WireEvent]] | None = None
        self._snapshot_began = 0.0
        self._snapshot_after = float("-inf")
        self._buffer: deque[Message] = deque()
        self._buffer_bytes = 0
        self._cleared_at = 0

    @property
    def newest(self) -> int:
        """The number of the last batch; -1 before the first."""
        return self._buffer[-1][0] if self._buffer else -1

    def push(self, events: Iterable[InventoryEvent], *, coalesce: bool = True) -> None:
        """Take events in order (see `EventBacklog.push`)."""
        self.backlog.push(events, coalesce=coalesce)

    def next_message(self, now: float, timestamp: float) -> Message | None:
        """Give the next batch, stamped with a wall-clock time; None if there is nothing to tell."""
        if not self._unsent:
            self._unsent = self._collect(now)
        return self._number(timestamp) if self._unsent else None

    def heartbeat(self, timestamp: float) -> Message:
        """Give a batch without events: readers that join late, or lost the last batch, learn where the stream is."""
        return self._number(timestamp)

    def ask_snapshot(self) -> None:
        """Have the stream cleared and announced anew, at the end of the pause after the last time."""
        self._wants_snapshot = True

    def begin_anew(self) -> None:
        """Forget what is half told, and start with a snapshot as at first: something failed on the way to readers."""
        self._pending.clear()
        self._unsent, self._snapshot = [], None
        self._wants_snapshot, self._snapshot_after = True, float("-inf")

    def covers(self, start: int) -> bool:
        """Whether a replay from `start` tells all that a reader may need: it reaches back to there, or to a clear."""
        return not self._buffer or self._buffer[0][0] <= max(start, self._cleared_at)

    def replay(self, start: int, count: int) -> Sequence[Message]:
        """Give up to `count` kept batches from `start`, or from the oldest after it."""
        if not self._buffer:
            return ()
        skip = min(max(0, start - self._buffer[0][0]), len(self._buffer))
        return tuple(islice(self._buffer, skip, skip + count))

    def describe(self) -> dict[str, Any]:
        """Counters for people."""
        return {
            "batches": self.batches,
            "snapshots": self.snapshots,
            "waiting": len(self.backlog),
            "coalesced": self.backlog.coalesced,
            "dropped": self.backlog.dropped,
            "held": len(self.backlog.index),
            "buffered": len(self._buffer),
            "buffered_bytes": self._buffer_bytes,
            **self._announcer.describe(),
        }

    def _number(self, timestamp: float) -> Message:
        events = self._unsent
        payload = encode_batch(EventBatch(timestamp, events, self._rank))
        number = self._numbers()
        self._unsent = []
        self.batches += 1
        if events and _begins_anew(events[0]):
            self._cleared_at = number
        message = (number, payload)
        self._buffer.append(message)
        self._buffer_bytes += len(message[1])
        while len(self._buffer) > 1 and (
            len(self._buffer) > self.limits.buffer_batches or self._buffer_bytes > self.limits.buffer_bytes
        ):
            self._buffer_bytes -= len(self._buffer.popleft()[1])
        return message

    def _collect(self, now: float) -> list[WireEvent]:
        """Fill one batch: a clear begins a batch of its own, so that a replay can begin there."""
        events: list[WireEvent] = []
        blocks = size = 0
        while (event := self._next_event(now)) is not None:
            more_blocks, more_size = measure(event, self._hash_bytes)
            full = (
                len(events) == self.limits.events
                or blocks + more_blocks > self.limits.blocks
                or size + more_size > self.limits.payload_bytes
            )
            if events and (full or _begins_anew(event)):
                self._pending.appendleft(event)
                break
            events.append(event)
            blocks += more_blocks
            size += more_size
        return events

    def _next_event(self, now: float) -> WireEvent | None:
        while not self._pending:
            if self._snapshot is not None:
                self._continue_snapshot(self._snapshot, now)
            elif (self._wants_snapshot or self.backlog.has_gap) and now >= self._snapshot_after:
                self._begin_snapshot(now)
            elif (event := self.backlog.take()) is not None:
                self._pending.extend(self._announce(event))
            else:
                return None
        return self._pending.popleft()

    def _announce(self, event: InventoryEvent) -> list[WireEvent]:
        try:
            return self._announcer.apply(event, self.backlog.index)
        except Exception:
            self.backlog.index.apply(event)  # maybe once more, which is no harm: the snapshot to come needs it
            raise

    def _begin_snapshot(self, now: float) -> None:
        self._wants_snapshot = False
        self.backlog.take_gaps()
        self._snapshot_began = now
        self.snapshots += 1
        self._pending.extend(self._announcer.clears())
        self._snapshot = self._announcer.announce_all(self.backlog.index, _SLICE_BLOCKS)

    def _continue_snapshot(self, snapshot: Iterator[list[WireEvent]], now: float) -> None:
        part = next(snapshot, None)
        if part is None:
            self._snapshot = None
            took_s = now - self._snapshot_began
            self._snapshot_after = now + max(self.limits.snapshot_pause_s, _SNAPSHOT_REST * took_s)
        else:
            self._pending.extend(part)


def _begins_anew(event: WireEvent) -> bool:
    """Whether it is the first of a snapshot; a clear of a store's own blocks comes second."""
    return isinstance(event, AllBlocksCleared) and event.ownership is None
