"""The whole way of a hinted hybrid prefix: looked up, confirmed, delivered, restored to the device, all claims back."""

from __future__ import annotations

import pytest

from examples.two_workers.process import free_port
from kvcr_actors import (
    ControllerConfig,
    CpuDevice,
    HostPools,
    Namespace,
    PrefetchRequest,
    RestoreFinished,
    RestoreOrder,
    layout_name,
    open_controller,
)
from kvcr_actors.testing.store_driver import chain
from kvcr_actors_kvcr import KvcrOptions, KvcrStore
from tests.pairs import content, side
from tests.test_peers import HYBRID, KV, MAMBA, SWA

pytestmark = pytest.mark.anyio


async def test_the_longest_boundary_that_the_source_really_has_is_restored():
    keys = chain("a", 6)
    device = CpuDevice(HYBRID, 8, HostPools(HYBRID, 8))
    namespace = Namespace("test-model", "1", "float16", layout_name(HYBRID), HYBRID.page_bytes)
    store = KvcrStore(KvcrOptions(control_port=free_port()), 32, namespace)
    config = ControllerConfig(host_reserve_fraction=0.0)
    async with side(HYBRID) as source, open_controller(config, device=device, store=store) as controller:
        await source.write(keys, [KV, KV | SWA | MAMBA, KV | SWA, KV | SWA | MAMBA, KV, KV])
        cold = await controller.prefetch(PrefetchRequest("cold", keys))
        assert (cold.pages, cold.account is not None) == (0, True)
        ready = await controller.prefetch(PrefetchRequest("warm", keys, hints=source.hint(keys)))
        assert (ready.pages, ready.account) == (4, None), "two checkpoints were promised and missing"
        assert store.describe()["open_requests"] == 0
        pages = range(ready.pages)
        restored = await controller.restore(RestoreOrder("warm", 0, (pages, pages, pages)))
        assert isinstance(restored, RestoreFinished)
        assert restored.pages == 4
        for pool, last in ((0, 4), (1, 2), (2, 1)):
            ids = list(pages)[-last:]
            expected = b"".join(content(HYBRID, keys[index], pool) for index in ids)
            assert device.gather(pool, ids).numpy().tobytes() == expected, HYBRID.pools[pool].name
        await controller.wait_quiet()
        assert controller.claims.open == 0
