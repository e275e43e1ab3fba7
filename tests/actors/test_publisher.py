"""Wherever an event is dropped on its way to a sink, the sink's readers end with the content all the same."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import count
from typing import Any

import anyio
import pytest

from kvcr_actors.controller import CacheController
from kvcr_actors.core.inventory import (
    BlocksRemoved,
    BlocksStored,
    InventoryEvent,
    InventoryIndex,
    Ownership,
    TierCleared,
)
from kvcr_actors.core.keys import router_key
from kvcr_actors.events.contexts import Origin
from kvcr_actors.events.follower import StreamFollower
from kvcr_actors.events.stream import EventStream
from kvcr_actors.events.wire import find_dialect
from kvcr_actors.ports import HostMemory, RunningEventSink, Services
from kvcr_actors.runtime.supervisor import ActorState
from kvcr_actors.stores.memory import memory_backend
from kvcr_actors.testing.devices import LoopDevice
from kvcr_actors.testing.host_memory import BytesHostMemory
from kvcr_actors.testing.stores import FaultyStore
from kvcr_actors.types import PageContext, PageKey, Tier
from tests.actors.cluster import single
from tests.actors.rig import LAYOUT, PlantedError, Rig, chain, virtual

pytestmark = pytest.mark.anyio

DEVICE = (Tier.DEVICE, Ownership.ENGINE)


class OneToken:
    """Every page has a context: what it is does not matter here."""

    _context = PageContext((7,), 1)

    def find(self, key: PageKey) -> Origin:
        return self._context, 0


class Router:
    """A sink with the stream of the real one, and a reader that cannot ask for a replay at its end."""

    def __init__(self) -> None:
        self.stream = EventStream(find_dialect("dynamo"), OneToken(), count().__next__)
        self.follower = StreamFollower(can_replay=False)
        self.raises = False
        self.tries: list[float] = []

    def publish(self, events: Sequence[InventoryEvent]) -> None:
        self.tries.append(anyio.current_time())
        if self.raises:
            self.stream.push(events[: len(events) // 2])  # it raises half way
            raise PlantedError("the sink is out of order")
        self.stream.push(events)
        while (message := self.stream.next_message(0.0, 0.0)) is not None:
            self.follower.receive(*message)

    def hashes(self, tier: Tier) -> frozenset[Any]:
        return self.follower.index.keys(tier)


class Held:
    """An engine's own tier: the truth, told step by step."""

    def __init__(self, desk: Any) -> None:
        self.keys: set[PageKey] = set()
        self._desk = desk

    def store(self, keys: Sequence[PageKey]) -> None:
        self.keys.update(keys)
        self._tell(BlocksStored(Tier.DEVICE, tuple(keys), (None, *keys[:-1])))

    def remove(self, keys: Sequence[PageKey]) -> None:
        self.keys.difference_update(keys)
        self._tell(BlocksRemoved(Tier.DEVICE, tuple(reversed(keys))))

    def _tell(self, event: InventoryEvent) -> None:
        self._desk.publish([event])
        self._desk.flush_pending_backups()


def hashes(keys: Sequence[PageKey] | frozenset[PageKey]) -> set[int]:
    return {router_key(key) for key in keys}


def assert_right(rig: Rig, router: Router) -> None:
    assert router.hashes(Tier.HOST) == hashes(rig.assembly.host.contents())
    assert rig.store is not None
    assert router.hashes(Tier.STORE) == hashes(rig.store.contents())
    assert not router.follower.in_doubt


def raise_now() -> None:
    raise PlantedError("planted")


async def raise_planted() -> None:
    raise PlantedError("planted")


@pytest.fixture
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcr_actors.events.intake.PUBLISHES_KEPT", 2)
    monkeypatch.setattr("kvcr_actors.events.feed.CHANGES_KEPT", 4)


async def churn(rig: Rig, names: str) -> None:
    """Pages come to host and store, and go from the host; what comes last stays."""
    for name in names:
        rig.forget_host()
        await rig.back_up(rig.node(chain(name, 3)))
        await anyio.sleep(0.05)  # the store has them, too


