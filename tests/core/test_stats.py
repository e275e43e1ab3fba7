"""Counters keep the identity of the accounts that they add up."""

from __future__ import annotations

import attrs
from hypothesis import given
from hypothesis import strategies as st

from kvcr_actors.core.accounting import PrefixOutcome, settle
from kvcr_actors.core.stats import ControllerStats
from kvcr_actors.types import MissReason, SkipReason

numbers = st.integers(0, 9)


@given(
    cuts=st.lists(st.tuples(numbers, numbers, numbers, numbers), max_size=6),
    miss=st.sampled_from(MissReason),
)
def test_totals_keep_queried_equal_to_used_and_reasons(cuts: list[tuple[int, ...]], miss: MissReason) -> None:
    stats = ControllerStats()
    for device, host, ready, used in cuts:
        stats.settle(settle(PrefixOutcome(9, device, host, ready, used, miss)))
    for tier in (stats.host, stats.store):
        assert tier.queried == tier.used + sum(tier.reasons.values())
    used = stats.host.used + stats.store.used
    assert used + sum(stats.reasons.values()) == sum(9 - cut[0] for cut in cuts)


def test_an_engines_own_counters_are_added_in_a_copy() -> None:
    loop, engine = ControllerStats(), ControllerStats()
    loop.backup.steps = 5
    for stats in (loop, engine):
        stats.settle(settle(PrefixOutcome(4, 1, 2, 3, 3, MissReason.ABSENT)))
        stats.backup.skipped[SkipReason.QUEUE_FULL] += 1
        stats.prefetch.started += 1
        stats.prefetch.cancelled += 1
        stats.events_dropped += 1
    before = attrs.asdict(loop)
    both = loop.merged(engine)
    assert attrs.asdict(loop) == before
    assert (both.host.queried, both.host.used, both.store.queried, both.store.used) == (6, 2, 4, 2)
    assert both.reasons == {MissReason.ABSENT: 2}
    assert both.backup.skipped == {SkipReason.QUEUE_FULL: 2}
    assert (both.prefetch.started, both.prefetch.cancelled, both.events_dropped, both.backup.steps) == (2, 2, 2, 5)
