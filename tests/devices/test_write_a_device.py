"""The device that `docs/write_a_device.md` shows keeps the promises of the port, and serves both front doors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

import pytest

from kvcr_actors import (
    BackupAck,
    BackupNode,
    CacheController,
    ConfigError,
    ControllerConfig,
    DeadlineError,
    Direction,
    MoveAck,
    MoveOrder,
    PageMover,
    PrefetchReady,
    PrefetchRequest,
    RestoreFinished,
    RestoreOrder,
)
from kvcr_actors.testing.device_contract import EVERY_DEVICE, DeviceCheck
from kvcr_actors.testing.device_driver import DeviceBench
from kvcr_actors.testing.store_driver import LAYOUT, chain
from tests.pages import code_of_page

CODE = code_of_page(Path("docs/write_a_device.md"))
make_bench = cast("Callable[[], DeviceBench]", CODE["make_bench"])
POOLS = range(len(LAYOUT.pools))
WAIT_S = 20.0

T = TypeVar("T")


@pytest.mark.anyio
@pytest.mark.real_clock
@pytest.mark.parametrize("check", EVERY_DEVICE, ids=lambda check: check.__name__)
async def test_the_device_of_the_page_keeps_the_contract(check: DeviceCheck) -> None:
    await check(make_bench)


def test_the_page_advises_the_test_that_runs_here() -> None:
    (mark,) = [mark for mark in CODE["test_contract"].pytestmark if mark.name == "parametrize"]
    assert mark.args[1] is EVERY_DEVICE


def fill(bench: DeviceBench, pages: range) -> list[bytes]:
    """Write pages as the engine would; what each pool then holds in them."""
    contents = [
        bytes((7 * pool + at) % 251 for at in range(len(pages) * LAYOUT.pools[pool].page_bytes)) for pool in POOLS
    ]
    for pool, content in enumerate(contents):
        bench.load(pool, pages, content)
    return contents


def gathered(bench: DeviceBench, pages: range) -> list[bytes]:
    return [bench.gather(pool, pages) for pool in POOLS]


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_a_controller_backs_up_and_restores_with_it(loop: str) -> None:
    bench, keys = make_bench(), chain("a", 4)
    written, fence = fill(bench, range(4)), threading.Event()
    with CacheController(device=bench.device, loop=loop) as controller:  # type: ignore[arg-type]
        controller.write(BackupNode(1, keys, (tuple(range(4)),) * len(POOLS)), flush=False)
        controller.flush_pending_backups(fence=fence)
        fence.set()
        backed = await_one(controller, BackupAck)
        assert not backed.failed
        controller.prefetch(PrefetchRequest("r", keys))
        controller.flush_pending_backups()
        assert await_one(controller, PrefetchReady).pages == 4
        controller.restore(RestoreOrder("r", 0, (tuple(range(8, 12)),) * len(POOLS)))
        controller.flush_pending_backups()
        await_one(controller, RestoreFinished)
    assert gathered(bench, range(8, 12)) == written


@pytest.mark.parametrize("host", ["thread", "inline"])
def test_a_mover_moves_with_it(host: str) -> None:
    bench = make_bench()
    written, fence = fill(bench, range(4)), threading.Event()
    with PageMover(bench.device, host=host) as mover:  # type: ignore[arg-type]
        mover.move(MoveOrder("out", Direction.TO_HOST, (range(4),) * len(POOLS), (range(5, 9),) * len(POOLS)))
        mover.flush(fence, urgent=True)
        fence.set()
        assert await_one(mover, MoveAck).done == ("out",)
        mover.move(MoveOrder("back", Direction.TO_DEVICE, (range(8, 12),) * len(POOLS), (range(5, 9),) * len(POOLS)))
        mover.move(MoveOrder("beyond", Direction.TO_DEVICE, ([99], [], []), ([1], [], [])))
        mover.flush()
        ack = await_one(mover, MoveAck)
    assert (ack.done, [failure.order_id for failure in ack.failed]) == (("back",), ["beyond"])
    assert gathered(bench, range(8, 12)) == written


def test_memory_under_its_late_copy_goes_to_nobody_before_that_has_ended() -> None:
    bench, fence = make_bench(), threading.Event()
    others = set(threading.enumerate())
    controller = CacheController(ControllerConfig(drain_budget_s=0.05), device=bench.device).start()
    controller.write(BackupNode(1, chain("a", 1), ((3,),) * len(POOLS)), flush=False)
    controller.flush_pending_backups(fence=fence)
    while not bench.device.describe()["running"]:
        time.sleep(0.001)
    threads = set(threading.enumerate()) - others
    with pytest.raises(DeadlineError, match="1 copies did not end"):
        controller.close()
    with pytest.raises(ConfigError, match="closed while copies still ran"):
        CacheController(device=bench.device).start()
    fence.set()
    for thread in threads:
        if thread.name.startswith("copy-"):
            thread.join(WAIT_S)
            assert not thread.is_alive()
    with CacheController(device=bench.device):
        pass


def await_one(door: CacheController | PageMover, kind: type[T]) -> T:
    assert door.wait(WAIT_S)
    (found,) = door.take()
    assert isinstance(found, kind), found
    return found
