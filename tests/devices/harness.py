"""What the device tests share: layouts of the field, plans over random pages, and what they must do."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from kvcr_actors.core.copy_plan import CopyPlan, Direction, plan_copy
from kvcr_actors.types import CacheLayout, PoolSpec

LAYOUTS = {
    "one_plane": CacheLayout((PoolSpec("kv", 1, 256),)),
    "mla_and_indexer": CacheLayout((PoolSpec("kv", 4, 1152), PoolSpec("indexer", 4, 132))),
    "hybrid": CacheLayout((PoolSpec("kv", 4, 256), PoolSpec("swa", 6, 256), PoolSpec("mamba", 2, 4096))),
    "quantised": CacheLayout((PoolSpec("kv", 2, 512), PoolSpec("scales", 2, 20))),
    "odd": CacheLayout((PoolSpec("kv", 3, 33), PoolSpec("side", 1, 1000))),
}


def random_plan(
    rng: random.Random, layout: CacheLayout, direction: Direction, count: int, pages: int, slots: int, *, run: int = 1
) -> CopyPlan:
    """Pair `count` device pages a pool with host slots in random runs of at most `run`; each pool differs."""
    devices: list[list[int]] = []
    hosts: list[list[int]] = []
    for _ in layout.pools:
        devices.append(rng.sample(range(pages), count))
        starts = rng.sample(range(0, slots - run, run), -(-count // run))
        hosts.append([start + offset for start in starts for offset in range(run)][:count])
    return plan_copy(direction, [(tuple(devices), tuple(hosts))])


def random_bytes(shape: Sequence[int]) -> torch.Tensor:
    return torch.randint(0, 256, tuple(shape), dtype=torch.uint8)


def expected_host(before: torch.Tensor, device: torch.Tensor, plan: CopyPlan, pool: int) -> torch.Tensor:
    """The host pool [slots, page_bytes] after a backup of `device` [planes, pages, plane_bytes]."""
    after = before.clone()
    for copy in plan.pools:
        if copy.pool == pool:
            for page, slot in zip(copy.device_pages, copy.host_slots, strict=True):
                after[slot] = device[:, page].flatten()
    return after


def expected_device(before: torch.Tensor, host: torch.Tensor, plan: CopyPlan, pool: int) -> torch.Tensor:
    """The device pool [planes, pages, plane_bytes] after a restore from `host` [slots, page_bytes]."""
    after = before.clone()
    for copy in plan.pools:
        if copy.pool == pool:
            for page, slot in zip(copy.device_pages, copy.host_slots, strict=True):
                after[:, page] = host[slot].view(before.shape[0], before.shape[2])
    return after
