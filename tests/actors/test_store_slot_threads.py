"""Attach, detach, checkpoint and clear from a scheduler's own thread, and from one that pumps the loop itself."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kvcr_actors import BackupNode, CacheController, CacheLayout, PoolSpec, PrefetchRequest
from kvcr_actors.controller import HostKind, Loop
from kvcr_actors.core.keys import Namespace, layout_name
from kvcr_actors.devices.cpu import CpuDevice
from kvcr_actors.devices.host_memory import HostPools
from kvcr_actors.errors import CheckpointError, ConfigError, ControllerClosedError
from kvcr_actors.messages import PrefetchReady
from kvcr_actors.stores.disk import disk_backend
from kvcr_actors.stores.memory import memory_backend
from kvcr_actors.stores.threaded import ThreadedStore
from kvcr_actors.testing.store_driver import chain

LAYOUT = CacheLayout((PoolSpec("kv", 2, 64),))
NAMESPACE = Namespace("test-model", "1", "float16", layout_name(LAYOUT), LAYOUT.page_bytes)
A = chain("a", 4)


@pytest.mark.parametrize(("host", "loop"), [("thread", "asyncio"), ("thread", "trio"), ("inline", "asyncio")])
def test_a_store_comes_is_filled_serves_and_goes(host: HostKind, loop: Loop) -> None:
    pools = HostPools(LAYOUT, 16)
    first, second = (ThreadedStore(name, memory_backend(16)) for name in ("first", "second"))
    try:
        with CacheController(device=CpuDevice(LAYOUT, 16, pools), host=host, loop=loop) as cache:
            cache.write_back([BackupNode(1, A, ((0, 1, 2, 3),))])
            with pytest.raises(CheckpointError, match="no store is attached"):
                cache.checkpoint("early")
            cache.attach_store(first, 30)
            assert first.contents() == frozenset(A)
            with pytest.raises(ConfigError, match="detach it before"):
                cache.attach_store(second)
            cache.checkpoint("now", 30)
            cache.clear_host()
            assert cache.host_contents() == frozenset()
            cache.prefetch(PrefetchRequest("r", A))
            cache.flush_pending_backups()
            assert cache.wait(30)
            assert [answer.pages for answer in cache.take() if isinstance(answer, PrefetchReady)] == [4]
            cache.cancel("r")
            cache.flush_pending_backups()
            cache.detach_store(30)
            cache.attach_store(second, 30)
            assert second.contents() == frozenset(A)
            cache.wait_quiet(30)
            assert cache.claims.open == 0
        with pytest.raises(ControllerClosedError):
            cache.clear_host()
    finally:
        pools.close()


def disk_store(folder: Path) -> ThreadedStore:
    return ThreadedStore("disk", disk_backend(folder, 16, NAMESPACE))


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_scenario_54_a_hundred_resets_leave_as_many_threads_as_one(tmp_path: Path, loop: Loop) -> None:
    pools, running = HostPools(LAYOUT, 16), set[int]()
    before = set(threading.enumerate())
    for _ in range(100):
        store = disk_store(tmp_path / "store")
        with CacheController(device=CpuDevice(LAYOUT, 16, pools), store=store, loop=loop) as cache:
            assert not cache.write_back([BackupNode(1, A, ((0, 1, 2, 3),))]).failed
            running.add(threading.active_count())
        assert set(threading.enumerate()) <= before
    assert len(running) == 1
    pools.close()


def test_scenario_54_a_hundred_resets_of_a_living_controller_leave_as_many_threads_as_one(tmp_path: Path) -> None:
    pools, running = HostPools(LAYOUT, 16), set[int]()
    with CacheController(device=CpuDevice(LAYOUT, 16, pools)) as cache:
        for _ in range(100):
            cache.attach_store(disk_store(tmp_path / "store"), 30)
            assert not cache.write_back([BackupNode(1, A, ((0, 1, 2, 3),))]).failed
            running.add(threading.active_count())
            cache.detach_store(30)
            cache.clear_host()
    assert len(running) == 1
    pools.close()
