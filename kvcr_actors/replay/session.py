"""One replay from options to report: the tiers are made, the engine runs, the books are closed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Literal, cast

from kvcr_actors.config import ControllerConfig
from kvcr_actors.controller import CacheController
from kvcr_actors.core.inventory import InventoryIndex
from kvcr_actors.core.keys import Namespace, chain_seed, layout_name, page_key
from kvcr_actors.devices.cpu import CpuDevice
from kvcr_actors.devices.host_memory import HostPools
from kvcr_actors.events.zmq import ZmqEventSink
from kvcr_actors.ports import EventSink
from kvcr_actors.replay.engine import ReplayEngine
from kvcr_actors.replay.events import TraceContexts, events_config
from kvcr_actors.replay.options import ReplayOptions
from kvcr_actors.replay.report import ClaimResult, ReplayReport
from kvcr_actors.replay.trace import TraceRequest
from kvcr_actors.stores.registry import open_store
from kvcr_actors.types import CacheLayout, PageKey, Tier


def run_replay(
    options: ReplayOptions, requests: Sequence[TraceRequest], progress: Callable[[int], None]
) -> ReplayReport:
    """Replay the requests and report; `progress` hears of requests finished since its last call."""
    layout = options.layout()
    device = CpuDevice(layout, options.device_blocks, HostPools(layout, options.host_blocks))
    store = None
    if options.has_store:
        store = open_store(
            options.store, options.store_option, options.store_blocks, options.store_path, _namespace(layout, options)
        )
    report, index = ReplayReport(), InventoryIndex()
    keys = request_keys(requests)
    sinks: list[EventSink] = [index]
    if (events := events_config(options)) is not None:
        sinks.append(ZmqEventSink(events, TraceContexts(requests, keys)))
    controller = CacheController(
        _config(options),
        device=device,
        store=store,
        sinks=sinks,
        loop=cast("Literal['asyncio', 'trio']", options.loop),
    )
    started = perf_counter()
    with controller:
        engine = ReplayEngine(options, controller, device, report)
        engine.run(keys, progress)
        controller.flush_pending_backups()
        controller.wait_quiet(_FINAL_S)
        report.timing.wall_s = perf_counter() - started
        contents = {Tier.DEVICE: engine.tier.contents()}
        if store is not None:
            contents[Tier.STORE] = store.contents()
        contents[Tier.HOST] = controller.host_contents()
    report.take_stats(controller.stats)
    report.backup.submits = device.backup_submits
    claims = controller.claims
    report.claims = ClaimResult(claims.taken, claims.released, claims.open, claims.quarantined)
    report.events.index_matches = not index.anomalies and all(
        index.residents(tier) == contents.get(tier, frozenset()) for tier in Tier
    )
    return report


_FINAL_S = 60.0


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
