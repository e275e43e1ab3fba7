"""The edges of the controller: what a device, a store, ranks and an event sink must do.

Everything here is called on the loop's thread unless it says otherwise, and returns at once: work that blocks runs on
a thread of the implementation's own and comes back through `Services.post`. This module has every word that an
implementation needs (see `docs/write_a_store.md` and `docs/write_a_device.md`); the rest of the library may change.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import attrs

from kvcr_actors.core.copy_plan import CopyPlan, Direction, PoolCopy
from kvcr_actors.core.inventory import BlocksRemoved, BlocksStored, InventoryEvent, Ownership, TierCleared
from kvcr_actors.errors import ThreadDeadlineError
from kvcr_actors.transfers import Operation
from kvcr_actors.types import KEY_BYTES, NO_SLOT, CacheLayout, Components, PageKey, PoolSpec, RequestId, Tier

__all__ = [
    "KEY_BYTES",
    "NO_SLOT",
    "Agreement",
    "BatchOutcome",
    "BlocksRemoved",
    "BlocksStored",
    "CacheLayout",
    "ClearOutcome",
    "Components",
    "CopyOutcome",
    "CopyPlan",
    "Description",
    "Device",
    "Direction",
    "EventSink",
    "HostMemory",
    "InventoryEvent",
    "LayerWaits",
    "Operation",
    "OperationId",
    "Ownership",
    "PageBatch",
    "PageKey",
    "PageListsRead",
    "PageOutcome",
    "PoolCopy",
    "PoolSpec",
    "RankTerms",
    "Ranks",
    "ReadsPageLists",
    "RequestId",
    "RunningEventSink",
    "Services",
    "Store",
    "StoreTraits",
    "ThreadDeadlineError",
    "Tier",
    "TierCleared",
]

OperationId: TypeAlias = tuple[str, RequestId]
"""What ranks agree on: a kind (`backup`, `prefetch`) and the step or request that opened it, equal on every rank."""

Description: TypeAlias = dict[str, Any]
"""Plain values for people and logs."""


class Services(Protocol):
    """What the runtime lends to a device or a store while it is open."""

    def spawn(self, task: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        """Run a background task on the loop until the controller closes."""
        ...

    def post(self, call: Callable[[], None]) -> None:
        """From any thread: run `call` on the loop soon, in order of posting. Dropped once the loop is gone."""
        ...

    def publish(self, events: Sequence[InventoryEvent]) -> None:
        """Hand inventory events of the implementation's own to the publisher."""
        ...


class HostMemory(Protocol):
    """The pinned host pools: for each pool, `slots` slots of `page_bytes`, page-first (a slot is one page's planes)."""

    @property
    def layout(self) -> CacheLayout:
        """The pools."""
        ...

    @property
    def slots(self) -> int:
        """Slots in each pool."""
        ...

    def slots_of(self, pool: int) -> int:
        """Slots of one pool; where a device copies for an engine's own host tier, pools may differ."""
        ...

    def buffer(self, pool: int) -> memoryview:
        """The pool's bytes, flat and writable: slot `i` is `[i * page_bytes, (i + 1) * page_bytes)`."""
        ...

    def poison(self, pool: int, slots: Sequence[int]) -> None:
        """Overwrite freed slots, so that a use after free shows as wrong bytes."""
        ...


@attrs.frozen
class CopyOutcome:
    """How a submit ended. `failed` maps a pool's index to its error; the other pools' bytes are in place.

    `launches` counts what the plan was to the copy engine: 1, or 0 if it was refused before that.
    """

    bytes: int
    slices: int = 1
    failed: Mapping[int, str] = attrs.field(factory=dict[int, str])
    launches: int = 1


