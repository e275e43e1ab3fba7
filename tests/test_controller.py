"""The synchronous front door: a thread on asyncio or trio, and inline, over the loop device and store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcr_actors.config import ControllerConfig
from kvcr_actors.controller import CacheController
from kvcr_actors.core.inventory import BlocksStored
from kvcr_actors.errors import ActorEscalatedError, ConfigError, ControllerClosedError, DeadlineError, InvalidNodeError
from kvcr_actors.messages import (
    BackupAck,
    Completion,
    ControllerFailed,
    PrefetchCancelled,
    PrefetchReady,
    RestoreFinished,
)
from kvcr_actors.testing.faults import Fault, FaultPlan
from kvcr_actors.testing.host_memory import BytesHostMemory
from kvcr_actors.testing.invariants import check_answers, check_invariants
from kvcr_actors.testing.store_driver import chain
from kvcr_actors.types import BackupNode, MissReason, PrefetchRequest, RestoreOrder, SkipReason, Tier
from tests.doors import LAYOUT, Ports

WAIT_S = 30.0
DOORS: dict[str, dict[str, Any]] = {
    "thread on asyncio": {"host": "thread", "loop": "asyncio"},
    "thread on trio": {"host": "thread", "loop": "trio"},
    "inline": {"host": "inline"},
}


class Engine:
    """A scheduler loop in miniature: it gives orders, polls, and keeps what came."""

    def __init__(self, door: dict[str, Any], config: ControllerConfig | None = None, **ports: Any) -> None:
        self.ports = Ports(**ports)
        self.controller = CacheController(config, **door, **self.ports.arguments)
        self.completions: list[Completion] = []
        self.unread: list[Completion] = []

    def await_one(self, matches: Callable[[Completion], bool]) -> Completion:
        while True:
            # Several may come at once: what nobody asked for yet is kept for the next call.
            new = self.controller.take()
            self.completions += new
            self.unread += new
            for completion in self.unread:
                if matches(completion):
                    self.unread.remove(completion)
                    return completion
            assert self.controller.wait(WAIT_S), f"nothing came but {self.completions}"

    def back_up(self, *nodes: BackupNode) -> BackupAck:
        for node in nodes:
            self.controller.write(node, flush=False)
        step = self.controller.flush_pending_backups()
        self.ports.orders.step(step, nodes)
        ack = self.await_one(lambda one: isinstance(one, BackupAck) and one.step == step)
        assert isinstance(ack, BackupAck)
        return ack

    def prefetch(self, request_id: str, keys: Any) -> Completion:
        request = PrefetchRequest(request_id, tuple(keys))
        self.ports.orders.prefetch(request)
        self.controller.prefetch(request)
        self.controller.flush_pending_backups()
        return self.await_one(lambda one: isinstance(one, PrefetchReady | PrefetchCancelled))

    def check(self, **options: Any) -> None:
        self.completions += self.controller.take()
        check_invariants(self.controller, self.ports.orders, self.completions, index=self.ports.index, **options)


@pytest.fixture(params=DOORS.values(), ids=DOORS.keys())
def door(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


def test_a_node_goes_through_all_tiers_and_comes_back(door: dict[str, Any]) -> None:
    engine, keys = Engine(door), chain("a", 4)
    with engine.controller as controller:
        assert not engine.back_up(engine.ports.node(keys[:2]), engine.ports.node(keys[2:], keys[1])).failed
        controller.wait_quiet(WAIT_S)
        assert controller.host_contents() == set(keys)
        assert engine.ports.store is not None
        assert engine.ports.store.contents() == set(keys)
        ready = engine.prefetch("r", keys)
        assert isinstance(ready, PrefetchReady)
        assert ready.pages == 4
        order = engine.ports.restore("r", 4)
        controller.restore(order)
        assert controller.flush_pending_backups() is None
        engine.await_one(lambda one: isinstance(one, RestoreFinished))
        engine.ports.assert_bytes(order, keys)
        assert controller.describe()["claims"]["open"] == []
    engine.check()
    assert controller.claims.taken == controller.claims.released > 0
    assert not controller.wait(0)
    assert controller.describe()["actors"]["backup"]["state"] == "stopped"
    assert controller.host_contents() == set(keys)


def test_an_empty_flush_does_nothing(door: dict[str, Any]) -> None:
    engine = Engine(door)
    rung: list[None] = []
    engine.controller._desk._ring = lambda: rung.append(None)
    with engine.controller as controller:
        assert controller.flush_pending_backups(fence=object()) is None
        assert not rung
        assert controller.take() == []
        assert controller.write_back([]) == BackupAck(0, ())
    engine.check()
    assert engine.ports.device.submits == 0


def test_without_a_host_tier_nodes_fail_by_name_and_prefetches_find_nothing(door: dict[str, Any]) -> None:
    class NoHostMemory(BytesHostMemory):
        __slots__ = ()

        def __init__(self) -> None:
            super().__init__(LAYOUT, 1)
            self.slots = 0

    engine = Engine(door, store_pages=8)
    engine.controller.close()
    engine.ports.device.host = NoHostMemory()
    engine.controller = CacheController(**door, **engine.ports.arguments)
    with engine.controller as controller:
        node, other = engine.ports.node(chain("a", 2)), engine.ports.node(chain("b", 1))
        assert engine.back_up(node) == BackupAck(1, (), ((node.node_id, SkipReason.TIER_OFF),))
        engine.ports.orders.step(2, [other])
        ack = controller.write_back([other], timeout_s=WAIT_S)
        assert ack == BackupAck(2, (), ((other.node_id, SkipReason.TIER_OFF),))
        engine.completions.append(ack)
        ready = engine.prefetch("r", chain("a", 2))
        assert isinstance(ready, PrefetchReady)
        assert ready.account is not None
        assert ready.account.reasons == {MissReason.TIER_OFF: 2}
    engine.check()


def test_wrong_pools_are_refused_by_name_before_anything_changes(door: dict[str, Any]) -> None:
    engine, keys = Engine(door), chain("a", 1)
    with engine.controller as controller:
        good, bad = engine.ports.node(keys), BackupNode(7, keys, ((0,),))
        with pytest.raises(InvalidNodeError, match="node 7 lists 1 pools; the layout has 2"):
            controller.write(bad)
        with pytest.raises(InvalidNodeError, match="node 7"):
            controller.write_back([good, bad])
        assert controller.flush_pending_backups() is None  # the good one was not queued either
        with pytest.raises(InvalidNodeError, match="restore of r lists 1 pools"):
            controller.restore(type(engine.ports.restore("r", 1))("r", 0, ((0,),)))
        engine.ports.orders.restores.clear()
        assert controller.flush_pending_backups() is None
    engine.check()
    assert engine.ports.device.submits == 0


def test_write_back_flushes_what_is_queued_first_and_sets_other_completions_aside(door: dict[str, Any]) -> None:
    engine = Engine(door)
    with engine.controller as controller:
        queued, last = engine.ports.node(chain("a", 1)), engine.ports.node(chain("b", 1))
        controller.write(queued, flush=False)
        ack = controller.write_back([last], timeout_s=WAIT_S)
        assert ack == BackupAck(2, (last.node_id,))
        engine.ports.orders.step(1, [queued])
        engine.ports.orders.step(2, [last])
        engine.completions.append(ack)
        assert controller.wait(WAIT_S)
        engine.completions += controller.take()
        assert engine.completions[1:] == [BackupAck(1, (queued.node_id,))]
    engine.check()


def test_write_back_has_a_deadline_that_names_the_step(door: dict[str, Any]) -> None:
    config = ControllerConfig(copy_deadline_s=0.2, drain_budget_s=0.2)
    engine = Engine(door, config)
    engine.ports.device.faults = FaultPlan.always(Fault.STALL)
    controller = engine.controller.start()
    node = engine.ports.node(chain("a", 1))
    with pytest.raises(DeadlineError, match="step 1 was not acknowledged"):
        controller.write_back([node], timeout_s=0.01)
    engine.ports.orders.step(1, [node])
    ack = engine.await_one(lambda one: isinstance(one, BackupAck))
    assert isinstance(ack, BackupAck)
    assert ack.failed == ((node.node_id, SkipReason.COPY_FAILED),)
    with pytest.raises(DeadlineError, match=r"1 copies still ran.*in use for backup of 1"):
        controller.close()
    engine.check(quiet=False)


def test_the_engines_events_are_published_in_order(door: dict[str, Any]) -> None:
    engine = Engine(door)
    with engine.controller as controller:
        controller.publish([BlocksStored(Tier.DEVICE, chain("a", 2), (None, chain("a", 1)[0]))])
        controller.flush_pending_backups()
        controller.wait_quiet(WAIT_S)
        assert engine.ports.index.keys(Tier.DEVICE) == set(chain("a", 2))


def test_an_actor_that_escalates_fails_the_controller_with_every_order_answered(door: dict[str, Any]) -> None:
    engine, keys = Engine(door, ControllerConfig(restarts=0)), chain("a", 2)
    controller = engine.controller.start()

    def raising(*args: object) -> Any:
        raise RuntimeError("planted")

    engine.back_up(engine.ports.node(keys))
    controller.wait_quiet(WAIT_S)
    ready = engine.prefetch("held", keys)
    assert isinstance(ready, PrefetchReady)
    assert ready.account is None
    engine.ports.device.submit = raising  # type: ignore[method-assign]
    nodes = [engine.ports.node(chain(name, 1)) for name in "bc"]
    for node in nodes:
        controller.write(node, flush=False)
    engine.ports.orders.step(controller.flush_pending_backups(), nodes)
    failed = engine.await_one(lambda one: isinstance(one, ControllerFailed))
    assert isinstance(failed, ControllerFailed)
    assert "actor backup failed 1 times" in failed.error
    assert "planted" in failed.error
    with pytest.raises(ActorEscalatedError, match="planted"):
        controller.close(WAIT_S)
    controller.close(WAIT_S)
    engine.check()
    kinds = [type(one) for one in engine.completions]
    assert kinds[-1] is ControllerFailed
    assert kinds.count(ControllerFailed) == 1
    # A failed controller still answers, at the desk.
    late = engine.ports.node(chain("d", 1))
    assert engine.back_up(late).failed == ((late.node_id, SkipReason.STOPPED),)


def test_what_keeps_a_controller_from_starting_is_raised_by_start(door: dict[str, Any]) -> None:
    engine = Engine(door)

    async def raising(*args: object) -> None:
        raise OSError("no such folder")

    assert engine.ports.store is not None
    engine.ports.store.open = raising  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no such folder"):
        engine.controller.start(WAIT_S)
    engine.controller.close(WAIT_S)


def test_questions_to_a_controller_that_does_not_run_say_so(door: dict[str, Any]) -> None:
    engine = Engine(door)
    with pytest.raises(ControllerClosedError, match="start it first"):
        engine.controller.wait_quiet(WAIT_S)
    assert not engine.controller.wait(0.01)
    assert engine.controller.describe()["actors"] == {}
    with engine.controller:
        pass
    with pytest.raises(ControllerClosedError):
        engine.controller.wait_quiet(WAIT_S)
    assert not engine.controller.wait(0.01)


def test_full_inboxes_refuse_at_the_desk_and_each_order_is_answered_once(door: dict[str, Any]) -> None:
    engine = Engine(door, ControllerConfig(inbox_limit=1), host_slots=256, store_pages=None)
    requests = 100
    with engine.controller as controller:
        for number in range(requests):
            node = engine.ports.node(chain(f"{number}", 1))
            controller.write(node, flush=False)
            request = PrefetchRequest(number, chain("absent", 2))
            controller.prefetch(request)
            engine.ports.orders.prefetch(request)
            engine.ports.orders.step(controller.flush_pending_backups(), [node])
        controller.wait_quiet(WAIT_S)
    engine.check()
    assert engine.controller.stats.backup.skipped.total() < requests
    if door["host"] == "inline":  # nothing moved in between
        assert engine.controller.stats.backup.skipped == {SkipReason.QUEUE_FULL: requests - 1}
        assert engine.controller.stats.reasons == {MissReason.QUEUE_FULL: 2 * (requests - 1), MissReason.ABSENT: 2}


def test_inline_actors_move_only_when_they_are_pumped() -> None:
    engine = Engine(DOORS["inline"])
    with engine.controller as controller:
        controller.write(node := engine.ports.node(chain("a", 1)))
        engine.ports.orders.step(1, [node])
        assert controller.take() == []
        assert not len(controller._assembly.outbox)
        while not (got := controller.take()):
            controller.pump()
        engine.completions += got
    engine.check()


def test_pumping_a_threaded_controller_and_unknown_hosts_are_refused() -> None:
    engine = Engine(DOORS["thread on asyncio"])
    with pytest.raises(ConfigError, match="host='inline'"):
        engine.controller.pump()
    with pytest.raises(ConfigError, match="choose 'thread' or 'inline'"):
        CacheController(host="fiber", **engine.ports.arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="asyncio only"):
        CacheController(host="inline", loop="trio", **engine.ports.arguments)


def test_orders_of_the_last_step_are_answered_by_the_close(door: dict[str, Any]) -> None:
    engine, keys = Engine(door), chain("a", 3)
    with engine.controller as controller:
        node = engine.ports.node(keys)
        controller.write(node, flush=False)
        request = PrefetchRequest("r", keys)
        controller.prefetch(request)
        engine.ports.orders.prefetch(request)
        engine.ports.orders.step(controller.flush_pending_backups(), [node])
    engine.check()
    check_answers(engine.ports.orders, engine.completions)
    assert engine.ports.store is not None
    assert engine.ports.store.contents() == set(keys)


def test_a_page_beyond_the_device_fails_its_own_node_and_restore_and_no_other(door: dict[str, Any]) -> None:
    engine, keys, others = Engine(door), chain("a", 2), chain("b", 2)
    with engine.controller as controller:
        good, far = engine.ports.node(keys), BackupNode(9, others, ((1, 2), (3, 512)))
        ack = engine.back_up(good, far)
        assert (ack.node_ids, ack.failed) == ((good.node_id,), ((9, SkipReason.COPY_FAILED),))
        engine.prefetch("r", keys)
        engine.prefetch("s", keys)
        right, wrong = engine.ports.restore("r", 2), RestoreOrder("s", 0, ((1, 512), (3, 4)))
        engine.ports.orders.restore(wrong)
        controller.restore(right)
        controller.restore(wrong)
        controller.flush_pending_backups()
        ends = [engine.await_one(lambda one: isinstance(one, RestoreFinished)) for _ in range(2)]
        assert {(one.request_id, one.pages) for one in ends if isinstance(one, RestoreFinished)} == {("r", 2), ("s", 0)}
        engine.ports.assert_bytes(right, keys)
    engine.check()


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), None])
def test_a_wait_without_an_end_is_refused_before_anything_is_asked(door: dict[str, Any], seconds: Any) -> None:
    engine = Engine(door)
    with pytest.raises(ConfigError, match="timeout_s"):
        engine.controller.start(seconds)
    with engine.controller as controller:
        node = engine.ports.node(chain("a", 1))
        for wait in (
            controller.wait,
            controller.wait_quiet,
            controller.wait_restores_submitted,
            controller.clear_host,
            controller.describe,
            lambda one: controller.write_back([node], timeout_s=one),
        ):
            with pytest.raises(ConfigError, match="timeout_s"):
                wait(seconds)
        assert controller.flush_pending_backups() is None
    engine.check()
