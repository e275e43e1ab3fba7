"""What ranks say to each other in a round, and which of a rank's operations are open: a table of fixed size."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256

import attrs

from kvcr_actors.errors import ConfigError
from kvcr_actors.types import RequestId

_ID_BYTES = 8
_WORD_BYTES = 8
_ID_SPACE = 1 << 63
_STRIDE = 0x4F1BBCDCBFA53E0B
"""Odd, and about the golden section of the space of numbers: pivots of following rounds lie far apart."""


def operation_number(kind: str, subject: RequestId) -> int:
    """Name an operation alike on every rank: 63 bits, never 0. ConfigError if the subject is no str, int or bytes."""
    if not isinstance(subject, str | int | bytes):
        raise ConfigError(f"{kind} {subject!r}: ranks can agree on a str, int or bytes only")
    text = f"{kind}\0{type(subject).__name__}\0{subject!r}".encode()
    return int.from_bytes(sha256(text).digest()[:_ID_BYTES], "little") >> 1 or 1


def first_agreement(request_id: RequestId) -> tuple[str, RequestId]:
    """Name the first agreement of a request's search; those that follow are numbered on."""
    return "prefetch 1", request_id


def step_operation(node_ids: Iterable[int]) -> tuple[str, bytes]:
    """Name the agreement on a step's nodes by their ids, which are the same on every rank; step numbers may part."""
    return "backup", sha256(b",".join(b"%d" % node_id for node_id in node_ids)).digest()[:16]


@attrs.frozen
class Resolution:
    """What a round found: the bits of each operation that is open everywhere, and whether others are open somewhere."""

    agreed: Mapping[int, int]
    others_open: bool = False


@attrs.frozen
class RoundShape:
    """The size of a rank's table: `slots` operations of `words` 64-bit words of bits each. Equal on every rank."""

    slots: int = 32
    words: int = 64

    def __attrs_post_init__(self) -> None:
        if self.slots < 1 or self.words < 1:
            raise ConfigError(f"a round of {self.slots} slots of {self.words} words: both must be 1 or more")

    @property
    def table_bytes(self) -> int:
        """Bytes that each rank contributes to a round."""
        return self.slots * self._row_bytes

    @property
    def bits(self) -> int:
        """Bits of an operation that take part; those above are lost, which only shortens a prefix."""
        return self.words * 64

    def encode(self, proposals: Mapping[int, int], round_number: int = 0) -> bytes:
        """Write a table of at most `slots` proposals.

        Where there are more, each rank takes those that follow the round's pivot, so that equal ranks pick alike and
        an operation that some rank never opens keeps nobody out for good.
        """
        pivot = round_number * _STRIDE % _ID_SPACE
        chosen = sorted(proposals, key=lambda number: (number - pivot) % _ID_SPACE)[: self.slots]
        mask = (1 << self.bits) - 1
        width = self.words * _WORD_BYTES
        rows = [
            number.to_bytes(_ID_BYTES, "little") + (proposals[number] & mask).to_bytes(width, "little")
            for number in chosen
        ]
        return b"".join(rows).ljust(self.table_bytes, b"\0")

    def decode(self, table: bytes) -> dict[int, int]:
        """Read a table; ConfigError if it has another size."""
        if len(table) != self.table_bytes:
            raise ConfigError(f"a rank's table has {len(table)} bytes, not {self.table_bytes}: shapes must be equal")
        rows = (table[start : start + self._row_bytes] for start in range(0, len(table), self._row_bytes))
        numbered = {int.from_bytes(row[:_ID_BYTES], "little"): row[_ID_BYTES:] for row in rows}
        return {number: int.from_bytes(bits, "little") for number, bits in numbered.items() if number}

    def resolve(self, tables: Sequence[bytes]) -> Resolution:
        """Intersect the bits of each operation that stands in every rank's table; the others stay open."""
        first, *others = [self.decode(table) for table in tables]
        agreed = {number: bits for number, bits in first.items() if all(number in other for other in others)}
        for other in others:
            for number in agreed:
                agreed[number] &= other[number]
        return Resolution(agreed, others_open=any(len(table) > len(agreed) for table in (first, *others)))

    @property
    def _row_bytes(self) -> int:
        return _ID_BYTES + self.words * _WORD_BYTES


@attrs.define(eq=False)
class OpenOperation:
    """An operation of one rank that is not agreed yet; `bits` may only lose bits, for the rounds to come."""

    number: int
    bits: int
    expires_at: float


class OperationTable:
    """The open operations of one rank. Of several with one name, each waits for the one before it to end.

    So a name that is used again is paired in order on every rank, however far apart the ranks are.
    """

    __slots__ = ("_queues", "_shape")

    def __init__(self, shape: RoundShape) -> None:
        self._shape = shape
        self._queues: dict[int, deque[OpenOperation]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[OpenOperation]:
        for queue in self._queues.values():
            yield from queue

    def open(self, number: int, bits: int, expires_at: float) -> OpenOperation:
        """Add an operation; whoever holds it takes its bits back by setting them to 0."""
        entry = OpenOperation(number, bits, expires_at)
        self._queues.setdefault(number, deque()).append(entry)
        return entry

    def encode(self, round_number: int) -> bytes:
        """The table that this rank brings to a round."""
        return self._shape.encode({number: queue[0].bits for number, queue in self._queues.items()}, round_number)

    def settle(self, agreed: Mapping[int, int], now: float) -> list[tuple[OpenOperation, int]]:
        """Take out what was agreed, with its bits, and what expired, with none."""
        ended = [(self._pop(number), bits) for number, bits in agreed.items() if number in self._queues]
        late = self.drop([entry for entry in self if entry.expires_at <= now])
        return [*ended, *((entry, 0) for entry in late)]

    def drop(self, entries: Iterable[OpenOperation]) -> list[OpenOperation]:
        """Take out those of the entries that are still open."""
        dropped = [entry for entry in entries if entry in self._queues.get(entry.number, ())]
        for entry in dropped:
            queue = self._queues[entry.number]
            queue.remove(entry)
            if not queue:
                del self._queues[entry.number]
        return dropped

    def clear(self) -> list[OpenOperation]:
        """Take out everything."""
        entries = list(self)
        self._queues.clear()
        return entries

    def _pop(self, number: int) -> OpenOperation:
        queue = self._queues[number]
        entry = queue.popleft()
        if not queue:
            del self._queues[number]
        return entry
