"""A store alone for asynchronous code, as a task of a loop; for synchronous callers there is `StoreClient`."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import anyio
import anyio.to_thread

from kvcr_actors.batches import joined, late_words
from kvcr_actors.bounce import Lease
from kvcr_actors.ports import BatchOutcome, ClearOutcome, Description, EventSink, HostMemory, PageBatch, Store
from kvcr_actors.runtime.hosts import TaskHost
from kvcr_actors.runtime.supervisor import raising_sole_cause
from kvcr_actors.store_session import PARTS_AT_ONCE, StoreSession
from kvcr_actors.stores.threaded import all_failed
from kvcr_actors.types import PageKey, RequestId

_COPY_HERE_BYTES: Final = 1 << 20
"""More than this is copied on a worker thread, so that the loop goes on."""


class AsyncStoreClient:
    """A store on the loop that runs. Made by `open_store_client`, or started and closed by hand.

    Everything belongs to the loop's thread. What it takes and promises is what `StoreClient` does; a call that is
    cancelled has written nothing to the caller's memory afterwards.
    """

    def __init__(
        self,
        store: Store,
        host: HostMemory,
        *,
        bounce_pages: int | None = None,
        drain_budget_s: float = 10.0,
        sinks: Sequence[EventSink] = (),
    ) -> None:
        self._session = StoreSession(store, host, bounce_pages=bounce_pages, drain_budget_s=drain_budget_s, sinks=sinks)
        self._host = TaskHost(self._session.main, name=f"kvcr-store-{store.name}")

    async def start(self, timeout_s: float = 60.0) -> AsyncStoreClient:
        """Open the store; raises what it refuses with, StoreError if it cannot store, DeadlineError."""
        await self._host.start(timeout_s)
        return self

    async def close(self, timeout_s: float | None = None) -> None:
        """Let calls end, end what requests are open, and close the store; a second call has nothing to do."""
        await self._host.stop(self._session.close_budget_s if timeout_s is None else timeout_s)

    def begin_request(self, request_id: RequestId, hints: object = None) -> None:
        """Lend the store a request's router hints until `end_request`. InvalidNodeError if the request is open."""
        self._session.begin_request(request_id, hints)

    def end_request(self, request_id: RequestId) -> None:
        """Have the store discard a request's hints and claims. InvalidNodeError if the request is not open."""
        self._session.end_request(request_id)

    async def lookup(
        self, keys: Sequence[PageKey], request_id: RequestId = None, timeout_s: float | None = None
    ) -> tuple[int, ...]:
        """For each key a bit set of the pools held (bit `i` is pool `i`; 0 is a miss). DeadlineError."""
        limit_s = self._session.read_budget_s(0) if timeout_s is None else timeout_s
        return await self._session.lookup(tuple(keys), request_id, limit_s)

    async def confirm(self, keys: Sequence[PageKey], request_id: RequestId, timeout_s: float | None = None) -> bool:
        """Make sure of a prefix that a lookup promised, for a store that asks for it. DeadlineError."""
        limit_s = self._session.read_budget_s(len(keys)) if timeout_s is None else timeout_s
        return await self._session.confirm(tuple(keys), request_id, limit_s)

    async def read(
        self, batch: PageBatch, request_id: RequestId = None, timeout_s: float | None = None
    ) -> BatchOutcome:
        """Copy pages into host slots; those that are late are FAILED, and slots of pages not OK keep their bytes."""
        session, parts = self._session, self._session.parts(batch)

        async def move(part: PageBatch, left_s: float) -> BatchOutcome:
            lease = Lease()
            try:
                outcome = await session.read(lease, part, request_id, left_s)
                await self._copy(part, partial(session.copy_out, part, lease, outcome))
                return outcome
            finally:
                session.slots.let_go(lease)

        return await _in_parts(parts, session.read_budget_s(len(batch.keys)) if timeout_s is None else timeout_s, move)

    async def write(self, batch: PageBatch, timeout_s: float | None = None) -> BatchOutcome:
        """Copy pages out of host slots; those that are late are FAILED, and may still be stored as they were."""
        session, parts = self._session, self._session.parts(batch)

        async def move(part: PageBatch, left_s: float) -> BatchOutcome:
            lease, deadline = Lease(), anyio.current_time() + left_s
            try:
                if not await session.take_slots(lease, part, left_s):
                    return all_failed(part, late_words("write", session.store.name, session.slots.free))
                await self._copy(part, partial(session.copy_in, part, lease))
                return await session.write(lease, part, deadline - anyio.current_time())
            finally:
                session.slots.let_go(lease)

        return await _in_parts(parts, session.write_budget_s(len(parts)) if timeout_s is None else timeout_s, move)

    def align(self, keys: Sequence[PageKey]) -> None:
        """Refresh the recency of a prefix (root to tail), so that its tail is evicted before its head."""
        self._session.align(tuple(keys))

    async def clear(self, timeout_s: float | None = None) -> ClearOutcome:
        """Have the store forget every page, for good; an outcome with an error says why it could not. DeadlineError."""
        return await self._session.clear(self._session.write_budget_s(1) if timeout_s is None else timeout_s)

    def contents(self) -> frozenset[PageKey]:
        """The keys held now, for checks and tools; costs time in proportion."""
        return self._session.contents()

    def describe(self) -> Description:
        """The state of the store and of the client."""
        return self._session.describe()

    async def _copy(self, part: PageBatch, copy: Callable[[], None]) -> None:
        """Copy here, or on a worker thread; a caller that is cancelled waits for the end of it."""
        if len(part.keys) * self._session.host.layout.page_bytes <= _COPY_HERE_BYTES:
            copy()
        else:
            await anyio.to_thread.run_sync(copy)


@asynccontextmanager
async def open_store_client(
    store: Store,
    host: HostMemory,
    *,
    bounce_pages: int | None = None,
    drain_budget_s: float = 10.0,
    sinks: Sequence[EventSink] = (),
) -> AsyncGenerator[AsyncStoreClient]:
    """Open a store for the length of a block, as a task of the loop that runs; arguments as for `StoreClient`."""
    client = AsyncStoreClient(store, host, bounce_pages=bounce_pages, drain_budget_s=drain_budget_s, sinks=sinks)
    await client.start()
    try:
        yield client
    finally:
        with anyio.CancelScope(shield=True):
            await client.close()


async def _in_parts(
    parts: Sequence[PageBatch], timeout_s: float, move: Callable[[PageBatch, float], Coroutine[Any, Any, BatchOutcome]]
) -> BatchOutcome:
    """Move a batch's parts, `PARTS_AT_ONCE` at a time, all by one deadline."""
    deadline = anyio.current_time() + timeout_s
    outcomes: dict[int, BatchOutcome] = {}
    todo = deque(enumerate(parts))

    async def mover() -> None:
        while todo:
            number, part = todo.popleft()
            outcomes[number] = await move(part, deadline - anyio.current_time())

    with raising_sole_cause():
        async with anyio.create_task_group() as tasks:
            for _ in range(min(PARTS_AT_ONCE, len(parts))):
                tasks.start_soon(mover)
    return joined([outcomes[number] for number in range(len(parts))])
