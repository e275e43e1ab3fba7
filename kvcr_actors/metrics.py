"""Prometheus metrics of one controller, read from its counters when they are scraped: a step pays nothing for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvcr_actors.core.stats import BackupTotals, ControllerStats
from kvcr_actors.types import Tier

PREFIX = "kvcr_actors"


@attrs.frozen
class Gauges:
    """What the counters do not hold, at one moment."""

    claims_taken: int = 0
    claims_released: int = 0
    claims_open: int = 0
    quarantined_bytes: int = 0
    inbox_depth: Mapping[str, int] = attrs.field(factory=dict[str, int])
    """Messages that wait, for each actor."""
    restarts: Mapping[str, int] = attrs.field(factory=dict[str, int])
    """Restarts since the start, for each actor."""
    event_silence_s: Mapping[str, float] = attrs.field(factory=dict[str, float])
    """Seconds since each event publisher (by its endpoint) sent anything; heartbeats keep it low."""


class Metrics:
    """One controller's metrics in a registry of their own, so that two controllers in one process do not clash.

    `stats` (for example `lambda: controller.stats`) and `gauges` are called at each scrape, on the scraping thread;
    they must only read.
    """

    def __init__(self, stats: Callable[[], ControllerStats], gauges: Callable[[], Gauges] = Gauges) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_StatsCollector(stats, gauges))

    def render(self) -> bytes:
        """Give all metrics in the Prometheus text format."""
        return generate_latest(self.registry)


class _StatsCollector(Collector):
    """Turns counters into metric families; the names here are the package's, and later ones join them."""

    def __init__(self, stats: Callable[[], ControllerStats], gauges: Callable[[], Gauges]) -> None:
        self._stats = stats
        self._gauges = gauges

    def collect(self) -> Iterable[Metric]:
        """Read everything once."""
        stats = self._stats()
        yield from _backup(stats.backup)
        yield from _pages(stats)
        yield from _requests_and_store(stats)
        yield from _runtime(self._gauges())


def _backup(backup: BackupTotals) -> Iterator[Metric]:
    yield _count("backup_nodes", "Nodes handed over for backup.", backup.nodes)
    yield _count("backup_steps", "Steps with at least one node.", backup.steps)
    yield _count("backup_submits", "Launches for backups.", backup.submits)
    yield _count("backup_slices", "Slices that the submits went in.", backup.slices)
    yield _count("backup_bytes", "Bytes copied to host memory.", backup.bytes)
    yield _counts("backup_skipped_nodes", "Nodes not backed up.", "reason", backup.skipped)


def _pages(stats: ControllerStats) -> Iterator[Metric]:
    used = CounterMetricFamily(f"{PREFIX}_pages_used", "Pages that a tier gave.", labels=["tier"])
    missed = CounterMetricFamily(f"{PREFIX}_pages_not_used", "Pages asked in vain.", labels=["tier", "reason"])
    for tier, totals in ((Tier.HOST, stats.host), (Tier.STORE, stats.store)):
        used.add_metric([tier.value], totals.used)
        for reason, count in _items(totals.reasons):
            missed.add_metric([tier.value, reason], count)
    yield used
    yield missed
    yield _counts("pages_recomputed", "Pages that no tier gave, by final reason.", "reason", stats.reasons)
    yield _count("restored_pages", "Pages copied to the device.", stats.restored_pages)
    yield _count("restore_submits", "Launches for restores.", stats.restore_submits)


def _requests_and_store(stats: ControllerStats) -> Iterator[Metric]:
    prefetch, deposit = stats.prefetch, stats.deposit
    outcomes = {"used": prefetch.used, "cancelled": prefetch.cancelled, "failed": prefetch.failed}
    yield _count("prefetches_started", "Prefetches begun.", prefetch.started)
    yield _counts("prefetches_ended", "Prefetches by how they ended.", "outcome", outcomes)
    yield _count("deposited_pages", "Pages that the store took.", deposit.deposited)
    yield _count("deposit_retries", "Pages tried again.", deposit.retried)
    yield _count("deposit_shed_pages", "Pages put off for lack of room in the queue.", deposit.shed)
    yield _counts("deposit_skipped_pages", "Pages that the store did not take.", "reason", deposit.skipped)
    yield _count("store_faults", "Calls and tasks of the store that raised.", stats.store_faults)
    evicted = {Tier.HOST.value: stats.host_evicted, Tier.STORE.value: stats.store_evicted}
    yield _counts("evicted_pages", "Pages that a tier let go.", "tier", evicted)
    yield _count("events_published", "Inventory events handed to sinks.", stats.events_published)
    yield _count("events_dropped", "Inventory events that a sink was told by a snapshot.", stats.events_dropped)


def _runtime(gauges: Gauges) -> Iterator[Metric]:
    yield _count("claims_taken", "Claims taken.", gauges.claims_taken)
    yield _count("claims_released", "Claims released.", gauges.claims_released)
    yield _gauge("claims_open", "Claims that are held now.", gauges.claims_open)
    yield _gauge("quarantined_bytes", "Bytes that native code may still touch.", gauges.quarantined_bytes)
    depth = GaugeMetricFamily(f"{PREFIX}_inbox_messages", "Messages that wait.", labels=["actor"])
    for actor, messages in gauges.inbox_depth.items():
        depth.add_metric([actor], messages)
    yield depth
    silence = GaugeMetricFamily(f"{PREFIX}_event_silence_seconds", "Time since a batch was sent.", labels=["endpoint"])
    for endpoint, seconds in gauges.event_silence_s.items():
        silence.add_metric([endpoint], seconds)
    yield silence
    yield _counts("actor_restarts", "Restarts after a failure.", "actor", gauges.restarts)


def _count(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"{PREFIX}_{name}", text, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, value=value)


def _counts(name: str, text: str, label: str, counts: Mapping[Any, int]) -> Metric:
    family = CounterMetricFamily(f"{PREFIX}_{name}", text, labels=[label])
    for key, count in _items(counts):
        family.add_metric([key], count)
    return family


def _items(counts: Mapping[Any, int]) -> list[tuple[str, int]]:
    """Copy in one go: the loop may add a key while another thread scrapes."""
    return [(str(key), count) for key, count in list(counts.items())]
