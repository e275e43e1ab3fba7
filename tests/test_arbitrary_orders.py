"""Orders with arbitrary values in every field, on every door: each is refused there or answered once.

`KVCR_ACTORS_ORDERS=100000` in the environment makes so many orders; without it there are enough for every change.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcr_actors.aio import open_controller
from kvcr_actors.config import ControllerConfig
from kvcr_actors.controller import CacheController
from kvcr_actors.core.inventory import InventoryIndex
from kvcr_actors.errors import ConfigError, InvalidNodeError
from kvcr_actors.messages import (
    BackupAck,
    Completion,
    ControllerFailed,
    PrefetchCancelled,
    PrefetchReady,
    RestoreFinished,
)
from kvcr_actors.stores.memory import memory_backend
from kvcr_actors.testing.devices import LoopDevice
from kvcr_actors.testing.host_memory import BytesHostMemory
from kvcr_actors.testing.store_driver import chain
from kvcr_actors.testing.stores import FaultyStore
from kvcr_actors.types import (
    NO_SLOT,
    BackupNode,
    CacheLayout,
    PageContext,
    PoolSpec,
    PrefetchRequest,
    RestoreOrder,
    StopPolicy,
    TrailingPages,
)

ORDERS = int(os.environ.get("KVCR_ACTORS_ORDERS", "3000"))
A_LIFE = 50
"""Orders of one controller."""
DOORS = 3
WAIT_S = 60.0
DEVICE_PAGES = 32
CONFIG = ControllerConfig(prefetch_deadline_s=5.0, host_reserve_fraction=0.0)
KEYS = chain("a", 8)
ODD: tuple[Any, ...] = (
    None, True, False, -2, -1, 0, 1, 1.0, 1.5, 7, 1 << 31, 1 << 63, 1 << 130, 10**5000, float("nan"), float("inf"), "",
    "x", "\ud800", b"", b"x", bytes(32), bytearray(32), memoryview(bytes(32)), "k" * 32, (), (1,), [], [1], {}, {1},
    object(), Exception, StopPolicy.BEST_EFFORT, "timeout", range(3), np.arange(3), np.float64(1), np.int32(2),
    np.array([True]), np.array([[1]]), torch.arange(3), torch.tensor(1.5), (1, True), ("r", b"x", 5), ((), 1), KEYS,
    PageContext([1], 1),
)  # fmt: skip

Draw = random.Random


def layout(pools: int) -> CacheLayout:
    specs = (PoolSpec("kv", 1, 8), PoolSpec("swa", 1, 3, TrailingPages(2)), PoolSpec("state", 1, 5, TrailingPages(1)))
    return CacheLayout(specs[:pools])


def either(draw: Draw, right: Callable[[], Any]) -> Any:
    """A right value for a field, or one time in ten another."""
    return draw.choice(ODD) if draw.random() < 0.1 else right()


def an_id(draw: Draw) -> Any:
    return either(draw, lambda: draw.choice([draw.randrange(20), f"r{draw.randrange(9)}", b"r", ("r", 1)]))


def a_path(draw: Draw) -> Any:
    start = draw.randrange(4)
    keys: list[Any] = list(KEYS[start : start + draw.randrange(1, 5)])
    if draw.random() < 0.05:
        keys[draw.randrange(len(keys))] = draw.choice(ODD)
    return either(draw, lambda: draw.choice([tuple, list])(keys))


def page_lists(draw: Draw, count: int, pools: int) -> Any:
    def one() -> Any:
        pages: list[Any] = [draw.randrange(DEVICE_PAGES) for _ in range(count)]
        if pages and draw.random() < 0.2:
            pages[draw.randrange(count)] = draw.choice([NO_SLOT, DEVICE_PAGES, 1 << 40])
        if pages and draw.random() < 0.05:
            pages[draw.randrange(count)] = draw.choice(ODD)
            return pages
        return draw.choice([tuple, list, np.array, torch.tensor])(pages)

    return either(draw, lambda: tuple(either(draw, one) if draw.random() < 0.2 else one() for _ in range(pools)))


def length(keys: Any) -> int:
    return len(keys) if isinstance(keys, list | tuple) else 2


def a_node(draw: Draw, pools: int) -> BackupNode:
    keys = a_path(draw)
    parent = None if draw.random() < 0.5 else either(draw, lambda: draw.choice(KEYS))
    context = None if draw.random() < 0.8 else either(draw, lambda: PageContext(range(length(keys)), 1))
    number = either(draw, lambda: draw.randrange(50))
    return BackupNode(number, keys, page_lists(draw, length(keys), pools), parent, context)


def a_request(draw: Draw) -> PrefetchRequest:
    stop = either(draw, lambda: draw.choice([None, *StopPolicy]))
    device = either(draw, lambda: draw.choice([0, 0, 0, 1]))
    return PrefetchRequest(an_id(draw), a_path(draw), device, draw.choice(ODD), stop)


def a_restore(draw: Draw, pools: int, request_id: Any) -> RestoreOrder:
    first = either(draw, lambda: draw.choice([0, 0, 1, 9]))
    return RestoreOrder(request_id, first, page_lists(draw, draw.randrange(4), pools))


class NoHostMemory(BytesHostMemory):
    """A host tier that is off."""

    __slots__ = ()

    def __init__(self, which: CacheLayout) -> None:
        super().__init__(which, 1)
        self.slots = 0


class Life:
    """One controller's orders and what became of them."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.pools = self.draw.choice([1, 3])
        slots, which = self.draw.choice([0, 1, 3, 16]), layout(self.pools)
        self.given = self.refused = 0
        self.nodes: dict[int, Counter[int]] = {}
        self.requests = Counter[Hashable]()
        self.completions: list[Completion] = []
        host = NoHostMemory(which) if not slots else BytesHostMemory(which, slots)
        self.arguments: dict[str, Any] = {
            "device": LoopDevice(which, DEVICE_PAGES, host, latency_s=0.0),
            "store": FaultyStore(memory_backend(16)) if self.draw.random() < 0.5 else None,
            "sinks": (InventoryIndex(),),
        }

    def attempt(self, order: Callable[[], object]) -> bool:
        """Whether an order was taken; what refuses it says so by an error of the project."""
        self.given += 1
        try:
            order()
        except (InvalidNodeError, ConfigError):
            self.refused += 1
            return False
        return True

    def run(self, door: dict[str, Any]) -> None:
        cache, queued = (
            CacheController(CONFIG, **door, **self.arguments),
            Counter[int](),
        )

        def write() -> None:
            node = either(self.draw, lambda: a_node(self.draw, self.pools))
            cache.write(node, flush=False)
            queued[node.node_id] += 1

        def prefetch() -> None:
            request = either(self.draw, lambda: a_request(self.draw))
            cache.prefetch(request)
            self.requests[request.request_id] += 1

        orders: list[Callable[[], object]] = [
            write,
            prefetch,
            lambda: cache.restore(either(self.draw, lambda: a_restore(self.draw, self.pools, an_id(self.draw)))),
            lambda: cache.cancel(an_id(self.draw)),
            lambda: cache.stop_prefetch(an_id(self.draw)),
            lambda: cache.publish(self.draw.choice(ODD)),
            lambda: cache.wait(self.draw.choice([0, float("nan"), float("inf"), None, "1"])),
        ]
        with cache:
            for _ in range(A_LIFE):
                self.attempt(self.draw.choices(orders, (8, 6, 6, 1, 1, 1, 1))[0])
                if self.draw.random() < 0.4:
                    step = cache.flush_pending_backups()
                    if step is not None:
                        self.nodes[step] = queued.copy()
                        queued.clear()
                    if self.draw.random() < 0.5:
                        cache.wait_quiet(WAIT_S)
                    self.completions += cache.take()
            step = cache.flush_pending_backups()
            if step is not None:
                self.nodes[step] = queued
            cache.wait_quiet(WAIT_S)
        self.completions += cache.take()
        self.check(cache.claims.open)

    def check(self, claims: int) -> None:
        failed = [one for one in self.completions if isinstance(one, ControllerFailed)]
        assert not failed
        acks = [one for one in self.completions if isinstance(one, BackupAck)]
        assert sorted(ack.step for ack in acks) == sorted(self.nodes)
        for ack in acks:
            assert Counter([*ack.node_ids, *(node for node, _ in ack.failed)]) == self.nodes[ack.step]
        endings = Counter[Hashable]()
        for one in self.completions:
            if isinstance(one, PrefetchCancelled | RestoreFinished) or (
                isinstance(one, PrefetchReady) and one.account is not None
            ):
                endings[one.request_id] += 1
        assert endings == self.requests
        assert claims == 0

    async def run_async(self) -> None:
        draw = self.draw
        async with open_controller(CONFIG, **self.arguments) as cache:

            async def backup() -> None:
                nodes = [a_node(draw, self.pools) for _ in range(draw.randrange(3))]
                ack = await cache.backup(either(draw, lambda: nodes), timeout_s=WAIT_S)
                told = Counter([*ack.node_ids, *(node for node, _ in ack.failed)])
                assert told in (Counter(node.node_id for node in nodes), Counter())

            async def prefetch() -> None:
                request = either(draw, lambda: a_request(draw))
                ready = await cache.prefetch(request, timeout_s=WAIT_S)
                if ready.account is None:
                    try:
                        await cache.restore(a_restore(draw, self.pools, request.request_id), timeout_s=WAIT_S)
                    finally:
                        cache.cancel(request.request_id)

            async def others() -> None:
                cache.cancel(an_id(draw))
                cache.stop_prefetch(an_id(draw))
                cache.publish(draw.choice(ODD))
                await cache.wait_quiet(draw.choice([WAIT_S, float("nan"), float("inf"), None]))

            for _ in range(A_LIFE):
                self.given += 1
                try:
                    await draw.choices([backup, prefetch, others], (4, 4, 1))[0]()
                except (InvalidNodeError, ConfigError):
                    self.refused += 1
            await cache.wait_quiet(WAIT_S)
        assert not cache.claims.open
        assert not cache.unclaimed_acks


