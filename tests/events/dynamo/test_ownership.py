"""A store's own blocks, salts and hints, as Dynamo's state agent, indexer and selection service take them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from kvcr_actors.core.inventory import BlocksRemoved, BlocksStored, InventoryEvent, Ownership, TierCleared
from kvcr_actors.core.keys import chain_seed, page_keys, router_key
from kvcr_actors.events.config import EventsConfig
from kvcr_actors.events.contexts import ContextTable
from kvcr_actors.events.zmq import ZmqEventSink
from kvcr_actors.testing.services import open_services
from kvcr_actors.types import PageContext, PageKey, Tier
from tests.events.dynamo.interpreter import dynamo_interpreter
from tests.events.dynamo.readers import Child, Depths, Indexer, Worker, free_ports, wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.real_clock]

SIZE = 4
TOKENS = list(range(1, 17))
ENGINE, STORE = Ownership.ENGINE, Ownership.STORE


def keys_of(tokens: Sequence[int], salt: str | None = None, adapter: str | None = None) -> tuple[PageKey, ...]:
    return page_keys(tokens, SIZE, chain_seed(page_tokens=SIZE, salt=salt, adapter=adapter))


def stored(tier: Tier, keys: Sequence[PageKey], first: int, last: int, owner: Ownership = ENGINE) -> InventoryEvent:
    parents = [None, *keys]
    return BlocksStored(tier, tuple(keys[first:last]), tuple(parents[first:last]), owner)


def new_worker(number: int = 1) -> Worker:
    events, replay = free_ports(2)
    return Worker(number, f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}")


@asynccontextmanager
async def publishing(
    worker: Worker, contexts: ContextTable, folder: Path, *, replays: bool = True
) -> AsyncGenerator[ZmqEventSink]:
    config = EventsConfig(
        worker.events,
        worker.replay if replays else None,
        sequence_file=folder / f"sequence-{worker.id}",
        heartbeat_s=0.2,
    )
    async with open_services() as services:
        sink = ZmqEventSink(config, contexts)
        await sink.open(services)
        try:
            yield sink
        finally:
            await sink.close(10)


async def sees(consumer: Child | Indexer, expected: dict[int, Depths], **names: str) -> None:
    def agrees() -> bool:
        return consumer.depths(TOKENS, **names) == expected

    await anyio.to_thread.run_sync(lambda: wait_until(agrees, f"the consumer to see {expected}", 15))


@pytest.mark.timeout(180)
async def test_the_state_agent_keeps_a_stores_own_blocks_apart(tmp_path: Path) -> None:
    worker, contexts, keys = new_worker(), ContextTable(), keys_of(TOKENS)
    contexts.note(keys, PageContext(TOKENS, SIZE))
    agent = await anyio.to_thread.run_sync(lambda: Child("agent", dynamo_interpreter(), [worker], SIZE))
    try:
        async with publishing(worker, contexts, tmp_path, replays=False) as sink:
            await sees(agent, {1: (0, 0, 0)})
            sink.publish([stored(Tier.DEVICE, keys, 0, 2), stored(Tier.HOST, keys, 2, 4)])
            await sees(agent, {1: (2, 4, 4)})
            sink.publish([stored(Tier.HOST, keys, 0, 2, STORE), stored(Tier.STORE, keys, 2, 3, STORE)])
            sink.publish([BlocksRemoved(Tier.DEVICE, keys[:2]), BlocksRemoved(Tier.HOST, keys[2:])])
            await sees(agent, {1: (0, 2, 3)})
            sink.publish([stored(Tier.DEVICE, keys, 0, 4)])
            await sees(agent, {1: (4, 4, 4)})
            sink.publish([TierCleared(Tier.DEVICE), TierCleared(Tier.HOST)])  # the engine's own clear
            await sees(agent, {1: (0, 2, 3)})
            sink.publish([BlocksRemoved(Tier.STORE, keys[2:3], STORE)])
            await sees(agent, {1: (0, 2, 2)})
        async with publishing(
            worker, contexts, tmp_path, replays=False
        ) as sink:  # a restart: the store comes back with less
            await sees(agent, {1: (0, 0, 0)})
            sink.publish([stored(Tier.HOST, keys, 0, 1, STORE)])
            await sees(agent, {1: (0, 1, 1)})
        assert (await anyio.to_thread.run_sync(lambda: agent.ask("status")))["failed_slots"] == 0
    finally:
        await anyio.to_thread.run_sync(agent.close)


@pytest.mark.timeout(120)
async def test_salts_and_adapters_are_worlds_of_their_own(tmp_path: Path) -> None:
    worker, contexts = new_worker(), ContextTable()
    salted, adapted = keys_of(TOKENS, salt="tenant"), keys_of(TOKENS, adapter="style")
    contexts.note(salted, PageContext(TOKENS, SIZE, salt="tenant"))
    contexts.note(adapted, PageContext(TOKENS, SIZE, adapter="style"))
    indexer = await anyio.to_thread.run_sync(lambda: Indexer(dynamo_interpreter(), [worker], SIZE))
    try:
        async with publishing(worker, contexts, tmp_path) as sink:
            sink.publish([stored(Tier.DEVICE, salted, 0, 3), stored(Tier.HOST, adapted, 0, 2)])
            await sees(indexer, {1: (3, 3, 3)}, cache_salt="tenant")
            await sees(indexer, {1: (0, 2, 2)}, lora_name="style")
            await sees(indexer, {})
    finally:
        await anyio.to_thread.run_sync(indexer.close)


@pytest.mark.timeout(120)
async def test_a_hint_names_the_router_keys_of_the_source(tmp_path: Path) -> None:
    source, target, contexts, keys = new_worker(1), new_worker(2), ContextTable(), keys_of(TOKENS)
    contexts.note(keys, PageContext(TOKENS, SIZE))
    consumer = await anyio.to_thread.run_sync(lambda: Child("selection", dynamo_interpreter(), [source, target], SIZE))

    def hint(name: str) -> list[int] | None:
        answer = consumer.ask("hint", token_ids=TOKENS, selection_id=name, allowed_worker_ids=[2])
        return None if answer is None else answer["actions"][0]["payload"]["block_hashes"]

    try:
        async with publishing(source, contexts, tmp_path) as one, publishing(target, contexts, tmp_path) as two:
            one.publish([stored(Tier.STORE, keys, 0, 4)])
            two.publish([stored(Tier.DEVICE, keys, 0, 1)])
            await sees(consumer, {1: (0, 0, 4), 2: (1, 1, 1)})
            assert await anyio.to_thread.run_sync(lambda: hint("on disk only")) is None
            one.publish([stored(Tier.HOST, keys, 0, 4)])
            await sees(consumer, {1: (0, 4, 4), 2: (1, 1, 1)})
            assert await anyio.to_thread.run_sync(lambda: hint("on the host")) == [router_key(key) for key in keys]
    finally:
        await anyio.to_thread.run_sync(consumer.close)
