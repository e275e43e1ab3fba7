"""A controller in an asyncio program: pages go to host memory and come back. Run it: no GPU, no model.

python examples/embed_in_asyncio.py
"""

from __future__ import annotations

import asyncio

import torch

from kvcr_actors import (
    BackupNode,
    CacheLayout,
    ControllerConfig,
    CpuDevice,
    CpuFence,
    HostPools,
    PoolSpec,
    PrefetchRequest,
    RestoreOrder,
    chain_seed,
    open_controller,
    page_keys,
)

LAYOUT = CacheLayout((PoolSpec("kv", planes=2, plane_bytes=64),), page_tokens=4)


async def main() -> None:
    """Back three pages up, lose them, and get them back into other device pages."""
    device = CpuDevice(LAYOUT, 16, HostPools(LAYOUT, slots=32))
    keys = tuple(page_keys(range(12), LAYOUT.page_tokens, chain_seed(page_tokens=LAYOUT.page_tokens)))
    content = torch.randint(0, 256, (len(keys), LAYOUT.page_bytes), dtype=torch.uint8)
    device.load(0, [0, 1, 2], content)
    fence = CpuFence()
    fence.set()  # the pages are written already
    # README: begin
    async with open_controller(ControllerConfig(), device=device) as cache:
        ack = await cache.backup([BackupNode(1, keys, ((0, 1, 2),))], fence)
        print(f"backed up: {ack.node_ids}, failed: {ack.failed}")  # the pages of both may change from now on
        found = await cache.prefetch(PrefetchRequest("again", keys))
        if found.account is None:  # a prefix stands ready: restore it, or cancel it
            await cache.restore(RestoreOrder("again", 0, ((3, 4, 5)[: found.pages],)), fence)
    # README: end
    print(f"restored: {found.pages} pages, equal: {torch.equal(device.gather(0, [3, 4, 5]), content)}")


if __name__ == "__main__":
    asyncio.run(main())
