"""Checked by the type checker, never run: the public names as an engine adapter uses them."""

from __future__ import annotations

from typing import assert_type

from kvcr_actors import (
    BackupAck,
    BackupNode,
    CacheController,
    Completion,
    ControllerConfig,
    DepositFailed,
    MoveAck,
    Moved,
    MoverFailed,
    PageMover,
    PrefetchCancelled,
    PrefetchReady,
    PrefetchRequest,
    RestoreFinished,
    RestoreOrder,
    open_controller,
)
from kvcr_actors.core.accounting import RequestAccount
from kvcr_actors.core.inventory import InventoryIndex
from kvcr_actors.devices.cpu import CpuDevice
from kvcr_actors.devices.cuda import CudaDevice
from kvcr_actors.ports import Device, EventSink, HostMemory, Ranks, Store
from kvcr_actors.ranks.single import SingleRank
from kvcr_actors.stores.threaded import ThreadedStore
from kvcr_actors.testing.host_memory import BytesHostMemory


def ports(cpu: CpuDevice, cuda: CudaDevice, store: ThreadedStore, host: BytesHostMemory) -> None:
    devices: list[Device] = [cpu, cuda]
    stores: list[Store] = [store]
    ranks: list[Ranks] = [SingleRank()]
    sinks: list[EventSink] = [InventoryIndex()]
    hosts: list[HostMemory] = [host, cpu.host]
    del devices, stores, ranks, sinks, hosts


def step(cache: CacheController, node: BackupNode, order: RestoreOrder) -> None:
    cache.prefetch(PrefetchRequest("request", node.keys, device_pages=0))
    cache.restore(order)
    cache.write(node, flush=False)
    assert_type(cache.flush_pending_backups(fence=None), int | None)
    assert_type(cache.take(), list[Completion])


def handle(completion: Completion) -> RequestAccount | None:
    match completion:
        case BackupAck():
            assert_type(completion.node_ids, tuple[int, ...])
            return None
        case PrefetchReady():
            return assert_type(completion.account, RequestAccount | None)
        case RestoreFinished() | PrefetchCancelled():
            return assert_type(completion.account, RequestAccount)
        case DepositFailed():
            assert_type(completion.keys, tuple[bytes, ...])
            return None
        case _:
            return None


async def embed(device: Device, node: BackupNode) -> None:
    async with open_controller(ControllerConfig(), device=device) as cache:
        assert_type(await cache.backup([node]), BackupAck)
        assert_type(await cache.prefetch(PrefetchRequest(1, node.keys)), PrefetchReady)


def moved(mover: PageMover) -> None:
    for one in mover.take():
        assert_type(one, Moved)
        match one:
            case MoveAck():
                assert_type(one.step, int)
            case MoverFailed():
                assert_type(one.error, str)