TOTALS = Counter[str]()


def lives(door: str) -> Any:
    """A property over as many lives as give the orders that were asked for."""
    count = max(1, ORDERS // A_LIFE // DOORS)
    checks = list(HealthCheck)

    def note(life: Life) -> None:
        TOTALS[f"{door} given"] += life.given
        TOTALS[f"{door} refused"] += life.refused

    def wrap(test: Callable[[Life], None]) -> Any:
        @settings(max_examples=count, deadline=None, suppress_health_check=checks, database=None)
        @given(st.integers(0, 2**64 - 1))
        def run(seed: int) -> None:
            life = Life(seed)
            test(life)
            note(life)

        return run

    return wrap


@pytest.mark.timeout(0 if "KVCR_ACTORS_ORDERS" in os.environ else 120)
@pytest.mark.parametrize("host", ["inline", "thread"])
def test_on_the_synchronous_door_each_order_is_refused_or_answered_once(host: str) -> None:
    lives(host)(lambda life: life.run({"host": host}))()
    assert 0 < TOTALS[f"{host} refused"] < TOTALS[f"{host} given"]


@pytest.mark.timeout(0 if "KVCR_ACTORS_ORDERS" in os.environ else 120)
def test_on_the_asynchronous_door_each_order_is_refused_or_answered() -> None:
    lives("async")(lambda life: anyio.run(life.run_async))()
    assert 0 < TOTALS["async refused"] < TOTALS["async given"]
