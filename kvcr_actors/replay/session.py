"""One replay from options to report: the tiers are made, the engine runs, the books are closed."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from contextlib import closing
from time import perf_counter
from typing import Literal, cast

from kvcr_actors.config import ControllerConfig
from kvcr_actors.controller import CacheController
from kvcr_actors.core.inventory import InventoryIndex
from kvcr_actors.core.keys import Namespace, chain_seed, layout_name, page_key
from kvcr_actors.devices.cpu import CpuDevice
from kvcr_actors.devices.host_memory import HostPools
from kvcr_actors.errors import KvcrActorsError, ReplayError
from kvcr_actors.events.zmq import ZmqEventSink
from kvcr_actors.ports import EventSink, Store
from kvcr_actors.replay.engine import ReplayEngine
from kvcr_actors.replay.events import TraceContexts, events_config
from kvcr_actors.replay.options import ReplayOptions
from kvcr_actors.replay.report import ClaimResult, ReplayReport
from kvcr_actors.replay.trace import TraceRequest
from kvcr_actors.stores.registry import open_store
from kvcr_actors.types import CacheLayout, PageKey, Tier

_FINAL_S = 60.0


def run_replay(
    options: ReplayOptions,
    requests: Sequence[TraceRequest],
    progress: Callable[[int], None],
    started: Callable[[], None] | None = None,
) -> ReplayReport:
    """Replay the requests and report; `progress` hears of requests finished since its last call.

    `started` is called once every tier is open. What is raised before that is the fault of the options; a fault of the
    package afterwards is a ReplayError.
    """
    run = _Run(options, requests)
    run.controller.start()
    try:
        with closing(run.controller):
            if started is not None:
                started()
            run.play(progress)
    except KvcrActorsError as error:
        raise ReplayError(f"the replay failed: {type(error).__name__}: {error}") from error
    return run.report()


class _Run:
    """One replay's tiers, and what they hold at its end."""

    def __init__(self, options: ReplayOptions, requests: Sequence[TraceRequest]) -> None:
        layout = options.layout()
        self._options = options
        self._keys = request_keys(requests)
        self._device = CpuDevice(layout, options.device_blocks, HostPools(layout, options.host_blocks))
        self._store = _store(options, layout)
        self._index = InventoryIndex()
        self._contents: dict[Tier, frozenset[PageKey]] = {}
        self._report = ReplayReport()
        sinks: list[EventSink] = [self._index]
        if (events := events_config(options)) is not None:
            sinks.append(ZmqEventSink(events, TraceContexts(requests, self._keys, options.block_tokens)))
        self.controller = CacheController(
            _config(options),
            device=self._device,
            store=self._store,
            sinks=sinks,
            loop=cast("Literal['asyncio', 'trio']", options.loop),
        )

    def play(self, progress: Callable[[int], None]) -> None:
        """Run all requests and look at every tier, on the started controller."""
        started = perf_counter()
        engine = ReplayEngine(self._options, self.controller, self._device, self._report)
        engine.run(self._keys, progress)
        self.controller.flush_pending_backups()
        self.controller.wait_quiet(_FINAL_S)
        self._report.timing.wall_s = perf_counter() - started
        self._report.device = engine.pages()
        self._contents = {Tier.DEVICE: engine.tier.contents(), Tier.HOST: self.controller.host_contents()}
        if self._store is not None:
            self._contents[Tier.STORE] = self._store.contents()

    def report(self) -> ReplayReport:
        """Close the books, once the controller is closed."""
        report, index, claims = self._report, self._index, self.controller.claims
        report.take_stats(self.controller.stats)
        report.peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        report.claims = ClaimResult(claims.taken, claims.released, claims.open, claims.quarantined)
        report.events.index_matches = not index.anomalies and all(
            index.residents(tier) == self._contents.get(tier, frozenset()) for tier in Tier
        )
        return report


def _store(options: ReplayOptions, layout: CacheLayout) -> Store | None:
    if not options.has_store:
        return None
    namespace = _namespace(layout, options)
    return open_store(options.store, options.store_option, options.store_blocks, options.store_path, namespace)


def _config(options: ReplayOptions) -> ControllerConfig:
    if options.sequential:
        return ControllerConfig(host_reserve_fraction=0.0, poison_freed_pages=True)
    return ControllerConfig(poison_freed_pages=True)


def _namespace(layout: CacheLayout, options: ReplayOptions) -> Namespace:
    return Namespace(
        model="replay",
        weights=f"seed-{options.seed}",
        dtype="uint8",
        layout=layout_name(layout),
        page_bytes=layout.page_bytes,
    )


def request_keys(requests: Sequence[TraceRequest]) -> list[tuple[PageKey, ...]]:
    """Chain each request's blocks; a block's only token is its id in the trace."""
    root = chain_seed()
    known: dict[tuple[PageKey, int], PageKey] = {}
    chains: list[tuple[PageKey, ...]] = []
    for request in requests:
        parent = root
        chain: list[PageKey] = []
        for block in request.hash_ids:
            link = (parent, block)
            key = known.get(link)
            if key is None:
                key = known[link] = page_key(parent, (block,))
            chain.append(key)
            parent = key
        chains.append(tuple(chain))
    return chains