class Device(Protocol):
    """The engine's page pools and the engine that copies them. The engine owns the memory and names the pages."""

    @property
    def layout(self) -> CacheLayout:
        """The pools that it holds."""
        ...

    @property
    def host(self) -> HostMemory:
        """The host pools that it copies to and from."""
        ...

    def pages_of(self, pool: int) -> int:
        """Pages of one of the engine's pools; an order that names one beyond them fails alone."""
        ...

    async def open(self, services: Services) -> None:
        """Start the copy engine."""
        ...

    def submit(self, plan: CopyPlan, fences: Sequence[object] = ()) -> Operation[CopyOutcome]:
        """Launch one plan; its copies wait on the device for every one of `fences`, never the caller.

        Fences guard the device's pages: host slots hold their bytes at the submit. A failed launch is an outcome, not
        an exception, and a pool that fails (with a page or slot that does not exist, for one) leaves the others be.
        Plans of one direction run in order of submission, and wait for none of the other direction.
        """
        ...

    async def close(self, deadline_s: float) -> None:
        """Let running copies end, then stop; ThreadDeadlineError if they do not end in time, and the next waits again.

        A plain DeadlineError does not tell which threads to wait for: no other controller then gets the memory. Called
        as well after an `open` that failed or was cancelled, to end what it began; so it is for every port.
        """
        ...

    def describe(self) -> Description:
        """State for people."""
        ...


class LayerWaits(ABC):
    """A device whose restores arrive layer by layer: subclass it, and an engine can start a step over them early."""

    @abstractmethod
    def wait_layer(self, layer: int, stream: Any = None, *, deadline_s: float = 1.0) -> None:
        """Have the engine's later work wait for a layer's part of every restore that was submitted.

        From any thread. On a GPU `stream` (the current one) waits and the caller does not; on a CPU the caller blocks.
        DeadlineError past the deadline. Whether the bytes came tells the outcome alone.
        """


class ReadsPageLists(ABC):
    """A device that can read page lists which lie in its own memory, such as CUDA tensors: subclass it for that."""

    @abstractmethod
    def read_page_lists(self, lists: Sequence[Any], fences: Sequence[object] = ()) -> Operation[PageListsRead]:
        """Bring lists of page ids to the host, behind `fences` and without a wait of the caller's."""


@attrs.frozen
class PageListsRead:
    """The page ids of lists that lay on the device, in their order, or why they could not be read."""

    lists: tuple[array[int], ...] = ()
    """64 bits a page id."""
    error: str | None = None


class PageOutcome(enum.Enum):
    """How a store operation ended for one page."""

    OK = "ok"
    MISS = "miss"
    """Read: absent, incomplete or damaged. Write: never."""
    FULL = "full"
    """Write: refused for lack of room; trying again at once is no use."""
    FAILED = "failed"
    """A fault; one retry may help."""


@attrs.frozen
class PageBatch:
    """Pages that move together: `slots[pool][i]` is the host slot of `keys[i]`, `NO_SLOT` for no component.

    `parents` (for writes) names the key before each page, None at a root.
    """

    keys: tuple[PageKey, ...]
    slots: Components
    parents: tuple[PageKey | None, ...] = ()


@attrs.frozen
class BatchOutcome:
    """One outcome a page, in the order of the batch, and the store's words for the first fault."""

    pages: tuple[PageOutcome, ...]
    error: str | None = None


@attrs.frozen
class ClearOutcome:
    """How a clear ended: the pages that went, and why it failed, if it did: then the store may serve old pages."""

    pages: int = 0
    error: str | None = None


@attrs.frozen
class StoreTraits:
    """What a store declares of itself; read directly, once."""

    requires_confirmation: bool = False
    combined_reads: bool = True
    combined_writes: bool = True
    publishes_events: bool = True
    batch_pages: int = 64
    """The most pages that one operation may carry."""
    read_budget_s: float = 1.0
    """A read's time before any page, and for each page of it; a remote store declares more."""
    read_budget_page_s: float = 0.01
    write_budget_s: float = 30.0
    namespace: bytes = b""
    """The digest of the namespace under which it keeps pages; empty if it does not say, and is taken at its word."""
    cannot_store: str = ""
    """Why this rank cannot store, by its layout, its role or a failed start: then it goes on as without a store."""