@pytest.mark.usefixtures("small_bounds")
@virtual
async def test_what_is_dropped_on_the_loop_while_the_publisher_is_dead_is_made_up_for_when_it_lives() -> None:
    router = Router()
    rig = Rig(sinks=(router,), restart_backoff_s=5.0)
    async with rig.running():
        await churn(rig, "ab")
        await rig.quiet()
        assert_right(rig, router)
        supervisor = rig.supervisor("publisher")
        living: Any = supervisor._actor
        living._tasks.start_soon(raise_planted)
        await anyio.sleep(0.01)
        assert supervisor.state is ActorState.BACKING_OFF
        await churn(rig, "cdef")
        assert router.hashes(Tier.HOST) == hashes(chain("b", 3))
        with anyio.fail_after(60):
            while supervisor.state is not ActorState.RUNNING:  # noqa: ASYNC110
                await anyio.sleep(0.1)
        await rig.quiet()
        assert rig.stats.events_dropped > 0
        assert_right(rig, router)
        rig.check()
        await churn(rig, "g")  # and changes are told as ever
        await rig.quiet()
        assert_right(rig, router)
        assert rig.assembly.describe()["actors"]["publisher"]["actor"]["stale"] == []
    rig.check()


@pytest.mark.usefixtures("small_bounds")
async def test_what_the_engine_leaves_in_vain_for_a_loop_without_turns_is_made_up_for() -> None:
    router = Router()
    rig = Rig(sinks=(router,), inbox_limit=1)
    async with rig.running():
        held = Held(rig.desk)
        for number in range(40):  # the loop has no turn in between
            held.store(chain(f"{number}", 3))
            if number >= 4:
                held.remove(chain(f"{number - 4}", 3))
        await rig.quiet()
        assert rig.stats.events_dropped > 0
        assert router.hashes(Tier.DEVICE) == hashes(frozenset(held.keys))
        assert rig.index.holding(*DEVICE).keys() == held.keys
        assert rig.index.anomalies == 0
        held.remove(chain("39", 3))
        await rig.quiet()
        assert router.hashes(Tier.DEVICE) == hashes(frozenset(held.keys))


class HangingSink:
    """Hangs once, on the loop's thread, until it is let go."""

    def __init__(self) -> None:
        self.index = InventoryIndex()
        self.hangs, self.goes_on = threading.Event(), threading.Event()

    def publish(self, events: Sequence[InventoryEvent]) -> None:
        self.hangs.set()
        assert self.goes_on.wait(30)
        self.index.publish(events)


@pytest.mark.usefixtures("small_bounds")
@pytest.mark.timeout(60)
def test_an_engine_goes_on_beside_a_sink_that_hangs_and_every_sink_ends_right(real_backend: Any) -> None:
    hanging, healthy = HangingSink(), InventoryIndex()
    device = LoopDevice(LAYOUT, 8, BytesHostMemory(LAYOUT, 8))
    controller = CacheController(device=device, sinks=(hanging, healthy), loop=real_backend)
    with controller:
        held = Held(controller)
        try:
            held.store(chain("first", 3))
            assert hanging.hangs.wait(30)
            for number in range(200):
                held.store(chain(f"{number}", 3))
                held.remove(chain(f"{number - 1}" if number else "first", 3))
        finally:
            hanging.goes_on.set()
        controller.wait_quiet(30)
        assert controller.stats.events_dropped > 0
        for index in (hanging.index, healthy):
            assert index.holding(*DEVICE).keys() == held.keys == set(chain("199", 3))
            assert index.anomalies == 0


@virtual
async def test_a_sink_that_raised_is_told_all_it_missed_though_no_event_follows() -> None:
    router = Router()
    rig = Rig(sinks=(router,))
    async with rig.running():
        await churn(rig, "ab")
        rig.desk.publish([BlocksStored(Tier.DEVICE, chain("x", 2), (None, chain("x", 2)[0]))])
        rig.desk.flush_pending_backups()
        await rig.quiet()
        router.raises = True
        await churn(rig, "cd")
        rig.desk.publish([TierCleared(Tier.DEVICE)])
        rig.desk.flush_pending_backups()
        await rig.quiet()
        rig.check()  # the other sink missed nothing
        router.raises = False
        await anyio.sleep(120)
        assert_right(rig, router)
        assert router.hashes(Tier.DEVICE) == set()
        assert rig.assembly.describe()["actors"]["publisher"]["actor"]["snapshots"] == 1


