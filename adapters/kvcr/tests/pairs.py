"""Two stores in one process, each with host memory of its own: what peers do, without the price of processes."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import attrs

from examples.two_workers.process import free_port
from kvcr_actors import NO_SLOT, CacheLayout, Namespace, PageKey, layout_name, router_key
from kvcr_actors.ports import BatchOutcome, Operation, PageBatch
from kvcr_actors.testing.host_memory import BytesHostMemory
from kvcr_actors.testing.services import RecordingServices, open_services
from kvcr_actors.testing.store_driver import letters
from kvcr_actors_kvcr import FetchHint, KvcrOptions, KvcrStore

WAIT_S = 30.0


@attrs.define
class Side:
    """A store and its host memory; page `i` of what it moves lies in slot `i`."""

    store: KvcrStore
    host: BytesHostMemory
    services: RecordingServices
    shard: str = ""
    """Whose shard its pools in `sharded` are: their bytes differ from rank to rank."""
    sharded: frozenset[str] = frozenset()

    def content(self, key: PageKey, pool: int) -> bytes:
        """The bytes that belong to a component here."""
        own = self.shard if self.host.layout.pools[pool].name in self.sharded else ""
        return content(self.host.layout, key, pool, own)

    async def write(self, keys: Sequence[PageKey], masks: Sequence[int]) -> str:
        for index, key in enumerate(keys):
            for pool in range(len(self.host.layout.pools)):
                self.host.page(pool, index)[:] = self.content(key, pool)
        return letters((await self.outcome(self.store.write(self.batch(keys, masks, chained=True)))).pages)

    async def read(self, keys: Sequence[PageKey], masks: Sequence[int], request: object = "request") -> str:
        """Letters of the outcomes; bytes that are wrong under OK raise."""
        for pool in range(len(self.host.layout.pools)):
            self.host.poison(pool, range(self.host.slots))
        outcome = await self.outcome(self.store.read(self.batch(keys, masks), request))
        for index, (key, letter) in enumerate(zip(keys, letters(outcome.pages), strict=True)):
            for pool in range(len(self.host.layout.pools)):
                if letter == "o" and masks[index] >> pool & 1:
                    assert bytes(self.host.page(pool, index)) == self.content(key, pool)
        return letters(outcome.pages)

    async def lookup(self, keys: Sequence[PageKey], request: object = "request") -> tuple[int, ...]:
        with anyio.fail_after(WAIT_S):
            return await self.store.lookup(keys, request).outcome()

    async def confirm(self, keys: Sequence[PageKey], request: object = "request") -> bool:
        with anyio.fail_after(WAIT_S):
            return await self.store.confirm(keys, request).outcome()

    def hint(self, keys: Sequence[PageKey]) -> dict[str, Any]:
        assert self.store.endpoint is not None
        return FetchHint(self.store.endpoint, frozenset(map(router_key, keys))).envelope("test")

    def batch(self, keys: Sequence[PageKey], masks: Sequence[int], *, chained: bool = False) -> PageBatch:
        slots = tuple(
            tuple(index if mask >> pool & 1 else NO_SLOT for index, mask in enumerate(masks))
            for pool in range(len(self.host.layout.pools))
        )
        return PageBatch(tuple(keys), slots, (None, *keys[:-1]) if chained else ())

    @staticmethod
    async def outcome(operation: Operation[BatchOutcome]) -> BatchOutcome:
        with anyio.fail_after(WAIT_S):
            outcome = await operation.outcome()
            await operation.quiet()
            return outcome


def content(layout: CacheLayout, key: PageKey, pool: int, shard: str = "") -> bytes:
    """The bytes that belong to a component."""
    return random.Random(f"{key.hex()}/{pool}/{shard}").randbytes(layout.pools[pool].page_bytes)


@asynccontextmanager
async def side(
    layout: CacheLayout, capacity: int = 32, slots: int = 32, *, tensor: int | None = None, **options: Any
) -> AsyncGenerator[Side]:
    """Open a store that peers can reach; `tensor` makes it that rank of two."""
    ranks = () if tensor is None else (("tensor", tensor, 2),)
    namespace = Namespace("test-model", "1", "float16", layout_name(layout), layout.page_bytes, ranks)
    store = KvcrStore(KvcrOptions(**{"control_port": free_port(), **options}), capacity, namespace)
    async with open_services() as services:
        host = BytesHostMemory(layout, slots)
        await store.open(services, host)
        try:
            yield Side(store, host, services, str(tensor), store.options.shard_names)
        finally:
            with anyio.CancelScope(shield=True):
                await store.close(20.0)
