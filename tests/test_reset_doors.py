"""A reset through both doors: from a scheduler's thread, from one that pumps the loop, and awaited."""

from __future__ import annotations

from pathlib import Path
from time import monotonic

import pytest

from kvcr_actors import (
    BackupAck,
    BackupNode,
    CacheController,
    CacheLayout,
    Completion,
    ConfigError,
    CpuDevice,
    CpuFence,
    HostPools,
    Namespace,
    PoolSpec,
    PrefetchReady,
    PrefetchRequest,
    ResetFinished,
    Store,
    layout_name,
    open_controller,
    open_store,
)
from kvcr_actors.controller import HostKind
from kvcr_actors.errors import ControllerClosedError
from kvcr_actors.testing.store_driver import chain
from kvcr_actors.types import SkipReason
from tests.doors import Ports

LAYOUT = CacheLayout((PoolSpec("kv", 2, 32),))
A = chain("a", 4)
PAGES = ((0, 1, 2, 3),)
WAIT_S = 30.0


def store(folder: Path, weights: str) -> Store:
    space = Namespace("m", weights, "uint8", layout_name(LAYOUT), LAYOUT.page_bytes)
    return open_store("disk", {}, 64, folder, space)


def wait_for(cache: CacheController, kind: type[Completion]) -> list[Completion]:
    """What was taken up to the first completion of a kind, which is the last."""
    taken: list[Completion] = []
    until = monotonic() + WAIT_S
    while monotonic() < until:
        cache.wait(0.2)
        for completion in cache.take():
            taken.append(completion)
            if isinstance(completion, kind):
                return taken
    raise TimeoutError(f"no {kind.__name__} among {taken}")


@pytest.mark.parametrize("host", ["thread", "inline"])
@pytest.mark.parametrize("clears", [True, False])
def test_held_pages_and_a_backup_in_flight_never_come_to_the_new_weights(
    tmp_path: Path, host: HostKind, clears: bool
) -> None:
    pools, folder, fence = HostPools(LAYOUT, 16), tmp_path / "store", CpuFence()
    device = CpuDevice(LAYOUT, 64, pools)
    weights = "1" if clears else "2"
    try:
        with CacheController(device=device, store=store(folder, "1"), host=host) as cache:
            with pytest.raises(ConfigError, match="say clear=True to empty it, or give the store that takes its place"):
                cache.reset("weights")
            cache.write_back([BackupNode(1, A, PAGES)])
            cache.wait_quiet(WAIT_S)
            cache.prefetch(PrefetchRequest("held", A))
            cache.flush_pending_backups()
            wait_for(cache, PrefetchReady)
            cache.write(BackupNode(2, chain("b", 4), PAGES), flush=False)
            cache.flush_pending_backups(fence)
            cache.reset("weights", clear=clears, store=None if clears else store(folder, "2"))
            fence.set()
            taken = wait_for(cache, ResetFinished)
            finished = taken[-1]
            assert isinstance(finished, ResetFinished)
            assert (finished.host_pages, finished.store_pages, finished.error) == (4, 4 if clears else 0, None)
            acks = [one for one in taken if isinstance(one, BackupAck)]
            assert [one.failed for one in acks] == [((2, SkipReason.RESET),)]
            cache.wait_quiet(WAIT_S)
            assert cache.host_contents() == frozenset()
            assert cache.claims.open == 0
        for version, held in {"1": frozenset() if clears else frozenset(A), "2": frozenset()}.items():
            later = store(folder, version)
            with CacheController(device=device, store=later, host=host):
                assert later.contents() == held, f"weights {version} after a restart; {weights} came last"
    finally:
        pools.close()


def test_a_reset_after_the_end_is_answered(tmp_path: Path) -> None:
    pools = HostPools(LAYOUT, 16)
    cache = CacheController(device=CpuDevice(LAYOUT, 64, pools)).start()
    cache.close()
    cache.reset("late")
    assert cache.take() == [ResetFinished("late", 0, error="the controller stopped before the reset was over")]
    pools.close()


@pytest.mark.anyio
async def test_the_asynchronous_door_waits_for_the_end() -> None:
    ports = Ports()
    async with open_controller(**ports.arguments) as cache:
        await cache.backup([ports.node(A)])
        await cache.wait_quiet()
        assert await cache.reset("2", clear=True) == ResetFinished("2", host_pages=4, store_pages=4)
        assert cache.host_contents() == frozenset()
        await cache.backup([ports.node(A)])
        assert (await cache.prefetch(PrefetchRequest("r", A))).pages == 4
        order = ports.restore("r", 4)
        await cache.restore(order)
        ports.assert_bytes(order, A)
    with pytest.raises(ControllerClosedError):
        await cache.reset("late", clear=True)
