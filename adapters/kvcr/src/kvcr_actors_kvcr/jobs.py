"""One operation of the store on the owner thread: a generator that waits for the runner's operations, one at a time."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Generic, TypeAlias, TypeVar

import attrs
from kvcr.types import BlockKey, OpEntryResult, OpHandle

from kvcr_actors.ports import Operation

T = TypeVar("T")

Entries: TypeAlias = Mapping[BlockKey, OpEntryResult]


@attrs.frozen
class Wait:
    """What a job waits for: an operation of the runner's."""

    handle: OpHandle
    size: int
    """Bytes of host memory that the operation reads or writes."""
    peer: str = ""
    """The endpoint that is to write them; none for what is done here."""


Steps: TypeAlias = Generator[Wait, Entries, T]


@attrs.define(eq=False)
class Job(Generic[T]):
    """A running operation. `late` is the outcome for waiters who do not wait for the end; None waits for ever."""

    name: str
    steps: Steps[T]
    operation: Operation[T]
    on_error: T
    """The outcome if the steps raise or the runner stops."""
    late: T | None = None
    settle_at: float | None = None
    """When waiters get `late`, on the monotonic clock."""
    waits: Wait | None = None
    waits_since: float = 0.0
    settled: bool = False
    hazards: dict[OpHandle, int] = attrs.field(factory=dict[OpHandle, int])
    """Operations that ended while native code may still touch their memory, with its bytes."""
    over: bool = False
