"""One rank's fake device, store and event network: real bytes, virtual time, and the faults of one seed."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from itertools import count

import anyio

from kvcr_actors.core.copy_plan import CopyPlan, Direction
from kvcr_actors.core.inventory import InventoryEvent, InventoryIndex, Ownership
from kvcr_actors.core.keys import router_key
from kvcr_actors.events.contexts import Origin
from kvcr_actors.events.follower import StreamFollower
from kvcr_actors.events.stream import EventStream, Message, StreamLimits
from kvcr_actors.events.wire import WireHash, find_dialect
from kvcr_actors.ports import BatchOutcome, CopyOutcome, PageBatch, StoreTraits
from kvcr_actors.simulation.faults import EdgeFaults, SeedFaults
from kvcr_actors.simulation.pages import LAYOUT, POOLS
from kvcr_actors.stores.memory import memory_backend
from kvcr_actors.testing.devices import LoopDevice
from kvcr_actors.testing.host_memory import BytesHostMemory
from kvcr_actors.testing.stores import FaultyStore
from kvcr_actors.transfers import Operation
from kvcr_actors.types import PageContext, PageKey, RequestId, Tier

TRAITS = StoreTraits(batch_pages=4, read_budget_s=0.1, read_budget_page_s=0.005, write_budget_s=0.2)
LATE_S = 0.25
_REPLAY = 1 << 30
_LONG_S = 100.0
_MOST_READS = 2
"""Of one page for one request: a read that fails is tried once more."""


class InjectedError(Exception):
    """What a call raises on purpose."""


class SimDevice(LoopDevice):
    """A device whose memory outlives the controller, and whose launches may raise."""

    def __init__(self, pages: int, host: BytesHostMemory, faults: SeedFaults, rank: int) -> None:
        super().__init__(LAYOUT, pages, host, latency_s=0.001, late_s=LATE_S, faults=EdgeFaults(faults, rank))
        self._seed_faults = faults
        self._rank = rank

    def submit(self, plan: CopyPlan, fences: Sequence[object] = ()) -> Operation[CopyOutcome]:
        """Start one plan, or raise as no device should: it ends an incarnation of the backup actor."""
        if plan.direction is Direction.TO_HOST and self._seed_faults.fires(self._rank, "to_host", "raise"):
            raise InjectedError("injected: the launch raised")
        return super().submit(plan, fences)

    def adopt(self, other: SimDevice) -> None:
        """Take over what the device before, which is closed, holds in its pages."""
        pages = range(self._pages)
        for pool in POOLS:
            self.load(pool, pages, other.gather(pool, pages))


class SimStore(FaultyStore):
    """A memory store whose calls take random time, overtake each other, and may raise.

    `reads` counts how often each page was read for a request.
    """

    def __init__(self, pages: int, faults: SeedFaults, rank: int, rng: random.Random) -> None:
        super().__init__(
            memory_backend(pages), EdgeFaults(faults, rank), latency=self._take_time, late_s=LATE_S, traits=TRAITS
        )
        self.reads: dict[tuple[RequestId, PageKey], int] = {}
        self.calls = 0
        self._orphans: list[PageKey] = []
        self._seed_faults = faults
        self._rank = rank
        self._rng = rng
        self._slowness = rng.choice((0.001, 0.004, 0.02))

    def lookup(self, keys: Sequence[PageKey], request_id: RequestId) -> Operation[tuple[int, ...]]:
        """Look up, or raise."""
        self._count("lookup")
        return super().lookup(keys, request_id)

    def read(self, batch: PageBatch, request_id: RequestId) -> Operation[BatchOutcome]:
        """Read, or raise."""
        for key in batch.keys:
            self.reads[request_id, key] = self.reads.get((request_id, key), 0) + 1
        self._count("read")
        return super().read(batch, request_id)

    def write(self, batch: PageBatch) -> Operation[BatchOutcome]:
        """Write, or raise."""
        named: set[PageKey] = set()
        for key, parent in zip(batch.keys, batch.parents, strict=True):
            if parent is not None and parent not in named and not self._backend.lookup(parent):
                self._orphans.append(key)
            named.add(key)
        self._count("write")
        return super().write(batch)

    def check(self) -> None:
        """No page was read for one request more often than retries allow, or written without its parent."""
        if self._orphans:
            raise AssertionError(f"page {self._orphans[0].hex()[:8]} was written to the store, which lacks its parent")
        for (request_id, key), reads in self.reads.items():
            if reads > _MOST_READS:
                raise AssertionError(f"request {request_id}: page {key.hex()[:8]} was read {reads} times")

    def _count(self, kind: str) -> None:
        self.calls += 1
        if self._seed_faults.fires(self._rank, kind, "raise"):
            raise InjectedError(f"injected: {kind} raised")

    def _take_time(self, kind: str, pages: int) -> float:
        del pages
        late = self._seed_faults.fires(self._rank, kind, "reorder")
        return self._rng.uniform(0.03, 0.08) if late else self._rng.random() * self._slowness


class EventLink:
    """A rank's event sink: the real stream, a network that loses and shuffles batches, and the real follower.

    `index` hears every event on the near side, `follower` what comes through. It outlives the controllers.
    """

    def __init__(self, faults: SeedFaults, rank: int) -> None:
        self.index = InventoryIndex()
        self.follower = StreamFollower(can_replay=True)
        self._numbers = count()
        self._faults = faults
        self._rank = rank
        self._now = 0.0
        self._order = count()
        self._flying: list[tuple[float, int, Message]] = []
        self._stream = self._new_stream()

    def begin_anew(self) -> None:
        """A new controller publishes from now on: nothing is held, and readers are told."""
        self.index = InventoryIndex()
        self._stream = self._new_stream()

    def publish(self, events: Sequence[InventoryEvent]) -> None:
        """Send events; each batch may be lost, doubled or late."""
        self.index.publish(events)
        self._stream.push(events)
        self._send_all()

    def settle(self) -> None:
        """The network is whole: what flies lands, and a heartbeat shows what was lost last."""
        self.land(self._now + _LONG_S)
        self._send_all()
        self._give(self._stream.heartbeat(0.0))
        self._send_all()
        self.land(self._now + _LONG_S)

    def land(self, now: float) -> None:
        """Deliver what is due."""
        self._now = now
        while self._flying and self._flying[0][0] <= now:
            self._give(heapq.heappop(self._flying)[2])

    def check(self) -> None:
        """The follower's index equals what the near side heard; AssertionError if not."""
        dialect, owner = find_dialect("dynamo"), Ownership.ENGINE
        for tier in Tier:
            told = self.follower.index.keys(tier, dialect.owner(owner))
            held = frozenset[WireHash](
                dialect.block_hash(router_key(key)) for key in self.index.holding(tier, Ownership.ENGINE)
            )
            if told != held:
                raise AssertionError(
                    f"{tier}: after gaps and replays the follower has {len(told - held)} pages too many and "
                    f"{len(held - told)} too few"
                )

    def _new_stream(self) -> EventStream:
        limits = StreamLimits(snapshot_pause_s=0.0)
        return EventStream(find_dialect("dynamo"), _Contexts(), lambda: next(self._numbers), limits=limits)

    def _send_all(self) -> None:
        while (message := self._stream.next_message(self._now, 0.0)) is not None:
            word = self._faults.draw(self._rank, "event", ("drop", "duplicate", "delay", "reorder"))
            if word == "drop":
                continue
            late = {"delay": 0.5, "reorder": 0.02}.get(word or "", 0.0)
            for _ in range(2 if word == "duplicate" else 1):
                heapq.heappush(self._flying, (self._now + late, next(self._order), message))
        self.land(self._now)

    def _give(self, message: Message) -> None:
        start = self.follower.receive(*message)
        if start is None:
            return
        if not self._stream.covers(start):
            self._stream.ask_snapshot()
        for replayed in self._stream.replay(start, _REPLAY):
            self.follower.replayed(*replayed)
        self.follower.end_replay()


class _Contexts:
    """Every page was computed from one token."""

    def __init__(self) -> None:
        self._context = PageContext((1,), 1)

    def find(self, key: PageKey) -> Origin | None:
        del key
        return self._context, 0


class FenceQueue:
    """A rank's compute stream: kernels end in order, each late, write their pages, and set their fence."""

    def __init__(self, device: Callable[[], SimDevice]) -> None:
        self._device = device
        self._queue: list[tuple[float, anyio.Event, list[tuple[int, int, bytes]]]] = []
        self._last = 0.0

    def __len__(self) -> int:
        return len(self._queue)

    def launch(self, due: float, writes: list[tuple[int, int, bytes]]) -> anyio.Event:
        """Queue a kernel that writes (pool, page, bytes); gives its fence."""
        self._last = due = max(self._last, due)
        fence = anyio.Event()
        self._queue.append((due, fence, writes))
        return fence

    def run(self, now: float) -> None:
        """Let the kernels end that are due."""
        ended = 0
        for due, fence, writes in self._queue:
            if due > now:
                break
            for pool, page, content in writes:
                self._device().load(pool, (page,), content)
            fence.set()
            ended += 1
        del self._queue[:ended]
