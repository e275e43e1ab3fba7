"""Every page that was asked for has one terminal answer, in each tier and in all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvcr_actors.core.accounting import PrefixOutcome, settle
from kvcr_actors.types import MissReason

pages = st.integers(0, 40)


@st.composite
def outcomes(draw: st.DrawFn) -> PrefixOutcome:
    total = draw(pages)
    within = st.integers(0, total)
    return PrefixOutcome(
        total=total,
        device=draw(within),
        host=draw(within),
        ready=draw(within),
        used=draw(within),
        miss=draw(st.sampled_from(MissReason)),
        drop=draw(st.sampled_from(MissReason)),
        store_on=draw(st.booleans()),
        ordered=draw(within),
        short=draw(st.sampled_from(MissReason)),
    )


@given(outcome=outcomes())
def test_scenario_55_queried_is_used_plus_the_sum_of_the_reasons_in_each_tier(outcome: PrefixOutcome) -> None:
    account = settle(outcome)
    for tier in (account.host, account.store):
        assert tier.queried == tier.used + sum(tier.reasons.values())
        assert min((tier.queried, tier.used, *tier.reasons.values())) >= 0
        assert 0 not in tier.reasons.values()
    assert account.host.queried == outcome.total - outcome.device


@given(outcome=outcomes())
def test_every_page_beyond_the_device_is_used_once_or_has_one_reason(outcome: PrefixOutcome) -> None:
    account = settle(outcome)
    used = account.host.used + account.store.used
    assert used + sum(account.reasons.values()) == outcome.total - outcome.device
    found = max(outcome.device, outcome.host, outcome.ready)
    if outcome.store_on:
        assert used == max(0, min(outcome.used, found) - outcome.device)
        assert account.store.queried == outcome.total - max(outcome.device, outcome.host)


def test_a_prefix_from_host_and_store_is_split_between_them() -> None:
    account = settle(PrefixOutcome(total=10, device=2, host=5, ready=8, used=8, miss=MissReason.READ_FAILED))
    assert (account.host.queried, account.host.used, account.host.reasons) == (8, 3, {MissReason.ABSENT: 5})
    assert (account.store.queried, account.store.used, account.store.reasons) == (5, 3, {MissReason.READ_FAILED: 2})
    assert account.reasons == {MissReason.READ_FAILED: 2}


def test_pages_that_were_ready_but_not_used_say_why() -> None:
    account = settle(
        PrefixOutcome(total=6, device=0, host=3, ready=5, used=2, miss=MissReason.DEADLINE, drop=MissReason.CANCELLED)
    )
    assert account.host.reasons == {MissReason.CANCELLED: 1, MissReason.ABSENT: 3}
    assert account.store.reasons == {MissReason.CANCELLED: 2, MissReason.DEADLINE: 1}
    assert account.reasons == {MissReason.CANCELLED: 3, MissReason.DEADLINE: 1}


def test_what_was_ordered_and_not_used_has_a_reason_of_its_own() -> None:
    account = settle(PrefixOutcome(total=9, device=1, host=4, ready=8, used=3, miss=MissReason.ABSENT, ordered=6))
    assert (account.host.used, account.store.used) == (2, 0)
    assert account.host.reasons == {MissReason.INCOMPLETE: 1, MissReason.ABSENT: 5}
    assert account.store.reasons == {MissReason.INCOMPLETE: 2, MissReason.NOT_RESTORED: 2, MissReason.ABSENT: 1}
    assert account.reasons == {MissReason.INCOMPLETE: 3, MissReason.NOT_RESTORED: 2, MissReason.ABSENT: 1}


def test_without_a_store_the_host_gives_the_final_reason() -> None:
    account = settle(PrefixOutcome(4, 0, 1, 1, 1, MissReason.TIER_OFF, store_on=False))
    assert account.host.reasons == {MissReason.TIER_OFF: 3}
    assert account.store.queried == 0


def test_equal_reasons_are_added() -> None:
    account = settle(PrefixOutcome(4, 0, 2, 2, 1, MissReason.CANCELLED, MissReason.CANCELLED, store_on=False))
    assert account.host.reasons == {MissReason.CANCELLED: 3}
