"""Faults planted in the product: the simulator finds each of them within a few seeds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from kvcr_actors.actors import deposit, filling, staging
from kvcr_actors.actors.accord import Accord
from kvcr_actors.actors.confirmation import ConfirmationActor
from kvcr_actors.actors.prefetch import PrefetchActor
from kvcr_actors.actors.restore import RestoreActor
from kvcr_actors.actors.state import LoopState
from kvcr_actors.core.host_tier import HostTier
from kvcr_actors.core.prefetch_state import HeldPrefix
from kvcr_actors.desk import EngineDesk
from kvcr_actors.runtime.operation import Operation
from kvcr_actors.simulation.faults import parse_kinds
from kvcr_actors.simulation.run import run_seed
from kvcr_actors.simulation.world import SimulationOptions
from kvcr_actors.testing.devices import LoopDevice
from kvcr_actors.testing.ranks import LoopRanks

Patch = pytest.MonkeyPatch


def a_cancelled_prefix_keeps_its_claim(patch: Patch) -> None:
    """A claim not released on one path: where a ready prefix is cancelled."""

    def cancel(self: Any, request_id: Any, answers: Any, reason: Any = None) -> None:
        prefix = self._state.prefixes.get(request_id)
        if prefix is not None:
            prefix._claim, prefix._pinned = None, None
        real(self, request_id, answers, *(() if reason is None else (reason,)))

    real = PrefetchActor._cancel
    patch.setattr(PrefetchActor, "_cancel", cancel)


def memory_is_freed_before_it_is_quiet(patch: Patch) -> None:
    """An early free: a claim ends with its operation's outcome, whatever native code still does."""
    patch.setattr(LoopState, "release_when_quiet", lambda self, operation, claim, size: claim.release())


def a_restore_releases_its_prefix_at_the_launch(patch: Patch) -> None:
    """An early free on the other way: the source of a restore is not protected while it is read."""

    def take(self: Any, order: Any, taken: Any) -> None:
        real(self, order, taken)
        for one in taken:
            one.prefix._unpin()

    real = RestoreActor._take
    patch.setattr(RestoreActor, "_take", take)


def the_fence_is_forgotten(patch: Patch) -> None:
    """A missing fence: copies do not wait for the kernels of their step."""
    real = EngineDesk.flush_pending_backups
    patch.setattr(EngineDesk, "flush_pending_backups", lambda self, fence=None: real(self, None))


def the_restore_fence_is_forgotten(patch: Patch) -> None:
    """A missing fence on the way to the device only."""
    real = LoopDevice.submit

    def submit(self: Any, plan: Any, fence: Any) -> Any:
        return real(self, plan, None if plan.direction.value == "to_device" else fence)

    patch.setattr(LoopDevice, "submit", submit)


def a_rank_joins_only_with_something_to_say(patch: Patch) -> None:
    """A conditional collective: a rank that has nothing of an operation does not open it."""
    patch.setattr(LoopState, "join_without", lambda self, operation: None)
    patch.setattr(EngineDesk, "_refuse_nodes", _without_joining(EngineDesk._refuse_nodes))


def a_search_that_leaves_says_nothing(patch: Patch) -> None:
    """A conditional collective: a cancelled search makes no more agreements."""
    patch.setattr(Accord, "leave", lambda self: None)


def ranks_agree_on_how_many(patch: Patch) -> None:
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


def a_late_read_revives_its_request(patch: Patch) -> None:
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


def a_late_outcome_replaces_the_first(patch: Patch) -> None:
    """A late completion that revives: an operation that was given up changes its outcome."""

    def settle(self: Any, outcome: Any, *, quiet: bool = True) -> None:
        self._outcome = outcome
        self._settled.set()
        if quiet:
            self.become_quiet()

    patch.setattr(Operation, "settle", settle)