@virtual
async def test_a_sink_that_goes_on_raising_is_tried_less_and_less_often() -> None:
    router = Router()
    rig = Rig(sinks=(router,))
    async with rig.running():
        router.raises = True
        for _ in range(1_000):
            rig.desk.publish([TierCleared(Tier.DEVICE)])
            rig.desk.flush_pending_backups()
            await anyio.sleep(1.0)
        assert 10 < len(router.tries) < 30
        await rig.quiet()  # nobody waits for it


class RunningRouter(Router, RunningEventSink):
    """Knows at its close what it would pass on."""

    async def open(self, services: Services) -> None:
        pass

    async def close(self, deadline_s: float) -> None:
        self.at_the_end = self.hashes(Tier.HOST)


@virtual
async def test_a_sink_that_raised_last_is_told_what_it_missed_before_it_closes() -> None:
    router = RunningRouter()
    rig = Rig(sinks=(router,))
    async with rig.running():
        router.raises = True
        await churn(rig, "ab")
        await rig.quiet()
        router.raises = False
    assert router.at_the_end == hashes(chain("b", 3))
    assert_right(rig, router)


async def test_a_tier_that_missed_nothing_is_not_told_anew(small_bounds: None) -> None:
    told: list[InventoryEvent] = []

    class Noting:
        def publish(self, events: Sequence[InventoryEvent]) -> None:
            told.extend(events)

    rig = Rig(sinks=(Noting(),))
    async with rig.running():
        await churn(rig, "a")
        await rig.quiet()
        told.clear()
        held = Held(rig.desk)
        for key in chain("x", 20):
            held.store([key])
        await rig.quiet()
        assert {event.tier for event in told} == {Tier.DEVICE}
        assert TierCleared(Tier.DEVICE) in told


async def test_what_comes_while_the_publisher_has_stopped_and_its_sinks_have_not_is_told() -> None:
    rig = Rig()
    async with rig.running():
        await rig.quiet()
        rig.assembly.inboxes.publisher.close()
        await rig.quiet()
        Held(rig.desk).store(chain("late", 2))
        await rig.back_up(rig.node(chain("a", 3)))
        await rig.quiet()
        assert not rig.index.keys(Tier.DEVICE)
    assert rig.index.keys(Tier.DEVICE) == set(chain("late", 2))
    rig.check()
    Held(rig.desk).store(chain("too late", 1))
    assert rig.stats.events_dropped == 1


async def test_a_host_that_cannot_be_poisoned_loses_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    async with rig.running():
        await rig.back_up(rig.node(chain("a", 3)))
        await rig.quiet()
        with monkeypatch.context() as patch:
            patch.setattr(BytesHostMemory, "poison", lambda *_: raise_now())
            with pytest.raises(PlantedError):
                rig.forget_host()
        await rig.quiet()
        rig.check()


async def test_all_that_a_detached_store_told_of_is_taken_back() -> None:
    own = chain("own", 1)

    class Caching(FaultyStore):
        """Has copies of its own in host memory, which no one takes from it one by one."""

        async def open(self, services: Services, host: HostMemory) -> None:
            await super().open(services, host)
            services.publish([BlocksStored(Tier.HOST, own, (None,), Ownership.STORE)])

    index = InventoryIndex()
    async with single(sinks=(index,), store=Caching(memory_backend(8))) as member:
        await member.back_up(member.node(1, chain("a", 3)))
        await member.controller.wait_quiet(60)
        assert index.residents(Tier.STORE) == set(chain("a", 3) + own)
        await member.controller.detach_store()
        await member.controller.wait_quiet(60)
        assert index.residents(Tier.STORE) == frozenset()
        assert index.residents(Tier.HOST) == set(chain("a", 3))
