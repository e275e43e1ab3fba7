from __future__ import annotations

from kvcr_actors.core.failed_keys import FailedKeys

KEYS = [bytes([n]) for n in range(5)]
HELD = [1] * 5


def test_an_answer_is_cut_before_a_key_that_failed_until_its_pause_is_over() -> None:
    failed = FailedKeys(5.0)
    failed.note(KEYS[2], 10.0)
    assert failed.trusted(KEYS, HELD, 14.9) == 2
    assert failed.trusted(KEYS[3:], HELD[3:], 14.9) == 2
    assert failed.trusted(KEYS, HELD, 15.0) == 5
    assert len(failed) == 0


def test_a_key_that_the_store_does_not_claim_cuts_nothing() -> None:
    failed = FailedKeys(5.0)
    failed.note(KEYS[0], 0.0)
    assert failed.trusted(KEYS, [0, 1], 1.0) == 2


def test_a_second_failure_starts_the_pause_anew() -> None:
    failed = FailedKeys(5.0)
    failed.note(KEYS[0], 0.0)
    failed.note(KEYS[1], 1.0)
    failed.note(KEYS[0], 4.0)
    assert failed.trusted(KEYS, HELD, 7.0) == 0
    assert failed.trusted(KEYS, HELD, 9.0) == 5


def test_memory_is_bounded_and_the_oldest_is_forgotten() -> None:
    failed = FailedKeys(5.0, limit=2)
    for key in KEYS[:3]:
        failed.note(key, 0.0)
    assert len(failed) == 2
    assert failed.trusted(KEYS[:1], HELD[:1], 0.0) == 1
    assert failed.trusted(KEYS[1:], HELD[1:], 0.0) == 0
