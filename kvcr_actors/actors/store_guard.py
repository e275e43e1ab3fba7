"""The store as the actors call it: a call that raises is a counted fault and a failed outcome, never an actor's end."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import anyio
import structlog

from kvcr_actors.core.stats import ControllerStats
from kvcr_actors.ports import BatchOutcome, ClearOutcome, PageBatch, PageOutcome, Store, StoreTraits
from kvcr_actors.transfers import Operation
from kvcr_actors.types import PageKey, PrefetchRequest, RequestId

log = structlog.get_logger()

T = TypeVar("T")


class GuardedStore:
    """A `Store` behind the calls of the actors. A raising call is taken to have touched no memory."""

    def __init__(self, store: Store, stats: ControllerStats) -> None:
        self._store = store
        self._stats = stats
        self._running = 0
        self._quiet = anyio.Event()
        self.is_retired = False
        """Whether it starts nothing more: every call fails at once."""

    def retire(self) -> None:
        """Start nothing more."""
        self.is_retired = True

    async def quiet(self) -> None:
        """Wait until no operation touches memory. The caller sets the deadline."""
        while self._running:
            self._quiet = anyio.Event()
            await self._quiet.wait()

    @property
    def traits(self) -> StoreTraits:
        """What the store declares of itself."""
        return self._store.traits

    @contextmanager
    def serving(self, request: PrefetchRequest) -> Generator[None]:
        """Lend the store a request's hints for the block; at its end the store releases what it claimed for it."""
        if request.hints is None and not self.traits.requires_confirmation:
            yield
            return
        if request.hints is not None:
            try:
                self._store.begin_request(request.request_id, request.hints)
            except Exception as error:  # noqa: BLE001 - a store is foreign code; the request goes on without its hints
                self._note("begin_request", error)
                yield
                return
        try:
            yield
        finally:
            try:
                self._store.end_request(request.request_id)
            except Exception as error:  # noqa: BLE001 - as above
                self._note("end_request", error)

    def lookup(self, keys: Sequence[PageKey], request_id: RequestId) -> Operation[tuple[int, ...]]:
        """Ask for the pools held; a fault is a miss for every key."""
        if self.is_retired:
            return Operation[tuple[int, ...]].finished((0,) * len(keys))
        try:
            return self._counted(self._store.lookup(keys, request_id))
        except Exception as error:  # noqa: BLE001 - a store is foreign code; the request recomputes
            self._note("lookup", error)
            return Operation[tuple[int, ...]].finished((0,) * len(keys))

    def read(self, batch: PageBatch, request_id: RequestId) -> Operation[BatchOutcome]:
        """Read pages; a fault fails each of them."""
        if self.is_retired:
            return self._over(batch)
        try:
            return self._counted(self._store.read(batch, request_id))
        except Exception as error:  # noqa: BLE001 - as above
            return self._failed("read", batch, error)

    def confirm(self, keys: Sequence[PageKey], request_id: RequestId) -> Operation[bool]:
        """Ask for what was promised of a prefix; a fault is a no."""
        if self.is_retired:
            return Operation[bool].finished(False)  # noqa: FBT003
        try:
            return self._counted(self._store.confirm(keys, request_id))
        except Exception as error:  # noqa: BLE001 - as above
            self._note("confirm", error)
            return Operation[bool].finished(False)  # noqa: FBT003

    def write(self, batch: PageBatch) -> Operation[BatchOutcome]:
        """Write pages; a fault fails each of them."""
        if self.is_retired:
            return self._over(batch)
        try:
            return self._counted(self._store.write(batch))
        except Exception as error:  # noqa: BLE001 - as above
            return self._failed("write", batch, error)

    def clear(self) -> Operation[ClearOutcome]:
        """Have the store forget every page; a fault is an outcome. Also for a store that is retired."""
        try:
            return self._counted(self._store.clear())
        except Exception as error:  # noqa: BLE001 - as above
            self._note("clear", error)
            return Operation[ClearOutcome].finished(ClearOutcome(error=repr(error)))

    def align(self, keys: Sequence[PageKey]) -> None:
        """Refresh a prefix; a fault leaves it as old as it is."""
        if self.is_retired:
            return
        try:
            self._store.align(keys)
        except Exception as error:  # noqa: BLE001 - as above
            self._note("align", error)

    def _counted(self, operation: Operation[T]) -> Operation[T]:
        if not operation.is_quiet:
            self._running += 1
            operation.when_quiet(self._one_less)
        return operation

    def _one_less(self) -> None:
        self._running -= 1
        if not self._running:
            self._quiet.set()

    @staticmethod
    def _over(batch: PageBatch) -> Operation[BatchOutcome]:
        failed = (PageOutcome.FAILED,) * len(batch.keys)
        return Operation[BatchOutcome].finished(BatchOutcome(failed, "the store was detached"))

    def _failed(self, call: str, batch: PageBatch, error: Exception) -> Operation[BatchOutcome]:
        self._note(call, error)
        return Operation[BatchOutcome].finished(BatchOutcome((PageOutcome.FAILED,) * len(batch.keys), repr(error)))

    def _note(self, call: str, error: Exception) -> None:
        self._stats.store_faults += 1
        log.error("store.call_raised", store=self._store.name, call=call, error=repr(error))