def a_prefix_is_released_twice(patch: Patch) -> None:
    """A double release: at the end of a request, by two of its holders."""

    def end(self: Any) -> None:
        claim = self._claim
        real(self)
        if claim is not None:
            with contextlib.suppress(Exception):
                claim.release()

    real = HeldPrefix.end
    patch.setattr(HeldPrefix, "end", end)


def pages_are_announced_when_reserved(patch: Patch) -> None:
    """An event before the commit."""

    def reserve(self: Any, parent: Any, keys: Any, masks: Any = None) -> Any:
        pages = real(self, parent, keys, masks)
        self._record_stored(pages)
        return pages

    def commit(self: Any, pages: Any) -> Any:
        changes = list(self._changes)
        ready = real_commit(self, pages)
        self._changes[:] = changes
        return ready

    real, real_commit = HostTier.reserve, HostTier.commit
    patch.setattr(HostTier, "reserve", reserve)
    patch.setattr(HostTier, "commit", commit)


def a_child_is_deposited_without_its_parent(patch: Patch) -> None:
    """A parent skipped: pages go to the store whose parents are not there."""
    patch.setattr(deposit, "_with_missing_parents", list)
    patch.setattr(deposit, "_whose_parents_are_stored_or_in", list)


def a_node_is_committed_without_its_parent(patch: Patch) -> None:
    """A parent skipped: in host memory, where a node is good whatever it hangs from."""

    async def good(self: Any, started: Any, outcome: Any, pinned: Any) -> int:
        await real(self, started, outcome, pinned)
        return sum(1 << node.position for node in started.staged)

    real = ConfirmationActor._good
    patch.setattr(ConfirmationActor, "_good", good)


def a_failed_read_is_tried_for_ever(patch: Patch) -> None:
    """A retry without a bound."""
    patch.setattr(filling, "_TRIES", 1 << 30)


def a_child_outlives_the_node_that_it_hangs_from(patch: Patch) -> None:
    """A parent skipped: a node is committed though the ranks gave up the node of its step that has its parent."""
    patch.setattr(staging, "_needs", lambda nodes: [0] * len(nodes))


def a_stopped_search_mistakes_the_agreement(patch: Patch) -> None:
    """A conditional collective: a search that is stopped early takes the next agreement for the last one."""
    patch.setattr(Accord, "is_at_last", property(lambda self: True))


def _without_joining(real: Any) -> Any:
    def refuse(self: Any, *args: Any) -> None:
        self._join_without, joining = None, self._join_without
        real(self, *args)
        self._join_without = joining

    return refuse


MUTATIONS: dict[Callable[[Patch], None], range] = {
    a_cancelled_prefix_keeps_its_claim: range(10),
    memory_is_freed_before_it_is_quiet: range(10),
    a_restore_releases_its_prefix_at_the_launch: range(10),
    the_fence_is_forgotten: range(10),
    the_restore_fence_is_forgotten: range(10),
    a_rank_joins_only_with_something_to_say: range(10),
    a_search_that_leaves_says_nothing: range(10),
    ranks_agree_on_how_many: range(10),
    a_late_read_revives_its_request: range(10),
    a_late_outcome_replaces_the_first: range(30),
    a_prefix_is_released_twice: range(10),
    pages_are_announced_when_reserved: range(10),
    a_child_is_deposited_without_its_parent: range(20),
    a_node_is_committed_without_its_parent: range(20),
    a_child_outlives_the_node_that_it_hangs_from: range(140, 160),
    a_stopped_search_mistakes_the_agreement: range(20),
    a_failed_read_is_tried_for_ever: range(10),
}
"""Each planted fault, and seeds of which one finds it."""

FAULTS = {
    a_failed_read_is_tried_for_ever: "read.fail",
    a_stopped_search_mistakes_the_agreement: "order.delay,lookup.delay",
}
"""Where a few kinds of faults find it sooner than all of them."""


@pytest.mark.parametrize("plant", MUTATIONS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    options = SimulationOptions(kinds=parse_kinds(FAULTS.get(plant, "all")))
    assert any(run_seed(options, seed).failure for seed in MUTATIONS[plant])
