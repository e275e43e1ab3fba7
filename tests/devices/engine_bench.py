"""A `CopyEngine` on the scheduled runtime, over pools of random bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvcr_actors.core.copy_plan import CopyPlan, Direction
from kvcr_actors.devices.cuda import CopyEngine
from kvcr_actors.devices.host_memory import HostPools
from kvcr_actors.devices.row_mover import PlaneTable, RowMover, TorchMover
from kvcr_actors.types import CacheLayout
from tests.devices.harness import expected_device, expected_host, random_bytes
from tests.devices.scheduled_runtime import ScheduledRuntime

PAGES = 12
SLOTS = 40
RING = 40_000

MakeMover = Callable[[PlaneTable], RowMover]


class Bench:
    """A device over pools of random bytes, and what its pools must hold."""

    def __init__(
        self,
        layout: CacheLayout,
        seed: int = 0,
        mover: MakeMover = TorchMover,
        layers: Sequence[Sequence[int]] | None = None,
        staging_bytes: int = RING,
        chunk_bytes: int = 1 << 30,
        direct_bytes: int = 1 << 30,
        index_bytes: int = 64 << 10,
        launch_on_caller: bool = False,
        runtime: ScheduledRuntime | None = None,
    ) -> None:
        self.layout = layout
        self.runtime = ScheduledRuntime(seed) if runtime is None else runtime
        self.host = HostPools(layout, SLOTS, registrar=self.runtime, register_chunk_bytes=chunk_bytes)
        self.pools = [torch.empty((pool.planes, PAGES, pool.plane_bytes), dtype=torch.uint8) for pool in layout.pools]
        self.fill()
        planes = [pool.unbind(0) for pool in self.pools]
        self.device = CopyEngine(
            layout,
            planes,
            self.host,
            self.runtime,
            layers=layers,
            staging_bytes=staging_bytes,
            index_bytes=index_bytes,
            direct_bytes=direct_bytes,
            mover=mover(PlaneTable(layout, planes)),
            launch_on_caller=launch_on_caller,
        )

    def fill(self) -> None:
        """Put random bytes into all pools."""
        for number, pool in enumerate(self.pools):
            pool.copy_(random_bytes(pool.shape))
            self.host.tensor(number).copy_(random_bytes(self.host.tensor(number).shape))

    def expect(self, plan: CopyPlan) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The host and device pools after the plan."""
        hosts = [self.host.tensor(pool).clone() for pool in range(len(self.pools))]
        pools = [pool.clone() for pool in self.pools]
        for pool in range(len(pools)):
            if plan.direction is Direction.TO_HOST:
                hosts[pool] = expected_host(hosts[pool], pools[pool], plan, pool)
            else:
                pools[pool] = expected_device(pools[pool], hosts[pool], plan, pool)
        return hosts, pools

    def check(self, expected: tuple[list[torch.Tensor], list[torch.Tensor]]) -> None:
        hosts, pools = expected
        for pool, spec in enumerate(self.layout.pools):
            assert torch.equal(self.host.tensor(pool), hosts[pool]), spec.name
            assert torch.equal(self.pools[pool], pools[pool]), spec.name


def layers_of(layout: CacheLayout) -> list[list[int]]:
    """Each plane is a layer of its own."""
    return [list(range(pool.planes)) for pool in layout.pools]
