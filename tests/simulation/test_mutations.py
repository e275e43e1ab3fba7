"""Faults planted in the product: the simulator finds each of them within a few seeds, by the rule that it breaks."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import attrs
import pytest

from kvcr_actors.actors import deposit, filling, staging
from kvcr_actors.actors.accord import Accord
from kvcr_actors.actors.confirmation import ConfirmationActor
from kvcr_actors.actors.prefetch import PrefetchActor
from kvcr_actors.actors.restore import RestoreActor
from kvcr_actors.actors.state import LoopState
from kvcr_actors.core import prefetch_state
from kvcr_actors.core.host_tier import HostTier
from kvcr_actors.core.prefetch_state import HeldPrefix
from kvcr_actors.desk import EngineDesk
from kvcr_actors.simulation.faults import parse_kinds
from kvcr_actors.simulation.run import run_seed
from kvcr_actors.simulation.world import SimulationOptions
from kvcr_actors.testing.devices import LoopDevice
from kvcr_actors.testing.ranks import LoopRanks
from tests.planting import Plant, Planter, assert_broken, planted


def a_cancelled_prefix_keeps_its_claim(patch: Planter) -> None:
    """A claim not released on one path: where a ready prefix is cancelled."""

    def cancel(self: Any, request_id: Any, answers: Any, reason: Any = None) -> None:
        prefix = self._state.prefixes.get(request_id)
        if prefix is not None:
            prefix._claim, prefix._pinned = None, None
        real(self, request_id, answers, *(() if reason is None else (reason,)))

    real = PrefetchActor._cancel
    patch.setattr(PrefetchActor, "_cancel", cancel)


def memory_is_freed_before_it_is_quiet(patch: Planter) -> None:
    """An early free: a claim ends with its operation's outcome, whatever native code still does."""
    patch.setattr(LoopState, "release_when_quiet", lambda self, operation, claim, size: claim.release())


def a_restore_releases_its_prefix_at_the_launch(patch: Planter) -> None:
    """An early free on the other way: the source of a restore is not protected while it is read."""

    def take(self: Any, order: Any, taken: Any) -> None:
        real(self, order, taken)
        for one in taken:
            one.prefix._unpin()

    real = RestoreActor._take
    patch.setattr(RestoreActor, "_take", take)


def the_fence_is_forgotten(patch: Planter) -> None:
    """A missing fence: copies do not wait for the kernels of their step."""
    real = EngineDesk.flush_pending_backups
    patch.setattr(EngineDesk, "flush_pending_backups", lambda self, fence=None: real(self, None))


def the_restore_fence_is_forgotten(patch: Planter) -> None:
    """A missing fence on the way to the device only."""
    real = LoopDevice.submit

    def submit(self: Any, plan: Any, fences: Any = ()) -> Any:
        return real(self, plan, () if plan.direction.value == "to_device" else fences)

    patch.setattr(LoopDevice, "submit", submit)


def a_rank_joins_only_with_something_to_say(patch: Planter) -> None:
    """A conditional collective: a rank that has nothing of an operation does not open it."""
    patch.setattr(LoopState, "join_without", lambda self, operation: None)


def a_search_that_leaves_says_nothing(patch: Planter) -> None:
    """A conditional collective: a cancelled search makes no more agreements."""
    patch.setattr(Accord, "leave", lambda self: None)


def ranks_agree_on_how_many(patch: Planter) -> None:
    """A count instead of ids: every rank commits its first n good nodes."""

    def propose(self: Any, operation: Any, bits: int) -> Any:
        return real(self, operation, (1 << bits.bit_count()) - 1 if operation[0] == "backup" else bits)

    def settle(self: Any, started: Any, outcome: Any, good: int, agreed: int) -> None:
        chosen, rest = 0, good
        for _ in range(agreed.bit_count()):
            chosen |= rest & -rest
            rest &= rest - 1
        real_settle(self, started, outcome, good, chosen)

    real, real_settle = LoopRanks.propose, ConfirmationActor._settle
    patch.setattr(LoopRanks, "propose", propose)
    patch.setattr(ConfirmationActor, "_settle", settle)


