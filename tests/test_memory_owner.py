"""Memory has one owner: a device and its host pools belong to one running controller, until its copies have ended."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
import torch

from kvcr_actors.aio import AsyncController
from kvcr_actors.config import ControllerConfig
from kvcr_actors.controller import CacheController
from kvcr_actors.devices.cpu import CpuDevice, CpuFence
from kvcr_actors.devices.host_memory import HostPools
from kvcr_actors.errors import ActorEscalatedError, ConfigError, DeadlineError
from kvcr_actors.messages import BackupAck
from kvcr_actors.movers.mover import PageMover
from kvcr_actors.testing.store_driver import chain
from kvcr_actors.types import BackupNode
from tests.doors import LAYOUT, Ports

WAIT_S = 30.0


def cpu_device(host: HostPools | None = None) -> CpuDevice:
    return CpuDevice(LAYOUT, 64, HostPools(LAYOUT, slots=8) if host is None else host)


def back_up(controller: CacheController, fence: CpuFence | None = None) -> None:
    controller.write(BackupNode(1, chain("a", 2), ((1, 2), (1, 2))), flush=False)
    controller.flush_pending_backups(fence)


def test_a_second_controller_is_refused_before_it_opens_anything_and_the_first_goes_on(real_backend: Any) -> None:
    pools = HostPools(LAYOUT, slots=8)
    device, other = cpu_device(pools), cpu_device(pools)
    with CacheController(device=device, loop=real_backend) as first:
        with pytest.raises(ConfigError, match=r"CpuDevice: .*still runs; close that controller first"):
            CacheController(device=device, loop=real_backend).start(WAIT_S)
        with pytest.raises(ConfigError, match=r"HostPools: .*still runs; close that controller first"):
            CacheController(device=other, loop=real_backend).start(WAIT_S)
        assert other.describe()["open"] is False
        with pytest.raises(ConfigError, match="HostPools: close"):
            pools.close()
        back_up(first)
        assert first.wait(WAIT_S)
        assert first.take() == [BackupAck(1, (1,))]
    with CacheController(device=other, loop=real_backend):
        pass
    pools.close()


def test_a_mover_owns_its_memory_too() -> None:
    device = cpu_device()
    with PageMover(device), pytest.raises(ConfigError, match="CpuDevice"):
        CacheController(device=device).start(WAIT_S)
    with CacheController(device=device):
        pass


@pytest.mark.anyio
async def test_the_asynchronous_controller_owns_its_memory_too() -> None:
    ports = Ports()
    first = await AsyncController(**ports.arguments).start()
    with pytest.raises(ConfigError, match="LoopDevice"):
        await AsyncController(device=ports.device).start()
    await first.close()
    await (second := await AsyncController(device=ports.device).start()).close()
    assert second.claims.open == 0


def test_a_start_that_fails_gives_the_memory_back() -> None:
    device = cpu_device()
    ports = Ports()

    async def refuse(*args: object) -> None:
        raise OSError("planted")

    assert ports.store is not None
    ports.store.open = refuse  # type: ignore[method-assign]
    with pytest.raises(OSError, match="planted"):
        CacheController(device=device, store=ports.store).start(WAIT_S)
    with CacheController(device=device):
        pass


def test_a_controller_that_failed_gives_the_memory_back_when_it_is_closed() -> None:
    device = cpu_device()
    controller = CacheController(ControllerConfig(restarts=0), device=device).start()
    submit, device.submit = device.submit, None  # type: ignore[assignment, method-assign]
    back_up(controller)
    controller.wait(WAIT_S)
    with pytest.raises(ActorEscalatedError):
        controller.close(WAIT_S)
    device.submit = submit  # type: ignore[method-assign]
    with CacheController(device=device):
        pass


def test_memory_under_a_late_copy_is_kept_until_the_copy_has_ended() -> None:
    device, fence = cpu_device(), CpuFence()
    controller = CacheController(ControllerConfig(drain_budget_s=0.05), device=device).start()
    back_up(controller, fence)
    anyio.run(anyio.sleep, 0.05)
    with pytest.raises(DeadlineError, match=r"kvcr-cpu-to_host.*in use for backup of 1"):
        controller.close()
    for refused in (CacheController(device=device).start, device.host.close):
        with pytest.raises(ConfigError, match=r"closed while copies still ran.*kvcr-cpu-to_host"):
            refused()
    before = [torch.clone(device.host.tensor(pool)) for pool in range(2)]
    device.load(0, [1, 2], torch.full((2, 8), 7, dtype=torch.uint8))
    thread = device._closing[0]._thread
    fence.set()
    for one in device._closing:
        one._thread.join(WAIT_S)
    assert not thread.is_alive()
    assert not torch.equal(before[0], device.host.tensor(0))  # what the refusals kept others from
    device.host.close()
    with CacheController(device=device):
        pass