class Store(Protocol):
    """The third tier. A page is a record of one component a pool; it is written, read and evicted whole."""

    @property
    def name(self) -> str:
        """What logs and reports call it."""
        ...

    @property
    def traits(self) -> StoreTraits:
        """What it declares of itself."""
        ...

    async def open(self, services: Services, host: HostMemory) -> None:
        """Start, and announce what is held already through `services.publish`. StoreError says why it cannot."""
        ...

    def begin_request(self, request_id: RequestId, hints: object) -> None:
        """Take a request's router hints, which hold until its `end_request`. Hints it cannot use are no error."""
        ...

    def end_request(self, request_id: RequestId) -> None:
        """Discard a request's hints and release what was claimed for them, also what arrives later."""
        ...

    def lookup(self, keys: Sequence[PageKey], request_id: RequestId) -> Operation[tuple[int, ...]]:
        """For each key a bit set of the pools whose component is held (bit `i` is pool `i`; 0 is a miss)."""
        ...

    def confirm(self, keys: Sequence[PageKey], request_id: RequestId) -> Operation[bool]:
        """Make sure of a prefix that a lookup promised: bring here what its last page's hit policies need.

        Only pages that the request has looked up count: the host holds the others, and needs no word for them. Asked
        only of a store whose traits say `requires_confirmation`. What was delivered stays claimed until `end_request`;
        what arrives after that is released on arrival.
        """
        ...

    def read(self, batch: PageBatch, request_id: RequestId) -> Operation[BatchOutcome]:
        """Copy pages into host slots. A page whose bytes do not check is a MISS, and no longer held."""
        ...

    def write(self, batch: PageBatch) -> Operation[BatchOutcome]:
        """Copy pages out of host slots. A page that is held already is OK and stays as it is."""
        ...

    def align(self, keys: Sequence[PageKey]) -> None:
        """Refresh the recency of a prefix (root to tail), so that its tail is evicted before its head."""
        ...

    def clear(self) -> Operation[ClearOutcome]:
        """Forget every page, for good: none comes back with a restart, nor by a write that was asked for before.

        From the call on lookups are misses; what is written after it is held. TierCleared tells that pages went. A
        failure is an outcome with an error.
        """
        ...

    def contents(self) -> frozenset[PageKey]:
        """The keys held now, for checks and tools; costs time in proportion."""
        ...

    async def close(self, deadline_s: float) -> None:
        """End what runs, then close; what did not end in time is reported by DeadlineError and left mapped."""
        ...

    def describe(self) -> Description:
        """State and counters for people."""
        ...


@attrs.frozen
class RankTerms:
    """What a controller asks of its ranks: the deadline of one collective, and settings that all ranks must share."""

    deadline_s: float
    settings: Mapping[str, str] = attrs.field(factory=dict[str, str])


class Agreement(Protocol):
    """One operation that this rank has opened."""

    async def outcome(self) -> int:
        """Wait for the bits that all ranks share, the same on each; 0 after a missed deadline or a fault."""
        ...

    def withdraw(self) -> None:
        """Take this rank's bits back, unless a round is under way with them. The rank still joins."""
        ...


class Ranks(Protocol):
    """The ranks that must end every operation alike."""

    @property
    def rank(self) -> int:
        """The number of this process among the ranks, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    async def open(self, services: Services, terms: RankTerms) -> None:
        """Start, once every rank has told its terms. ConfigError names the first setting in which a rank differs."""
        ...

    def propose(self, operation: OperationId, bits: int) -> Agreement:
        """Open an operation with this rank's bit set, to be intersected over all ranks.

        Every rank opens the same operations; those that are open together share the collectives of a round. One that
        a rank never opens ends with 0 at the deadline of the others.
        """
        ...

    async def agree(self, operation: OperationId, bits: int) -> int:
        """Propose and wait. A caller that is cancelled withdraws."""
        ...

    async def close(self, deadline_s: float) -> None:
        """End what is open with 0, then stop; DeadlineError if that takes longer."""
        ...

    def describe(self) -> Description:
        """State for people."""
        ...


class EventSink(Protocol):
    """Where inventory events go. It is called on the loop and must not block."""

    def publish(self, events: Sequence[InventoryEvent]) -> None:
        """Take events in order."""
        ...


class RunningEventSink(ABC):
    """An event sink that has something to start and to stop: subclass it, and the controller does both."""

    @abstractmethod
    async def open(self, services: Services) -> None:
        """Start, before any event; what it raises keeps the controller from starting."""

    @abstractmethod
    def publish(self, events: Sequence[InventoryEvent]) -> None:
        """Take events in order, as any sink."""

    @abstractmethod
    async def close(self, deadline_s: float) -> None:
        """Pass on what was taken, then stop; DeadlineError if that does not end in time. No event follows."""
