"""Each protection is taken away in turn, and the invariants or the bytes must break: these tests can fail."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import anyio
import pytest

from kvcr_actors.actors import deposit as deposit_actor
from kvcr_actors.actors.confirmation import ConfirmationActor
from kvcr_actors.actors.deposit import DepositActor
from kvcr_actors.actors.filling import Filling
from kvcr_actors.actors.following import SearchFollower
from kvcr_actors.actors.prefetch import PrefetchActor
from kvcr_actors.actors.ready_prefixes import ReadyPrefixes
from kvcr_actors.actors.restore import RestoreActor
from kvcr_actors.actors.state import LoopState
from kvcr_actors.core.prefetch_state import HeldPrefix
from kvcr_actors.messages import DepositPages
from kvcr_actors.ports import BatchOutcome, PageOutcome
from kvcr_actors.testing.devices import LoopDevice
from kvcr_actors.testing.faults import Fault, FaultPlan
from kvcr_actors.testing.virtual_time import run_virtual
from kvcr_actors.types import PrefetchRequest
from tests.actors.rig import POOLS, Rig, chain, page_bytes
from tests.actors.test_interrupted import fail, give_up, one_life
from tests.actors.test_restart import plant
from tests.planting import Plant, Planter, assert_broken, failures_of, planted

Scenario = Callable[[], Awaitable[None]]


# What is run: each of these holds while every protection is in place.


async def every_await_of_the_confirmation() -> None:
    k = 1
    while await one_life("confirmation", k, give_up):
        k += 1


async def every_await_of_the_deposit() -> None:
    k = 1
    while await one_life("deposit", k, fail):
        k += 1


async def every_await_of_the_prefetch() -> None:
    k = 1
    while await one_life("prefetch", k, fail):
        k += 1


async def every_await_of_the_restore() -> None:
    k = 1
    while await one_life("restore", k, fail):
        k += 1


async def a_late_copy_beside_a_prefetch() -> None:
    """The late copy writes at its end: what others put into its slots meanwhile would be lost."""
    rig = Rig(host_slots=4, device_faults=FaultPlan({("to_host", 1): Fault.LATE}), late_s=30.0)
    keys = chain("mine", 2)
    async with rig.running():
        await rig.stored(keys)
        await rig.back_up(rig.node(chain("late", 4)))
        ready = await rig.prefetched("r", keys)
        await rig.ports_quiet()
        if ready.account is None:
            ids = rig.give_restore("r", 2)
            assert await rig.reply("r") is not None
            rig.assert_bytes(ids, keys)
    rig.check()


async def a_late_read_beside_a_backup() -> None:
    rig = Rig(host_slots=3, late_s=30.0)
    keys = chain("mine", 2)
    async with rig.running():
        await rig.stored(chain("late", 2))
        assert rig.store is not None
        rig.store.faults = FaultPlan({("read", 0): Fault.LATE})
        await rig.prefetched("late", chain("late", 2))
        await rig.back_up(rig.node(keys))
        await rig.ports_quiet()
        if rig.assembly.host.contents() >= set(keys):
            await rig.restored("r", keys)
    rig.check()


async def a_stalled_write_beside_evictions() -> None:
    """The store must not get the bytes of another page under its key."""
    rig = Rig(host_slots=4, store_faults=FaultPlan({("write", 0): Fault.STALL}))
    keys = chain("stalled", 2)
    async with rig.running():
        await rig.back_up(rig.node(keys))
        await rig.quiet()
        rig.forget_host()
        await rig.back_up(rig.node(chain("b", 2)), rig.node(chain("c", 2)))
        await rig.quiet()
        assert rig.store is not None
        rig.store.release()
        await rig.ports_quiet()
        rig.forget_host()
        await rig.restored("r", keys)
    rig.check()


async def an_open_restore_beside_evictions() -> None:
    rig = Rig(host_slots=4, store_pages=None)
    keys = chain("a", 3)
    async with rig.running():
        await rig.back_up(rig.node(keys))
        await rig.prefetched("r", keys)
        fence = anyio.Event()
        ids = rig.give_restore("r", 3, fence=fence)
        await anyio.sleep(0.01)
        rig.forget_host()
        await rig.back_up(rig.node(chain("b", 3)))
        fence.set()
        assert await rig.reply("r") is not None
        rig.assert_bytes(ids, keys)
    rig.check()


async def a_prefix_held_beside_evictions() -> None:
    rig = Rig(host_slots=4, store_pages=None)
    keys = chain("a", 3)
    async with rig.running():
        await rig.back_up(rig.node(keys))
        await rig.prefetched("r", keys)
        rig.forget_host()
        await rig.back_up(rig.node(chain("b", 3)))
        ids = rig.give_restore("r", 3)
        assert await rig.reply("r") is not None
        rig.assert_bytes(ids, keys)
    rig.check()


async def a_kernel_that_writes_behind_the_fence() -> None:
    rig = Rig(store_pages=None)
    keys = chain("a", 3)
    async with rig.running():
        fence, node = anyio.Event(), rig.node(keys)
        for pool in POOLS:
            rig.device.poison(pool, node.pages[pool])
        step = rig.give_step(node, fence=fence)
        await anyio.sleep(0.1)
        for pool in POOLS:
            rig.device.load(pool, node.pages[pool], b"".join(page_bytes(key, pool) for key in keys))
        fence.set()
        await rig.ack(step)
        await rig.restored("r", keys)
    rig.check()


async def a_page_that_fails_and_its_child() -> None:
    rig = Rig(store_faults=FaultPlan({("write", n): Fault.CORRUPT for n in range(2)}), deposit_retries=1)
    keys = chain("a", 3)
    async with rig.running():
        await rig.back_up(rig.node(keys[:2]))
        await rig.quiet()
        await rig.back_up(rig.node(keys[2:], keys[1]))
        await rig.quiet()
        assert rig.store is not None
        assert rig.store.contents() == set(keys), "the store lacks pages"
    rig.check()


async def a_prefix_that_nobody_takes_over_a_restart() -> None:
    rig = Rig()
    keys = chain("a", 2)
    async with rig.running():
        await rig.back_up(rig.node(keys))
        await rig.prefetched("r", keys)
        await rig.crash("prefetch")
        await anyio.sleep(rig.config.claim_lifetime_s + 1)
        rig.check()


async def a_restart_in_the_middle_of_a_batch() -> None:
    rig = Rig(store_latency_s=0.01)
    stored = chain("stored", 2)
    async with rig.running():
        await rig.stored(stored)
        plant(rig, "touch", 1)
        for request_id in ("reads", "breaks"):
            rig.orders.prefetch(request := PrefetchRequest(request_id, stored))
            rig.desk.prefetch(request)
        rig.desk.flush_pending_backups()
        await anyio.sleep(5)
        await rig.ports_quiet()
    rig.check()


# What is taken away.


def release_at_once(patch: Planter) -> None:
    patch.setattr(LoopState, "release_when_quiet", lambda state, operation, claim, size: claim.release())


def abandon_failed_nodes_at_once(patch: Planter) -> None:
    settle = ConfirmationActor._settle

    def hasty(actor: ConfirmationActor, started: Any, outcome: Any, good: int, agreed: int) -> None:
        for node in started.staged:
            if not good & agreed >> node.position & 1:
                actor._state.abandon_unfilled(node.pages)
        settle(actor, started, outcome, good, agreed)

    patch.setattr(ConfirmationActor, "_settle", hasty)


def no_give_up_of_copies(patch: Planter) -> None:
    patch.setattr(ConfirmationActor, "_give_up", lambda *args, **options: None)


def no_give_up_of_deposits(patch: Planter) -> None:
    patch.setattr(DepositActor, "_give_up", lambda *args: None)


def no_end_of_searches(patch: Planter) -> None:
    """A search ends when it has come to its end, not when its actor does."""
    conclude = SearchFollower._conclude

    def only_in_order(follower: SearchFollower, search: Any, *, goes_on: bool) -> None:
        if goes_on:
            conclude(follower, search, goes_on=goes_on)

    patch.setattr(SearchFollower, "_conclude", only_in_order)


def no_give_back_of_reads(patch: Planter) -> None:
    patch.setattr(Filling, "_give_back", lambda *args: None)


def no_settling_of_restores(patch: Planter) -> None:
    settle = RestoreActor._settle

    def forgetful(actor: RestoreActor, copy: Any, taken: Any, outcome: Any) -> None:
        if outcome is not None:
            settle(actor, copy, taken, outcome)

    patch.setattr(RestoreActor, "_settle", forgetful)


def no_pin_on_prefixes(patch: Planter) -> None:
    def extend(prefix: HeldPrefix, pages: Sequence[Any]) -> None:
        prefix.pages.extend(pages)
        if pages and prefix._claim is None:
            prefix._claim = prefix.ledger.take("prefetch", prefix.request.request_id, lambda: None)

    patch.setattr(HeldPrefix, "extend", extend)


def no_pin_on_deposits(patch: Planter) -> None:
    def deposit(actor: ConfirmationActor, step: int, ready: Sequence[Any], tails: Sequence[Any]) -> None:
        claim = actor._state.ledger.take("deposit", step, lambda: None)
        actor._state.inboxes.deposit.tell(DepositPages(list(ready), claim))

    patch.setattr(ConfirmationActor, "_deposit", deposit)


def restores_release_at_the_submit(patch: Planter) -> None:
    follow = RestoreActor._follow

    async def hasty(actor: RestoreActor, copy: Any, taken: Sequence[Any]) -> None:
        for one in taken:
            one.prefix.claim.release()
            one.prefix._claim = None
        await follow(actor, copy, taken)

    patch.setattr(RestoreActor, "_follow", hasty)


def the_fence_is_ignored(patch: Planter) -> None:
    submit = LoopDevice.submit
    patch.setattr(LoopDevice, "submit", lambda device, plan, fences=(): submit(device, plan))


def a_child_counts_as_stored_without_its_parent(patch: Planter) -> None:
    def note(actor: DepositActor, pages: Sequence[Any], outcome: BatchOutcome, store: object, done: set[Any]) -> None:
        for page, result in zip(pages, outcome.pages, strict=True):
            if result is PageOutcome.OK:
                page.stored = True
                done.add(page)

    def missing(pages: Sequence[Any]) -> list[Any]:
        result: list[Any] = []
        for page in pages:
            step, path = page, []
            while step is not None and not step.stored and step not in result:
                path.append(step)
                step = step.parent
            result += reversed(path)
        return result

    patch.setattr(DepositActor, "_note", note)
    patch.setattr(deposit_actor, "_with_missing_parents", missing)


def no_expiry_after_a_restart(patch: Planter) -> None:
    watch = ReadyPrefixes._watch_expiry

    def only_later(ready: ReadyPrefixes) -> None:
        if hasattr(ready, "_awake"):
            watch(ready)
        ready._awake = True  # type: ignore[attr-defined]

    patch.setattr(ReadyPrefixes, "_watch_expiry", only_later)


def abandoned_batches_are_answered_again(patch: Planter) -> None:
    abandon = PrefetchActor.abandon

    def forgetful(actor: PrefetchActor, batch: Any, error: BaseException) -> None:
        actor._begun = 0
        abandon(actor, batch, error)

    patch.setattr(PrefetchActor, "abandon", forgetful)


WRONG_BYTES = "AssertionError: wrong bytes in pool"
LEFT_OPEN = "AssertionError: claims left open though all is quiet: .*kind='{}'"
BACKUP_OPEN, DEPOSIT_OPEN, PREFETCH_OPEN = map(LEFT_OPEN.format, ("backup", "deposit", "prefetch"))
STILL_FILLING = "AssertionError: [0-9]+ host pages are still filling"
NO_ANSWER = "AssertionError: no answer within"
ANSWERED_TWICE = r"AssertionError: requests answered twice \['reads'\]"
NOT_STORED = "AssertionError: the store lacks pages"
"""What breaks, by its words."""

PROTECTIONS: list[tuple[Plant, Scenario, str]] = [
    (release_at_once, a_late_copy_beside_a_prefetch, WRONG_BYTES),
    (release_at_once, a_late_read_beside_a_backup, WRONG_BYTES),
    (release_at_once, a_stalled_write_beside_evictions, WRONG_BYTES),
    (abandon_failed_nodes_at_once, a_late_copy_beside_a_prefetch, WRONG_BYTES),
    (no_give_up_of_copies, every_await_of_the_confirmation, BACKUP_OPEN),
    (no_give_up_of_deposits, every_await_of_the_deposit, DEPOSIT_OPEN),
    (no_end_of_searches, every_await_of_the_prefetch, NO_ANSWER),
    (no_give_back_of_reads, every_await_of_the_prefetch, STILL_FILLING),
    (no_settling_of_restores, every_await_of_the_restore, PREFETCH_OPEN),
    (no_pin_on_prefixes, a_prefix_held_beside_evictions, WRONG_BYTES),
    (no_pin_on_deposits, a_stalled_write_beside_evictions, WRONG_BYTES),
    (restores_release_at_the_submit, an_open_restore_beside_evictions, WRONG_BYTES),
    (the_fence_is_ignored, a_kernel_that_writes_behind_the_fence, WRONG_BYTES),
    (a_child_counts_as_stored_without_its_parent, a_page_that_fails_and_its_child, NOT_STORED),
    (no_expiry_after_a_restart, a_prefix_that_nobody_takes_over_a_restart, PREFETCH_OPEN),
    (abandoned_batches_are_answered_again, a_restart_in_the_middle_of_a_batch, ANSWERED_TWICE),
]


def assert_breaks(remove: Plant, scenario: Scenario, rule: str) -> None:
    """Without the protection the scenario fails, in the words of the rule."""
    with planted(remove) as planter:
        failures = failures_of(partial(run_virtual, scenario))
    assert_broken(planter, rule, failures)


@pytest.mark.parametrize(
    ("remove", "scenario", "rule"),
    PROTECTIONS,
    ids=[f"{remove.__name__}-{scenario.__name__}" for remove, scenario, _ in PROTECTIONS],
)
def test_without_its_protection_a_scenario_breaks(remove: Plant, scenario: Scenario, rule: str) -> None:
    run_virtual(scenario)
    assert_breaks(remove, scenario, rule)
