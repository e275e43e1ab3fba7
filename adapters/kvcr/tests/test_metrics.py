"""Every declared metric is a counter that the store has, and the figures of a hinted read are those of the pages."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from kvcr_actors import CacheLayout, PoolSpec
from kvcr_actors.testing.store_driver import chain
from kvcr_actors_kvcr.metrics import COUNTS, GAUGES, STATES, KvcrStoreCollector
from tests.pairs import side

pytestmark = pytest.mark.anyio
TWO_SPANS = CacheLayout((PoolSpec("kv", 2, 96),))


async def test_hinted_and_delivered_pages_bytes_and_spans_are_told():
    async with side(TWO_SPANS, spans="kv:2") as source, side(TWO_SPANS, spans="kv:2") as target:
        registry = CollectorRegistry()
        registry.register(KvcrStoreCollector(target.store))
        keys = chain("a", 4)
        await source.write(keys[:3], [1] * 3)
        target.store.begin_request("bad", "nonsense")
        target.store.begin_request("request", source.hint(keys))
        await target.read(keys, [1] * 4)

        def value(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(f"kvcr_store_{name}", labels)

        assert (value("hinted_total"), value("delivered_total"), value("missed_total")) == (4, 3, 1)
        assert (value("spans_delivered_total"), value("bytes_delivered_total")) == (6, 3 * 192)
        assert (value("hints_refused_total", reason="malformed"), value("open_requests")) == (1, 1)
        assert (value("cannot_store"), value("stalled")) == (0, 0)
        assert {*COUNTS, *GAUGES, *STATES} <= set(target.store.describe()), "a metric without a counter is always 0"
