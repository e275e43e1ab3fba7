"""The store's counters for Prometheus: operations, bytes, spans, and pages that were hinted against those delivered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import cast

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvcr_actors_kvcr.store import KvcrStore

PREFIX = "kvcr_store"

COUNTS: Mapping[str, str] = {
    "written": "Pages stored.",
    "already_held": "Pages that were held when they were to be stored.",
    "full": "Pages refused for lack of room.",
    "failed": "Pages that the runner failed to store.",
    "read": "Pages read, here or from a peer.",
    "missed": "Pages asked for in vain.",
    "damaged": "Pages whose digest differed.",
    "evicted": "Pages evicted.",
    "left_to_owner": "Replicated pages left to their owner rank.",
    "hints_accepted": "Hints taken.",
    "hinted": "Pages that a hint promised and a request asked for.",
    "delivered": "Pages that came from a peer.",
    "confirmed": "Side blocks that a peer delivered to confirm a boundary.",
    "partial_deliveries": "Reads of which a peer had a part.",
    "failed_deliveries": "Transfers of which a peer delivered nothing.",
    "bytes_written": "Bytes stored.",
    "bytes_read": "Bytes read here.",
    "bytes_delivered": "Bytes that came from peers.",
    "spans_written": "Spans stored.",
    "spans_read": "Spans read here.",
    "spans_delivered": "Spans that came from peers.",
    "operations": "Operations of the runner.",
    "failed_operations": "Operations of which at least one block failed.",
    "uncertain": "Transfers given up while the memory might still be written.",
    "quiesced": "Of those, transfers that ended since.",
    "late_settled": "Requests that stopped waiting for a transfer.",
    "close_errors": "Closes after which the runner was not quiet.",
}
GAUGES: Mapping[str, str] = {
    "held": "Pages held.",
    "held_on_disk": "Of those, pages on the disk tier.",
    "mapped_bytes": "Bytes of the runner's pools; those of a runner that did not close stay mapped.",
    "open_requests": "Requests whose hints are held.",
    "unquiet_bytes": "Host bytes that native code may still touch though nobody waits for them.",
}
STATES: Mapping[str, str] = {
    "cannot_store": "1 on a rank that goes on without its store.",
    "stalled": "1 once peers are refused, or local copies distrusted, until a restart.",
}


class KvcrStoreCollector(Collector):
    """Register it with a Prometheus registry: `registry.register(KvcrStoreCollector(store))`. From any thread."""

    def __init__(self, store: KvcrStore) -> None:
        self._store = store

    def collect(self) -> Iterable[Metric]:
        """Every counter and gauge as it is now."""
        return _metrics(self._store.describe())


def _metrics(state: Mapping[str, object]) -> Iterator[Metric]:
    for name, text in COUNTS.items():
        yield CounterMetricFamily(f"{PREFIX}_{name}", text, value=cast("float", state.get(name, 0)))
    for name, text in GAUGES.items():
        yield GaugeMetricFamily(f"{PREFIX}_{name}", text, value=cast("float", state.get(name, 0)))
    for name, text in STATES.items():
        yield GaugeMetricFamily(f"{PREFIX}_{name}", text, value=float(bool(state.get(name))))
    refused = CounterMetricFamily(f"{PREFIX}_hints_refused", "Hints that gave no remote read.", labels=["reason"])
    for reason, count in cast("dict[str, int]", state["hints_refused"]).items():
        refused.add_metric([reason], count)
    yield refused
