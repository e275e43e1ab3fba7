"""The asynchronous face of an embedded store: one owner thread for its blocking calls, lookups answered at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from kvcr_actors.errors import StoreError
from kvcr_actors.ports import (
    BatchOutcome,
    ClearOutcome,
    Description,
    HostMemory,
    PageBatch,
    PageOutcome,
    Services,
    StoreTraits,
)
from kvcr_actors.runtime.owner_thread import OwnerThread
from kvcr_actors.stores.alignments import Alignments
from kvcr_actors.stores.backend import PageBackend
from kvcr_actors.transfers import Operation
from kvcr_actors.types import PageKey, RequestId

T = TypeVar("T")

EMBEDDED = StoreTraits()
"""What the memory and the disk store declare."""


def all_failed(batch: PageBatch, error: object) -> BatchOutcome:
    """The outcome of a batch that never got to its pages."""
    return BatchOutcome((PageOutcome.FAILED,) * len(batch.keys), str(error))


class ThreadedStore:
    """A `Store` over a `PageBackend`; reads, writes and alignments run on one thread, in the order they were asked for.

    Events go to the loop in the order of the operations that made them. A store that did not open may be opened again.
    """

    def __init__(self, name: str, backend: PageBackend, traits: StoreTraits = EMBEDDED) -> None:
        self.name = name
        self.traits = traits
        self._backend = backend
        self._services: Services | None = None
        self._owner: OwnerThread | None = None
        self._host: HostMemory | None = None
        self._closing: Operation[Exception | None] | None = None
        self._clearing = 0
        """Clears that the thread has not done yet, or could not do: until then the index speaks of old pages."""
        self._alignments = Alignments()

    async def open(self, services: Services, host: HostMemory) -> None:
        """Open the backend on its thread and announce what it holds, parents first."""
        if self._owner is not None:
            raise StoreError(f"store {self.name} was opened before: make a new one")
        self._services, self._host = services, host
        owner = self._owner = OwnerThread(f"store-{self.name}", services)
        opening = partial(self._publishing, services, partial(self._backend.open, host.layout))
        error = await owner.submit(opening, _as_outcome).outcome()
        if error is not None:
            self._owner = None
            await owner.close(self.traits.write_budget_s)
            raise error

    def begin_request(self, request_id: RequestId, hints: object) -> None:
        """Nothing: an embedded store has no peers."""

    def end_request(self, request_id: RequestId) -> None:
        """Nothing, as above."""

    def lookup(self, keys: Sequence[PageKey], request_id: RequestId) -> Operation[tuple[int, ...]]:
        """Answer from the index in memory, at once. After `close`, and until a clear is done, all is a miss."""
        del request_id
        if self._closing is not None or self._clearing:
            return Operation[tuple[int, ...]].finished((0,) * len(keys))
        return Operation[tuple[int, ...]].finished(tuple(map(self._backend.lookup, keys)))

    def confirm(self, keys: Sequence[PageKey], request_id: RequestId) -> Operation[bool]:
        """An embedded store promises only what it has."""
        del keys, request_id
        return Operation[bool].finished(True)  # noqa: FBT003

    def read(self, batch: PageBatch, request_id: RequestId) -> Operation[BatchOutcome]:
        """Copy pages into host slots, on the thread."""
        del request_id
        return self._submit(self._backend.read, batch)

    def write(self, batch: PageBatch) -> Operation[BatchOutcome]:
        """Copy pages out of host slots, on the thread."""
        return self._submit(self._backend.write, batch)

    def align(self, keys: Sequence[PageKey]) -> None:
        """Make a prefix recent, after the operations asked for before; shed where too many wait."""
        if self._owner is not None:
            align = self._alignments.admit(partial(self._backend.align, tuple(keys)))
            if align is not None:
                self._owner.post(align)

    def clear(self) -> Operation[ClearOutcome]:
        """Forget every page, after the operations asked for before; a store that fails to serves no lookup again."""
        if self._owner is None or self._services is None:
            return Operation[ClearOutcome].finished(_not_cleared(f"store {self.name} is not open"))
        self._clearing += 1
        operation = self._owner.submit(partial(self._publishing, self._services, self._clear), _not_cleared)
        operation.when_settled(self._note_cleared)
        return operation

    def _clear(self) -> ClearOutcome:
        return ClearOutcome(self._backend.clear())

    def _note_cleared(self, outcome: ClearOutcome) -> None:
        if outcome.error is None:
            self._clearing -= 1

    def contents(self) -> frozenset[PageKey]:
        """The keys held now."""
        return self._backend.contents()

    async def close(self, deadline_s: float) -> None:
        """Let accepted operations run, then close the backend; DeadlineError if they do not end in time.

        After a DeadlineError the backend stays open, and its folder locked, until the process ends.
        """
        if self._owner is None:
            return
        if self._closing is None:
            self._closing = self._owner.submit(self._backend.close, _as_outcome)
        await self._owner.close(deadline_s)
        error = await self._closing.outcome()
        if error is not None:
            raise StoreError(f"store {self.name} did not close cleanly: {error}") from error

    def describe(self) -> Description:
        """State and counters for people."""
        waiting = 0 if self._owner is None else self._owner.depth
        return {
            "name": self.name,
            "waiting": waiting,
            "alignments_shed": self._alignments.shed,
            **self._backend.counters(),
        }

    def _submit(
        self, call: Callable[[PageBatch, HostMemory], BatchOutcome], batch: PageBatch
    ) -> Operation[BatchOutcome]:
        if self._owner is None or self._services is None or self._host is None:
            return Operation[BatchOutcome].finished(all_failed(batch, f"store {self.name} is not open"))
        running = partial(self._publishing, self._services, partial(call, batch, self._host))
        return self._owner.submit(running, partial(all_failed, batch))

    def _publishing(self, services: Services, call: Callable[[], T]) -> T:
        """Run one call and send its events to the loop, even if it raises."""
        try:
            return call()
        finally:
            events = self._backend.take_events()
            if events:
                services.post(partial(services.publish, events))


def _not_cleared(error: object) -> ClearOutcome:
    return ClearOutcome(error=str(error))


def _as_outcome(error: Exception) -> Exception | None:
    return error
