"""The Store port over the real runner."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import attrs

from kvcr_actors import CacheLayout, ConfigError, Namespace, PageKey, RequestId, StoreError
from kvcr_actors.ports import (
    BatchOutcome,
    ClearOutcome,
    Description,
    HostMemory,
    Operation,
    PageBatch,
    PageOutcome,
    Services,
    StoreTraits,
)
from kvcr_actors.stores import Alignments
from kvcr_actors_kvcr.blocks import MOST_POOLS, PageBlocks
from kvcr_actors_kvcr.confirming import Confirmer
from kvcr_actors_kvcr.endpoints import own_endpoint
from kvcr_actors_kvcr.hints import parse_endpoint
from kvcr_actors_kvcr.instance import Instance
from kvcr_actors_kvcr.jobs import Job, Steps
from kvcr_actors_kvcr.mover import Mover
from kvcr_actors_kvcr.options import BLOCKS_A_CALL, KvcrOptions, parse_options
from kvcr_actors_kvcr.page_index import PageIndex
from kvcr_actors_kvcr.peers import Peers
from kvcr_actors_kvcr.records import StoreCounters
from kvcr_actors_kvcr.replicas import OwnersPages
from kvcr_actors_kvcr.requests import OpenRequests
from kvcr_actors_kvcr.runner import Runner, RunnerLimits


class KvcrStore:
    """A store of `capacity_pages` pages in the runner's DRAM, and of what hinted peers hold while a request lives."""

    name = "kvcr"

    def __init__(self, options: KvcrOptions, capacity_pages: int, namespace: Namespace) -> None:
        if capacity_pages < 1:
            raise ConfigError(f"store kvcr: capacity_pages {capacity_pages}: a store holds 1 page or more")
        if options.owner_endpoint and parse_endpoint(options.owner_endpoint) is None:
            raise ConfigError(f"store kvcr: option owner_endpoint={options.owner_endpoint!r}; write tcp://host:port")
        self.options = options
        self.endpoint = own_endpoint(options)
        """Where peers reach this store; None if they cannot."""
        self._capacity = capacity_pages
        self._namespace = namespace
        self._counters = StoreCounters()
        self._index = PageIndex()
        self._alignments = Alignments()
        self._requests = OpenRequests(options)
        self._owners = OwnersPages(options.owner_endpoint)
        self._traits = _traits(options, namespace, BLOCKS_A_CALL)
        self._clears = 0
        """Clears so far; `PageBlocks` counts them as they happen."""
        self._clearing = 0
        self._blocks: PageBlocks | None = None
        self._runner: Runner | None = None
        self._instance: Instance | None = None
        self._mover: Mover | None = None
        self._confirmer: Confirmer | None = None
        self._peers: Peers | None = None
        self._services: Services | None = None

    @property
    def traits(self) -> StoreTraits:
        """What it declares of itself; the batch size, and whether it can store, are known once it is open."""
        return self._traits

    async def open(self, services: Services, host: HostMemory) -> None:
        """Start the runner off the loop; its buffers are kept if it cannot start.

        StoreError says why. Without `required` it is no error: the traits say it, and every lookup is a miss.
        """
        if self._services is not None:
            raise StoreError("store kvcr was opened before: make a new one")
        self._services = services
        try:
            await self._start(services, host)
        except StoreError as error:
            if self.options.required:
                raise
            self._traits = attrs.evolve(self._traits, cannot_store=str(error))

    async def _start(self, services: Services, host: HostMemory) -> None:
        layout, options = host.layout, self.options
        if len(layout.pools) > MOST_POOLS:
            raise StoreError(f"store kvcr: {len(layout.pools)} pools; it takes {MOST_POOLS} at most")
        self._blocks = blocks = PageBlocks(
            layout,
            self._namespace,
            self._index,
            combined=options.combine_page_writes,
            shared=options.share_replicated_mla,
            sharded=options.shard_names,
        )
        agent = f"kvcr-actors-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        instance = Instance(options, layout, host, self._capacity, agent, self.endpoint, blocks.adapter)
        runner = Runner(
            services,
            RunnerLimits(
                options.idle_poll_ms / 1_000, options.operation_timeout_ms / 1_000, options.close_wait_ms / 1_000
            ),
            start=lambda: instance.start(self._index.apply, runner.notice),
            stop=instance.close,
            publish=self._publish,
            unanswered=self._pause,
            keep=(instance, host),
        )
        self._instance, self._runner = instance, runner
        self._wire(layout, blocks, instance, runner, services)
        pages = max(1, min(BLOCKS_A_CALL, options.chunk_bytes // layout.page_bytes))
        self._traits = _traits(options, self._namespace, pages)
        await runner.open()

    def _wire(
        self, layout: CacheLayout, blocks: PageBlocks, instance: Instance, runner: Runner, services: Services
    ) -> None:
        """Make what runs on the owner thread."""
        options = self.options
        transfers = instance.transfers(lambda: runner.kvcr, self._counters)
        self._peers = peers = Peers(options.operation_timeout_ms / 1_000, self._remote_full)
        self._confirmer = Confirmer(layout, blocks, self._index, transfers, peers, options.chunk_bytes)
        self._mover = Mover(
            layout,
            instance.layout,
            blocks,
            self._index,
            transfers,
            self._counters,
            options,
            self._capacity,
            retired=lambda: runner.retired,
            peers=peers,
            writes=blocks.sharded if self._owners.endpoint else blocks.every,
            lost=lambda keys: services.post(partial(self._owners.forget, keys)),
        )

    # Requests.

    def begin_request(self, request_id: RequestId, hints: object) -> None:
        """Take a request's router hint; one that cannot be used is counted, and the request reads nothing remote."""
        self.end_request(request_id)  # an id that was not ended must not leave its claims behind
        self._requests.begin(request_id, hints)

    def end_request(self, request_id: RequestId) -> None:
        """Discard a request's hint and release what was claimed for it, also what arrives later."""
        request = self._requests.end(request_id)
        if request is not None and self._runner is not None and self._confirmer is not None:
            self._runner.post(partial(self._confirmer.end_request, request))

    def lookup(self, keys: Sequence[PageKey], request_id: RequestId) -> Operation[tuple[int, ...]]:
        """What is held, and what the request's hint promises."""
        runner, peers, blocks = self._runner, self._peers, self._blocks
        if runner is None or peers is None or blocks is None or not runner.serves or self._clearing:
            return Operation[tuple[int, ...]].finished((0,) * len(keys))
        masks = tuple(map(self._index.mask, keys))
        if self._owners.endpoint and peers.refuses(self._owners.endpoint) is None:
            masks = tuple(mask | self._owners.mask(key) for key, mask in zip(keys, masks, strict=True))
        request = self._requests.get(request_id)
        if request is not None and self._requests.may_ask(request, peers):
            request.promise(keys)
            masks = tuple(
                blocks.every if key in request.promised else mask for key, mask in zip(keys, masks, strict=True)
            )
        return Operation[tuple[int, ...]].finished(masks)

    def confirm(self, keys: Sequence[PageKey], request_id: RequestId) -> Operation[bool]:
        """Have the request's source deliver the side pools that a promised prefix ends in; they stay claimed."""
        request = self._requests.get(request_id)
        if request is None or self._runner is None or self._confirmer is None or not self._confirmer.has_side_pools:
            return _finished(confirmed=True)
        job = Job(
            "confirm", self._confirmer.confirm(tuple(keys), request), Operation[bool](), on_error=False, late=False
        )
        job.settle_at = monotonic() + self.options.remote_wait_ms / 1_000
        return self._runner.submit(job)

    # Pages.

    def read(self, batch: PageBatch, request_id: RequestId) -> Operation[BatchOutcome]:
        """Copy pages into host slots, from here or from the request's source."""
        failed = _all(batch, PageOutcome.FAILED, "store kvcr is not open")
        if self._runner is None or self._mover is None:
            return Operation[BatchOutcome].finished(failed)
        late = _all(batch, PageOutcome.FAILED, "the peer did not answer in time")
        request, owner = self._requests.get(request_id), self._owners.hint(batch.keys)
        job = Job("read", self._mover.read(batch, request, owner), Operation(), failed, late=late)
        if request is not None or owner is not None:
            job.settle_at = monotonic() + self.options.remote_wait_ms / 1_000
        return self._runner.submit(job)

    def write(self, batch: PageBatch) -> Operation[BatchOutcome]:
        """Copy pages out of host slots; a rank that shares its owner's copy only notes them."""
        failed = _all(batch, PageOutcome.FAILED, "store kvcr is not open")
        if self._runner is None or self._mover is None or self._blocks is None:
            return Operation[BatchOutcome].finished(failed)
        if self._owners.endpoint:
            self._owners.note(batch, self._blocks.sharded)
            if not self._blocks.sharded:
                return Operation[BatchOutcome].finished(_all(batch, PageOutcome.OK, None))
        return self._runner.submit(Job("write", self._mover.write(batch, self._clears), Operation(), failed))

    def align(self, keys: Sequence[PageKey]) -> None:
        """Make a prefix recent, its head the most, after the operations asked for before; shed where too many wait."""
        if self._runner is not None and self._mover is not None:
            align = self._alignments.admit(partial(self._mover.align, tuple(keys)))
            if align is not None:
                self._runner.post(align)

    def clear(self) -> Operation[ClearOutcome]:
        """Forget every page: the runner drops no block, so it keeps those of before under names that nobody asks for.

        They leave as room is needed. Peers name blocks alike once they were cleared as often: until then none is read
        from another.
        """
        failed = ClearOutcome(error="store kvcr is not open")
        if self._runner is None or self._blocks is None:
            return Operation[ClearOutcome].finished(failed)
        self._clears += 1
        self._clearing += 1
        self._owners.clear()
        operation = self._runner.submit(Job("clear", self._clear(self._blocks), Operation[ClearOutcome](), failed))
        operation.when_settled(self._note_cleared)
        return operation

    @staticmethod
    def _clear(blocks: PageBlocks) -> Steps[ClearOutcome]:
        return ClearOutcome(blocks.clear())
        yield  # a generator without steps

    def _note_cleared(self, outcome: ClearOutcome) -> None:
        if outcome.error is None:
            self._clearing -= 1

    def contents(self) -> frozenset[PageKey]:
        """The keys held here now."""
        return self._index.contents()

    async def close(self, deadline_s: float) -> None:
        """Drain, then close the runner; DeadlineError: it is not quiet, and its buffers stay mapped."""
        if self._runner is not None:
            await self._runner.close(deadline_s)

    def describe(self) -> Description:
        """State and counters for people."""
        runner = self._runner
        state: dict[str, Any] = {
            "name": self.name,
            "endpoint": self.endpoint,
            "cannot_store": self._traits.cannot_store,
            "held": len(self._index),
            "alignments_shed": self._alignments.shed,
            "held_on_disk": self._index.on_disk,
            "evicted": self._index.evicted,
            "left_to_owner": self._owners.left_to_owner,
            "open_requests": len(self._requests),
            "hints_accepted": self._requests.accepted,
            "hints_refused": {reason.value: count for reason, count in self._requests.refused.items()},
            "progress_calm": self._instance is not None and self._instance.calm,
            "mapped_bytes": 0 if self._instance is None else self._instance.mapped_bytes,
            **attrs.asdict(self._counters),
        }
        if runner is not None:
            state |= {"stalled": runner.stalled, "unquiet_bytes": runner.unquiet_bytes, **attrs.asdict(runner.counters)}
        return state

    def _publish(self) -> None:
        """On the thread: send the events of what just happened to the loop, in order."""
        events = self._index.take_events()
        if events and self.options.publish_inventory and self._services is not None:
            self._services.post(partial(self._services.publish, events))

    def _pause(self, endpoint: str) -> None:
        if self._peers is not None:
            self._peers.pause(endpoint)

    def _remote_full(self) -> bool:
        return self._runner is not None and self._runner.unquiet_bytes > self.options.quarantine_bytes


def _finished(*, confirmed: bool) -> Operation[bool]:
    return Operation[bool].finished(confirmed)


def _all(batch: PageBatch, outcome: PageOutcome, error: str | None) -> BatchOutcome:
    return BatchOutcome((outcome,) * len(batch.keys), error)


def _traits(options: KvcrOptions, namespace: Namespace, batch_pages: int) -> StoreTraits:
    """A read waits as long as the runner may need to tell its end, and a little for the way."""
    return StoreTraits(
        requires_confirmation=bool(options.control_port),  # without peers nothing is only promised
        combined_reads=options.combine_page_reads,
        combined_writes=options.combine_page_writes,
        publishes_events=options.publish_inventory,
        namespace=namespace.digest,
        batch_pages=batch_pages,
        read_budget_s=options.remote_wait_ms / 1_000 + 1.0,
        write_budget_s=max(30.0, 2 * options.operation_timeout_ms / 1_000),
    )


def open_store(options: Mapping[str, str], capacity_pages: int, path: Path | None, namespace: Namespace) -> KvcrStore:
    """Make a KVCR store of `capacity_pages`; see `KvcrOptions` for its options. A path is the disk tier's folder."""
    if path is not None:
        options = {"disk_path": str(path), "disk_blocks": str(4 * capacity_pages), **options}
    return KvcrStore(parse_options(options), capacity_pages, namespace)
