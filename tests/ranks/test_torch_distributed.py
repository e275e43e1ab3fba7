"""Two and four real processes over gloo on loopback: what ranks agree on when one is killed, frozen, slow or new."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.ranks.conftest import Group, Worker

pytestmark = [pytest.mark.timeout(180)]


def agree(ranks: list[Worker], name: str, *bits: int) -> list[int]:
    return [
        answer.result() for answer in [one.send("agree", name=name, bits=b) for one, b in zip(ranks, bits, strict=True)]
    ]


def states(ranks: list[Worker]) -> list[dict[str, Any]]:
    return [one.do("state") for one in ranks]


@pytest.mark.parametrize("size", [2, 4])
def test_bits_are_intersected_on_every_rank(group: Group, size: int) -> None:
    ranks = group.open(size)
    assert (
        agree(ranks, "x", *[0b1111, 0b1011, 0b1110, 0b1111][:size])
        == [0b1011 & (0b1110 if size == 4 else 0b1111)] * size
    )
    assert all(state["open"] == 0 for state in states(ranks))


def test_scenario_23_collectives_are_two_a_round_whatever_is_open_and_none_on_the_scheduler_thread(
    group: Group,
) -> None:
    ranks = group.open(2)
    many = [(f"op {index}", 1) for index in range(6)]
    for answer in [one.send("agree_all", pairs=pairs) for one, pairs in zip(ranks, [many, many[::-1]], strict=True)]:
        assert answer.result() == [1] * 6
    agree(ranks, "single", 1, 1)
    for rank, state in enumerate(states(ranks)):
        assert state["collectives"] == 2 * state["rounds"]
        assert state["threads"] == {f"kvcr-ranks-{rank}": state["collectives"]}


def test_operations_opened_in_another_order_meet_by_name(group: Group) -> None:
    ranks = group.open(4)
    names = [("a", 0b001), ("b", 0b010), ("c", 0b100)]
    orders = [names, names[::-1], [names[1], names[2], names[0]], [names[2], names[0], names[1]]]
    answers = [one.send("agree_all", pairs=order) for one, order in zip(ranks, orders, strict=True)]
    for answer, order in zip(answers, orders, strict=True):
        assert answer.result() == [bits for _, bits in order]


def test_more_operations_than_slots_take_more_rounds(group: Group) -> None:
    ranks = group.open(2, shape=(4, 1))
    many = [(f"op {index}", 1 << index % 60) for index in range(50)]
    for answer in [one.send("agree_all", pairs=many) for one in ranks]:
        assert answer.result() == [bits for _, bits in many]
    assert all(state["rounds"] >= 13 for state in states(ranks))


def test_orphans_that_fill_every_slot_keep_nobody_out(group: Group) -> None:
    ranks = group.open(2, shape=(2, 1), deadline_s=4.0)
    orphans = ranks[0].send("agree_all", pairs=[(f"orphan {index}", 1) for index in range(20)])
    assert agree(ranks, "meant", 1, 1) == [1, 1]
    assert orphans.result() == [0] * 20
    assert all(state["open"] == 0 for state in states(ranks))


def test_scenario_23_an_operation_that_the_other_rank_never_opens_ends_as_a_miss_at_its_deadline(group: Group) -> None:
    ranks = group.open(2, deadline_s=1.0)
    assert ranks[0].do("agree", name="orphan", bits=1) == 0
    assert agree(ranks, "next", 1, 1) == [1, 1]


def test_an_orphan_disturbs_no_other_operation(group: Group) -> None:
    ranks = group.open(2, deadline_s=2.0)
    agree(ranks, "warm", 1, 1)
    orphan = ranks[0].send("agree", name="orphan", bits=1)
    for index in range(5):
        assert agree(ranks, f"op {index}", 3, 2) == [2, 2]
    assert orphan.result() == 0
    assert [state["epoch"] for state in states(ranks)] == [0, 0]
    assert [state["expired"] for state in states(ranks)] == [1, 0], "it is counted where somebody waited for it"


def test_a_rank_that_is_slow_within_the_deadline_is_waited_for(group: Group) -> None:
    ranks = group.open(2)
    answers = [one.send("agree", name="slow", bits=7, after_s=delay) for one, delay in zip(ranks, [0, 1], strict=True)]
    assert [answer.result() for answer in answers] == [7, 7]


def test_a_rank_that_is_too_slow_makes_a_miss_on_all_ranks_and_they_agree_again(group: Group) -> None:
    ranks = group.open(2, deadline_s=1.0)
    answers = [one.send("agree", name="late", bits=7, after_s=delay) for one, delay in zip(ranks, [0, 3], strict=True)]
    assert [answer.result() for answer in answers] == [0, 0]
    assert agree(ranks, "next", 7, 7) == [7, 7]


@pytest.mark.parametrize("size", [2, 4])
def test_a_killed_rank_makes_misses_at_once_and_its_restart_joins_again(group: Group, size: int) -> None:
    ranks = group.open(size, deadline_s=20.0)
    agree(ranks, "before", *[1] * size)
    waiting = [one.send("agree", name="in flight", bits=1) for one in ranks[:-1]]
    time.sleep(0.3)
    ranks[-1].send("die")
    started = time.monotonic()
    assert [answer.result() for answer in waiting] == [0] * (size - 1)
    assert time.monotonic() - started < 20.0, "a dead peer is seen before the deadline"
    group.restart(size - 1)
    assert agree(group.ranks, "after", *[5] * size) == [5] * size
    assert len({state["epoch"] for state in states(group.ranks)}) == 1


def test_a_frozen_rank_makes_misses_on_the_others_and_agrees_with_them_when_it_wakes(group: Group) -> None:
    ranks = group.open(2, deadline_s=1.0)
    agree(ranks, "before", 1, 1)
    frozen = ranks[1].send("agree", name="in flight", bits=1, after_s=0.5)
    ranks[1].send("freeze")
    assert ranks[0].do("agree", name="in flight", bits=1) == 0
    ranks[1].wake()
    assert frozen.result() == 0
    assert agree(ranks, "after", 3, 3) == [3, 3]


def test_a_rank_frozen_at_any_moment_never_disagrees(group: Group) -> None:
    ranks = group.open(2, deadline_s=0.5)
    for turn in range(8):
        name = f"turn {turn}"
        answers = [one.send("agree", name=name, bits=1) for one in ranks]
        ranks[1].send("freeze")
        time.sleep(0.2 if turn % 2 else 1.2)
        ranks[1].wake()
        first, second = (answer.result() for answer in answers)
        assert first == second


def test_a_revoked_operation_still_joins_with_nothing(group: Group) -> None:
    ranks = group.open(2)
    ranks[0].do("start", name="revoked", bits=7)
    ranks[0].do("revoke", name="revoked")
    assert ranks[1].do("agree", name="revoked", bits=7) == 0
    end = time.monotonic() + 5  # the other rank's round may end a moment later
    while any(state["open"] for state in states(ranks)):
        assert time.monotonic() < end, "the revoked operation stays open"


def test_a_name_used_twice_is_paired_in_order(group: Group) -> None:
    ranks = group.open(2)
    ranks[0].do("start", name="twice", bits=1)
    ranks[0].do("revoke", name="twice")
    again = ranks[0].send("agree", name="twice", bits=2)
    assert ranks[1].do("agree", name="twice", bits=3) == 0
    assert ranks[1].do("agree", name="twice", bits=3) == 2
    assert again.result() == 2


def test_ranks_that_differ_are_refused_by_the_name_of_the_setting(group: Group) -> None:
    first, second = group._cluster.take(2)
    group.ranks = [first, second]
    common = {"group": group.name, "size": 2, "deadline_s": 5.0}
    answers = [
        first.send("open", rank=0, settings={"page_tokens": "16"}, **common),
        second.send("open", rank=1, settings={"page_tokens": "64"}, **common),
    ]
    for answer in answers:
        with pytest.raises(RuntimeError, match=r"ConfigError: ranks disagree on page_tokens: (16|64) on rank"):
            answer.result()


def test_a_rank_that_never_starts_is_named(group: Group) -> None:
    (only,) = group.ranks = group._cluster.take(1)
    with pytest.raises(RuntimeError, match=r"DeadlineError: rank 0 of 2 waited 0\.3 s for rank 1"):
        only.do("open", group=group.name, rank=0, size=2, deadline_s=1.0, start_s=0.3)


def test_a_close_ends_open_operations_at_once_and_the_peer_too(group: Group) -> None:
    ranks = group.open(2, deadline_s=30.0)
    agree(ranks, "before", 1, 1)
    waiting = ranks[0].send("agree", name="never", bits=1)
    time.sleep(0.2)
    ranks[0].do("close", deadline_s=5.0)
    assert waiting.result() == 0
    assert ranks[0].do("agree", name="too late", bits=1) == 0
