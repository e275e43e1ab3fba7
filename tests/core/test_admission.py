"""Prefetches stay long enough, few enough, and out of the share that backups keep."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcr_actors.core.admission import PrefetchAdmission
from kvcr_actors.errors import ConfigError
from kvcr_actors.types import MissReason

LIMITS = PrefetchAdmission(threshold_pages=2, capacity_pages=100, reserve_fraction=0.1, in_flight_limit=120)


@pytest.mark.parametrize(
    ("pages", "in_flight", "reason"),
    [
        (1, 0, MissReason.BELOW_THRESHOLD),
        (2, 0, None),
        (90, 0, None),
        (91, 0, MissReason.NO_HOST_MEMORY),
        (2, 88, None),
        (3, 88, MissReason.NO_HOST_MEMORY),
    ],
)
def test_the_backups_share_is_never_given_away(pages: int, in_flight: int, reason: MissReason | None) -> None:
    assert LIMITS.admit(pages, in_flight) is reason


def test_pages_in_flight_are_bounded_by_themselves() -> None:
    limits = PrefetchAdmission(threshold_pages=1, capacity_pages=100, reserve_fraction=0, in_flight_limit=10)
    assert limits.admit(10, 0) is None
    assert limits.admit(5, 6) is MissReason.QUEUE_FULL


def test_scenario_29_fifty_long_requests_on_memory_for_five_are_bounded() -> None:
    limits = PrefetchAdmission(threshold_pages=1, capacity_pages=500, reserve_fraction=0.1, in_flight_limit=10_000)
    in_flight, admitted = 0, 0
    for _ in range(50):
        if limits.admit(100, in_flight) is None:
            in_flight += 100
            admitted += 1
    assert (admitted, in_flight) == (4, 400)


@pytest.mark.parametrize(("capacity", "fraction", "share"), [(10, 0.9, 1), (10, 0.7, 3), (3, 0.1, 2), (10, 0.0, 10)])
def test_the_share_is_whole_pages_whatever_floats_do(capacity: int, fraction: float, share: int) -> None:
    assert PrefetchAdmission(1, capacity, fraction, 10).share_pages == share


@pytest.mark.parametrize(
    ("values", "words"),
    [((1, 0, 0.1, 10), "host pages"), ((5, 5, 0.1, 10), "one takes 5"), ((4, 100, 0.1, 3), "in_flight_pages 3")],
)
def test_scenario_50_a_configuration_that_could_admit_nothing_refuses_to_start(values: tuple, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PrefetchAdmission(*values)


@given(
    threshold=st.integers(1, 8),
    capacity=st.integers(1, 60),
    fraction=st.floats(0, 0.99),
    limit=st.integers(1, 60),
    in_flight=st.integers(0, 60),
)
def test_room_is_the_longest_prefetch_that_is_admitted(
    threshold: int, capacity: int, fraction: float, limit: int, in_flight: int
) -> None:
    try:
        limits = PrefetchAdmission(threshold, capacity, fraction, limit)
    except ConfigError:
        return
    assert limits.room(0) >= threshold
    fits = [pages for pages in range(1, 70) if limits.admit(pages, in_flight) is None]
    assert limits.room(in_flight) == max(fits, default=0)
