"""The replay: a synchronous engine's scheduler in miniature, over the real controller with real bytes.

A step admits requests while their blocks fit the device, restores what stands ready, fills the blocks that nobody had,
and finishes; all finishes of a step are one batch. Timestamps only order the requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter_ns

import attrs

from kvcr_actors.controller import CacheController
from kvcr_actors.core.accounting import PrefixOutcome, RequestAccount, TierAccount, settle
from kvcr_actors.core.write_policy import WriteSettings
from kvcr_actors.devices.cpu import CpuDevice
from kvcr_actors.errors import ControllerClosedError, DeadlineError
from kvcr_actors.messages import (
    BackupAck,
    Completion,
    ControllerFailed,
    DepositFailed,
    PrefetchCancelled,
    PrefetchReady,
    ResetFinished,
    RestoreFinished,
)
from kvcr_actors.replay.contents import PageContents
from kvcr_actors.replay.device_tier import DevicePage, DeviceTier
from kvcr_actors.replay.options import ReplayOptions
from kvcr_actors.replay.report import DevicePages, ReplayReport
from kvcr_actors.types import BackupNode, MissReason, PageKey, PrefetchRequest, RequestId, RestoreOrder

_STALL_S = 60.0
_NOTHING: tuple[int, list[int]] = (0, [])


@attrs.define(eq=False)
class _Request:
    """One running request."""

    request_id: int
    keys: tuple[PageKey, ...]
    pinned: DevicePage | None = None
    held: int = 0
    """Pages of its prefix that the device holds and the pin protects."""
    device_hits: int = 0
    account: RequestAccount = RequestAccount(TierAccount(), TierAccount(), {})
    """Final once the host and the store have had their say."""
    ready: int = 0
    restoring: tuple[int, list[int]] = _NOTHING
    """First page and device pages of the restore order under way."""


class ReplayEngine:
    """Runs requests step by step. All methods belong to one thread, the controller's engine thread."""

    def __init__(
        self, options: ReplayOptions, controller: CacheController, device: CpuDevice, report: ReplayReport
    ) -> None:
        self._options = options
        self._controller = controller
        self._device = device
        self._report = report
        self._pools = range(len(device.layout.pools))
        self._contents = PageContents(device.layout, options.seed)
        self.tier = DeviceTier(options.device_blocks, self._poison)
        self._book = self.tier.write_book(len(self._pools), WriteSettings(options.write_policy))
        self._host_on = device.host.slots > 0
        self._waiting: deque[_Request] = deque()
        self._running: dict[RequestId, _Request] = {}
        self._running_blocks = 0
        self._wants_room: list[_Request] = []
        self._wants_fill: list[_Request] = []
        self._nodes: list[BackupNode] = []
        self._finished = 0

    def run(self, requests: Sequence[tuple[PageKey, ...]], progress: Callable[[int], None]) -> None:
        """Replay requests, given by the keys of their blocks; DeadlineError if nothing moves for a minute."""
        self._waiting.extend(_Request(index, keys) for index, keys in enumerate(requests))
        while self._waiting or self._running or self._book.open_nodes:
            self._finished = 0
            if not self._step() and not self._controller.wait(_STALL_S):
                raise DeadlineError(f"the replay stalled for {_STALL_S:g} s: {self._controller.describe()}")
            if self._finished:
                progress(self._finished)
            if self._options.sequential and not self._running:
                self._controller.wait_quiet(_STALL_S)

    def pages(self) -> DevicePages:
        """Where the device's pages are."""
        in_flight = sum(len(request.restoring[1]) for request in self._running.values())
        return DevicePages(self._options.device_blocks, self.tier.free_pages, len(self.tier), in_flight)

    def _step(self) -> bool:
        """One turn of the scheduler; False if there was nothing to do."""
        started = perf_counter_ns()
        completions = self._controller.take()
        spent = perf_counter_ns() - started
        for completion in completions:
            self._complete(completion)
        orders = self._take_room()
        requests = self._admit()
        filled = self._fill()
        self._keep_watermark()
        events = self.tier.take_events()
        moved = bool(completions or orders or requests or filled or self._nodes)
        started = perf_counter_ns()
        self._hand_over(requests, orders)
        if events:
            self._controller.publish(events)
        self._controller.flush_pending_backups()
        spent += perf_counter_ns() - started
        if moved:
            self._report.timing.step_ns.append(spent)
        return moved

    def _hand_over(self, requests: Sequence[PrefetchRequest], orders: Sequence[RestoreOrder]) -> None:
        for request in requests:
            self._controller.prefetch(request)
        for order in orders:
            self._controller.restore(order)
        nodes, self._nodes = self._nodes, []
        for node in nodes:
            self._controller.write(node, flush=False)

    def _complete(self, completion: Completion) -> None:
        match completion:
            case BackupAck():
                self._book.acknowledge(completion.node_ids, completion.failed)
            case PrefetchReady(account=RequestAccount() as account):
                self._settle(self._running[completion.request_id], account)
            case PrefetchCancelled():
                self._expired(self._running[completion.request_id], completion.account)
            case PrefetchReady():
                request = self._running[completion.request_id]
                request.ready = completion.pages
                self._wants_room.append(request)
            case RestoreFinished():
                self._restored(self._running[completion.request_id], completion)
            case DepositFailed():
                pass  # counted by the controller; the pages stay in host memory
            case ResetFinished():
                pass  # a replay gives none
            case ControllerFailed():
                raise ControllerClosedError(completion.error)

    def _admit(self) -> list[PrefetchRequest]:
        """Start waiting requests while their blocks fit; their prefixes are asked for in one go."""
        prefetches: list[PrefetchRequest] = []
        while self._waiting and len(self._running) < self._options.running_limit:
            request = self._waiting[0]
            if self._running_blocks + len(request.keys) > self._options.device_blocks:
                break
            self._waiting.popleft()
            self._running[request.request_id] = request
            self._running_blocks += len(request.keys)
            self._catch_up(request)
            request.device_hits = request.held
            if self._host_on:
                prefetches.append(PrefetchRequest(request.request_id, request.keys, request.held))
            else:
                self._settle(request, _without_host(len(request.keys), request.held))
        return prefetches

    def _catch_up(self, request: _Request) -> None:
        """Take in what the device holds of the request's prefix by now."""
        found = self.tier.match(request.keys)
        if len(found) > request.held:
            self._pin(request, found[-1], len(found))

    def _pin(self, request: _Request, tail: DevicePage, held: int) -> None:
        self.tier.pin(tail)
        if request.pinned is not None:
            self.tier.unpin(request.pinned)
        request.pinned, request.held = tail, held

    def _take_room(self) -> list[RestoreOrder]:
        """Find device pages for the prefixes that stand ready; what finds no room waits for the next step."""
        orders: list[RestoreOrder] = []
        waiting, self._wants_room = self._wants_room, []
        for request in waiting:
            self._catch_up(request)
            ids = self._allocate(max(0, request.ready - request.held))
            if ids is None:
                self._wants_room.append(request)
                continue
            # By now the device may hold more than stands ready: then the order only gives the prefix back.
            first = min(request.held, request.ready)
            request.restoring = (first, ids)
            orders.append(RestoreOrder(request.request_id, first, (ids,) * len(self._pools), request.held))
        return orders

    def _restored(self, request: _Request, done: RestoreFinished) -> None:
        """Check the restored pages on the device against what they must be, and hold them."""
        first, ids = request.restoring
        request.restoring = _NOTHING
        request.device_hits = min(first, done.pages)
        good = ids[: max(0, done.pages - first)]
        self.tier.free(ids[len(good) :])
        if good:
            keys = request.keys[first : done.pages]
            self._verify(keys, good)
            pages = self.tier.insert(keys, request.pinned, good)
            self._pin(request, pages[-1], done.pages)
        self._settle(request, done.account)

    def _expired(self, request: _Request, account: RequestAccount) -> None:
        """A ready prefix was given up: a restore order on its way is moot, so nothing will be written to its pages."""
        if request in self._wants_room:
            self._wants_room.remove(request)
        self.tier.free(request.restoring[1])
        request.restoring = _NOTHING
        self._settle(request, account)

    def _verify(self, keys: Sequence[PageKey], ids: Sequence[int]) -> None:
        seeds = self._contents.seeds(keys)
        wrong = max(self._contents.mismatches(pool, seeds, self._device.gather(pool, ids)) for pool in self._pools)
        self._report.verify.pages += len(keys)
        self._report.verify.mismatches += wrong

    def _settle(self, request: _Request, account: RequestAccount) -> None:
        request.account = account
        self._wants_fill.append(request)

    def _fill(self) -> int:
        """Compute the missing blocks of all requests that may run, in one batch, and finish them."""
        keys: list[PageKey] = []
        ids: list[int] = []
        finishing: list[tuple[_Request, list[int]]] = []
        waiting, self._wants_fill = self._wants_fill, []
        for request in waiting:
            self._catch_up(request)
            pages = self._allocate(len(request.keys) - request.held)
            if pages is None:
                self._wants_fill.append(request)
                continue
            keys.extend(request.keys[request.held :])
            ids.extend(pages)
            finishing.append((request, pages))
        if ids:
            seeds = self._contents.seeds(keys)
            for pool in self._pools:
                self._device.load(pool, ids, self._contents.expected(pool, seeds))
        for request, pages in finishing:
            self._finish(request, pages)
        return len(finishing)

    def _finish(self, request: _Request, ids: Sequence[int]) -> None:
        if ids:
            pages = self.tier.insert(request.keys[request.held :], request.pinned, ids)
            self._pin(request, pages[-1], len(request.keys))
        path = self.tier.match(request.keys)
        for page in path:
            page.hits += 1
        if self._host_on:
            node = self._book.finished(path)
            if node is not None:
                self._nodes.append(node)
        if request.pinned is not None:
            self.tier.unpin(request.pinned)
        self._report.count_request(len(request.keys), request.device_hits, request.account)
        del self._running[request.request_id]
        self._running_blocks -= len(request.keys)
        self._finished += 1

    def _allocate(self, count: int) -> list[int] | None:
        """Device pages; with write-back, what must go is backed up first, blocking as the last resort."""
        if not count:
            return []
        while self._host_on and (nodes := self._book.blocking(count - self.tier.free_pages)):
            ack = self._controller.write_back(nodes)
            self._book.acknowledge(ack.node_ids, ack.failed)
        return self.tier.allocate(count)

    def _keep_watermark(self) -> None:
        """With write-back: back up, ahead of need, what eviction would take next."""
        if self._host_on:
            self._nodes.extend(self._book.ahead(self._options.device_blocks, self.tier.free_pages))

    def _poison(self, ids: Sequence[int]) -> None:
        for pool in self._pools:
            self._device.poison(pool, ids)


def _without_host(total: int, held: int) -> RequestAccount:
    """The account of a request where there is no host tier: nothing is asked of it, what is missing is absent."""
    outcome = PrefixOutcome(total, held, held, held, held, MissReason.ABSENT, store_on=False)
    return attrs.evolve(settle(outcome), host=attrs.evolve(settle(outcome).host, queried=0, reasons={}))
