"""The sink in a controller: opened before the first event, closed after the last, its tokens from the nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcr_actors.aio import AsyncController, open_controller
from kvcr_actors.core.inventory import BlocksStored, InventoryIndex
from kvcr_actors.core.keys import chain_seed, page_keys, router_key
from kvcr_actors.devices.cpu import CpuDevice
from kvcr_actors.devices.host_memory import HostPools
from kvcr_actors.errors import EventEndpointError, InvalidNodeError
from kvcr_actors.events.config import EventsConfig
from kvcr_actors.events.contexts import ContextTable
from kvcr_actors.events.zmq import ZmqEventSink
from kvcr_actors.types import BackupNode, CacheLayout, PageContext, PoolSpec, Tier
from tests.events.test_zmq import config_at, follow

pytestmark = [pytest.mark.anyio, pytest.mark.real_clock, pytest.mark.timeout(60)]

LAYOUT = CacheLayout((PoolSpec("kv", 1, 64),))
TOKENS = list(range(32))
KEYS = page_keys(TOKENS, 4, chain_seed(page_tokens=4, salt="tenant"))
CONTEXT = PageContext(TOKENS, 4, salt="tenant")


def device() -> CpuDevice:
    return CpuDevice(LAYOUT, 16, HostPools(LAYOUT, 16))


async def test_what_is_backed_up_is_told_with_the_tokens_of_its_node(tmp_path: Path) -> None:
    contexts, config = ContextTable(), config_at(tmp_path)
    sink, index = ZmqEventSink(config, contexts), InventoryIndex()
    async with open_controller(device=device(), sinks=[index, sink], contexts=contexts) as controller:
        # The engine's own events may come before its backup: they wait for the tokens.
        controller.publish([BlocksStored(Tier.DEVICE, KEYS, (None, *KEYS[:-1]))])
        await controller.wait_quiet()
        await controller.backup([BackupNode(1, KEYS, (tuple(range(8)),), context=CONTEXT)])
        follower = await follow(config, lambda follower: len(follower.index.keys(Tier.DEVICE)) == 8)
        hashes = {router_key(key) for key in KEYS}
        assert follower.index.keys(Tier.HOST) == follower.index.keys(Tier.DEVICE) == hashes
        assert not follower.faults
    assert sink.describe()["active"] is False
    assert index.keys(Tier.HOST) == set(KEYS)


async def test_a_sink_that_cannot_open_keeps_the_controller_from_starting(tmp_path: Path) -> None:
    first = ZmqEventSink(config_at(tmp_path), ContextTable())
    second = ZmqEventSink(EventsConfig(f"ipc://{tmp_path}/no/such/folder/events"), ContextTable())
    controller = AsyncController(device=device(), sinks=[first, second])
    with pytest.raises(EventEndpointError, match="no/such/folder"):
        await controller.start()
    assert first.describe()["active"] is False


def test_a_context_must_fit_its_node() -> None:
    with pytest.raises(InvalidNodeError, match="its context describes 8 pages, it has 1"):
        BackupNode(1, KEYS[:1], ((0,),), context=CONTEXT)