def a_late_read_revives_its_request(patch: Planter) -> None:
    """A late completion that revives: what lands after the end is added to the request's prefix."""

    def give_back(self: Any) -> None:
        prefix, pages = self._prefix, self._pages
        if prefix.phase.value == "ended":
            prefix._claim = prefix._pinned = None
            prefix.extend(pages[:1] if pages[0].ready else [])
        real(self)
        if prefix.phase.value == "ended":
            prefix._claim = prefix._pinned = None
            prefix.extend([page for page in pages if page.ready][:1])

    real = filling.Filling._give_back
    patch.setattr(filling.Filling, "_give_back", give_back)


def a_prefix_is_released_twice(patch: Planter) -> None:
    """A double release: at the end of a request, by two of its holders."""

    def end(self: Any) -> None:
        claim = self._claim
        real(self)
        if claim is not None:
            with contextlib.suppress(Exception):
                claim.release()

    real = HeldPrefix.end
    patch.setattr(HeldPrefix, "end", end)


def pages_are_announced_when_reserved(patch: Planter) -> None:
    """An event before the commit."""

    def reserve_all(self: Any, paths: Any) -> Any:
        reserved = real(self, paths)
        for pages in reserved:
            self._record_stored(pages)
        return reserved

    def commit(self: Any, pages: Any) -> Any:
        changes = list(self._changes)
        ready = real_commit(self, pages)
        self._changes[:] = changes
        return ready

    real, real_commit = HostTier.reserve_all, HostTier.commit
    patch.setattr(HostTier, "reserve_all", reserve_all)
    patch.setattr(HostTier, "commit", commit)


def a_child_is_deposited_without_its_parent(patch: Planter) -> None:
    """A parent skipped: pages go to the store whose parents are not there."""
    patch.setattr(deposit, "_with_missing_parents", list)
    patch.setattr(deposit, "_whose_parents_are_stored_or_in", list)


def a_node_is_committed_without_its_parent(patch: Planter) -> None:
    """A parent skipped: in host memory, where a node is good whatever it hangs from."""

    async def good(self: Any, started: Any, outcome: Any, pinned: Any) -> int:
        await real(self, started, outcome, pinned)
        return sum(1 << node.position for node in started.staged)

    real = ConfirmationActor._good
    patch.setattr(ConfirmationActor, "_good", good)


def a_failed_read_is_tried_for_ever(patch: Planter) -> None:
    """A retry without a bound."""
    patch.setattr(filling, "_TRIES", 1 << 30)


def a_child_outlives_the_node_that_it_hangs_from(patch: Planter) -> None:
    """A parent skipped: a node is committed though the ranks gave up the node of its step that has its parent."""
    real = staging._needs
    patch.setattr(staging, "_needs", lambda *args: [0] * len(real(*args)))


def a_stopped_search_mistakes_the_agreement(patch: Planter) -> None:
    """A conditional collective: a search that is stopped early takes the next agreement for the last one."""
    patch.setattr(Accord, "is_at_last", property(lambda self: True))


def a_restore_in_part_asks_no_policy(patch: Planter) -> None:
    """A partial answer that is wrong: pages are told whose window was never copied."""
    patch.setattr(HeldPrefix, "restore_end", lambda self, order, layout: order.first + order.count)


def a_restore_asks_the_policies_of_the_host_alone(patch: Planter) -> None:
    """A partial answer that is wrong: pages are told for which the engine named no device page."""
    real = prefetch_state.component_masks
    patch.setattr(prefetch_state, "component_masks", lambda components: [0b111] * len(real(components)))


def a_restore_may_leave_a_hole(patch: Planter) -> None:
    """A partial answer that is wrong: a restore that begins beyond what the device has counts from the root."""
    patch.setattr(HeldPrefix, "fits", lambda self, order: order.first + order.count <= len(self.pages))
    patch.setattr(HeldPrefix, "own_pages", lambda self, order: order.first)


def a_restore_that_begins_early_is_accounted_for_as_before(patch: Planter) -> None:
    """Pages that vanish from the account: those that the device had at the look-up, and has no more."""

    def own_pages(self: Any, order: Any) -> int:
        return max(real(self, order), min(self.request.device_pages, len(self.pages)))

    real = HeldPrefix.own_pages
    patch.setattr(HeldPrefix, "own_pages", own_pages)


LEFT_OPEN = "AssertionError: claims left open though all is quiet"
RELEASED = "AssertionError: claims: [0-9]+ uses after the release"
WRONG_BYTES = "AssertionError: wrong bytes (restored for request|in host memory|written to the store)"
OPENED_UNLIKE = r"ViolationError: \(.*\) was not opened alike on every rank"
KEPT_UNLIKE = "ViolationError: node [0-9]+: backed up on some ranks only"
EVENTS = "AssertionError: ([0-9]+ events stored a key twice|host: the events tell of [1-9][0-9]* pages too many)"
READ_TOO_OFTEN = "AssertionError: request [0-9]+: page [0-9a-f]+ was read [3-9] times"
STILL_FILLING = "AssertionError: [0-9]+ host pages are still filling"
NO_DEVICE_PAGE = "ViolationError: .*: restored up to [0-9]+, and page [0-9]+ has no device page in pools [01]+"
BEYOND_ORDER = "ViolationError: .*: restored up to [0-9]+, between [0-9]+ on the device and [0-9]+ that were ordered"
NOT_ACCOUNTED = "ViolationError: .*: restored .* count as asked for and [0-9]+ as used"
ORPHAN = "AssertionError: .*parent"
"""Rules of the simulator, by the words that a broken one is told in."""


@attrs.frozen
class Found:
    """The rule that a planted fault breaks, seeds of which one shows it, and what fails meanwhile."""

    rule: str
    seeds: range = range(10)
    faults: str = "all"


MUTATIONS: dict[Plant, Found] = {
    a_cancelled_prefix_keeps_its_claim: Found(LEFT_OPEN),
    memory_is_freed_before_it_is_quiet: Found(WRONG_BYTES),
    a_restore_releases_its_prefix_at_the_launch: Found(WRONG_BYTES),
    the_fence_is_forgotten: Found(WRONG_BYTES),
    the_restore_fence_is_forgotten: Found(WRONG_BYTES),
    a_rank_joins_only_with_something_to_say: Found(OPENED_UNLIKE),
    a_search_that_leaves_says_nothing: Found(OPENED_UNLIKE),
    ranks_agree_on_how_many: Found(KEPT_UNLIKE),
    a_late_read_revives_its_request: Found(LEFT_OPEN),
    a_prefix_is_released_twice: Found(RELEASED),
    pages_are_announced_when_reserved: Found(EVENTS),
    a_child_is_deposited_without_its_parent: Found(ORPHAN, range(20)),
    a_node_is_committed_without_its_parent: Found(STILL_FILLING, range(20)),
    a_child_outlives_the_node_that_it_hangs_from: Found(
        STILL_FILLING, range(155, 165), "read.fail,store.restart,rank.restart"
    ),
    a_stopped_search_mistakes_the_agreement: Found(OPENED_UNLIKE, range(20), "order.delay,lookup.delay"),
    a_failed_read_is_tried_for_ever: Found(READ_TOO_OFTEN, faults="read.fail"),
    a_restore_in_part_asks_no_policy: Found(WRONG_BYTES),
    a_restore_asks_the_policies_of_the_host_alone: Found(NO_DEVICE_PAGE),
    a_restore_may_leave_a_hole: Found(BEYOND_ORDER, range(20)),
    a_restore_that_begins_early_is_accounted_for_as_before: Found(NOT_ACCOUNTED),
}
"""Each planted fault. A few kinds of faults beside it find some sooner than all of them."""


def find(plant: Plant, found: Found) -> None:
    """Run seeds up to one that breaks the rule; AssertionError if none does, MisplantedError if the fault is wrong."""
    options = SimulationOptions(kinds=parse_kinds(found.faults))
    failures: list[str] = []
    for seed in found.seeds:
        with planted(plant) as planter:
            failure = run_seed(options, seed).failure
        if failure is None:
            continue
        failures.append(failure)
        if re.match(found.rule, failure):
            break
        planter.check()
    assert_broken(planter, found.rule, failures)


@pytest.mark.parametrize("plant", MUTATIONS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found_by_the_rule_that_it_breaks(plant: Plant) -> None:
    find(plant, MUTATIONS[plant])
