"""Claims of whole controllers in real processes over gloo: aborted anywhere, late, twice, never: all comes back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks.controller_processes import Controllers, assert_constant_collectives, assert_sound
from tests.ranks.lives import lives
from tests.ranks.test_whole_controllers import BACK_UP_A, STORE_AWAY, ends, lengths, prefetch

pytestmark = [pytest.mark.timeout(300)]

PLACES = ("in the same step", "at once", "a little later", "when it is ready")
STORED = [*BACK_UP_A, *STORE_AWAY]


def aborted(request_id: str, place: str, name: str = "a") -> list[tuple[Any, ...]]:
    """A prefetch and its abort."""
    end = [("cancel", request_id), ("flush",)]
    match place:
        case "in the same step":
            return [("prefetch", request_id, name, 6), *end]
        case "at once":
            return [*prefetch(request_id, name, 6), *end]
        case "a little later":
            return [*prefetch(request_id, name, 6), ("sleep", 0.002), *end]
        case _:
            return [*prefetch(request_id, name, 6), ("answered", request_id), *end]


@pytest.mark.parametrize("size", [2, 4])
def test_scenario_15_aborts_at_every_point_and_another_on_each_rank_leave_nothing_and_prefetch_goes_on(
    controllers: Controllers, size: int
) -> None:
    def script(rank: int) -> list[tuple[Any, ...]]:
        gone = [aborted(f"r{index}", PLACES[(index + rank * (index // 4)) % 4]) for index in range(120)]
        return [
            *STORED,
            *(order for request in gone for order in request),
            *prefetch("last", "a", 6),
            ("restore", "last"),
        ]

    reports = controllers.run(lives(size, [], by_rank={rank: {"script": script(rank)} for rank in range(size)}))
    assert_sound(reports)
    assert_constant_collectives(reports)
    assert lengths(reports, "last") == [[6]] * size


def test_scenario_15_an_abort_by_one_rank_at_any_moment_of_a_read_ends_alike_on_the_others(
    controllers: Controllers,
) -> None:
    def script(rank: int) -> list[tuple[Any, ...]]:
        orders: list[tuple[Any, ...]] = [*STORED]
        for turn in range(9):
            orders += prefetch(f"r{turn}", "a", 6)
            if turn % 3 == rank:
                orders += [("sleep", 0.012 * turn), ("cancel", f"r{turn}"), ("flush",)]
            orders += [("answered", f"r{turn}"), ("cancel", f"r{turn}"), ("flush",), ("ended", f"r{turn}")]
            orders += [("meet", f"turn {turn}"), ("empty host",), ("meet", f"emptied {turn}")]
        return orders

    by_rank = {rank: {"script": script(rank)} for rank in range(3)}
    reports = controllers.run(lives(3, [], by_rank=by_rank, store={"read_s": 0.03}))
    assert_sound(reports)
    assert_constant_collectives(reports)


@pytest.mark.parametrize(
    "fault",
    [
        "the launch of a backup raises",
        "the end of a backup raises",
        "the read of a prefix raises",
        "the launch of a restore raises",
    ],
)
def test_scenario_16_an_actor_that_fails_on_one_rank_leaves_nothing_anywhere(
    controllers: Controllers, fault: str
) -> None:
    script = [*STORED, *prefetch("r1", "a", 6), ("restore", "r1"), ("meet", "second")]
    script += [("write", 2, "b", 0, 6), ("flush",), ("settle",), ("quiet",), ("meet", "stored again"), ("empty host",)]
    script += [*prefetch("r2", "b", 6), ("restore", "r2")]
    reports = controllers.run(lives(2, script, by_rank={1: {"planted": fault}}))
    if fault == "the end of a backup raises":
        # Too late for the agreement: the others have the node, and use nothing of it.
        assert ends(reports, 1) == [["kept"], ["stopped"]]
        reports[1]["nodes"]["1"] = "kept"
    assert_sound(reports)
    assert_constant_collectives(reports)
    assert ends(reports, 2) == [["kept"]] * 2
    assert lengths(reports, "r2") == [[6]] * 2
    assert reports[1]["endings"]["r1"] != ["restored", {}]


def test_scenario_17_an_eviction_under_a_prefetch_on_one_rank_takes_no_page_of_it(controllers: Controllers) -> None:
    head = [*STORED, *prefetch("head", "a", 3), ("answered", "head"), ("cancel", "head"), ("flush",), ("ended", "head")]
    script = [*head, ("meet", "anchored"), *prefetch("r", "a", 6)]
    by_rank = {1: {"script": [*script, ("sleep", 0.05), ("empty host",), ("restore", "r")]}}
    by_rank[0] = {"script": [*head, ("empty host",), ("meet", "anchored"), *prefetch("r", "a", 6), ("restore", "r")]}
    reports = controllers.run(lives(2, [], by_rank=by_rank, store={"read_s": 0.15}))
    assert_sound(reports)
    assert_constant_collectives(reports)
    assert [report["endings"]["r"] for report in reports] == [["restored", {}]] * 2


def test_scenario_18_a_prefix_that_nobody_loads_is_let_go_on_every_rank(controllers: Controllers) -> None:
    script = [*STORED, *prefetch("r", "a", 6), ("ended", "r")]
    reports = controllers.run(lives(4, script, config={"claim_lifetime_s": 0.3}))
    assert_sound(reports)
    assert_constant_collectives(reports)
    assert [report["endings"]["r"] for report in reports] == [["cancelled", {"not_restored": 6}]] * 4


def test_scenario_19_a_rank_that_dies_after_an_abort_leaves_no_claim_on_the_others_when_reads_come_late(
    controllers: Controllers,
) -> None:
    begin = [*STORED, *prefetch("r", "a", 6), ("sleep", 0.05), ("cancel", "r"), ("flush",)]
    reports = controllers.run(
        lives(
            2,
            [*begin, *prefetch("late", "a", 6), ("settle",)],
            by_rank={1: {"script": [*begin, ("kill",)]}},
            config={"agreement_deadline_s": 1.0},
            store={"read_s": 0.2, "faults": {"read 0": "late"}},
            survivors=1,
        )
    )
    assert_sound(reports)
    assert reports[0]["endings"]["r"] == ["cancelled", {"cancelled": 6}]
    assert reports[0]["endings"]["late"][0] == "missed"


def test_scenario_20_completions_late_doubled_and_after_the_request_is_gone_end_alike(controllers: Controllers) -> None:
    script = [*STORED, *prefetch("gone", "a", 6), ("sleep", 0.02), ("cancel", "gone"), ("flush",), ("ended", "gone")]
    script += [("meet", "gone"), *prefetch("r", "a", 6), ("restore", "r"), *prefetch("again", "a", 6)]
    faults = [{"read 0": "duplicate", "read 1": "duplicate"}, {"read 0": "late", "write 0": "duplicate"}]
    faults += [{"read 1": "late", "write 1": "late"}]
    by_rank = {rank: {"store": {"read_s": 0.05, "faults": one}} for rank, one in enumerate(faults)}
    reports = controllers.run(lives(3, script, by_rank=by_rank))
    assert_sound(reports)
    assert_constant_collectives(reports)


def test_scenario_21_a_claim_that_is_released_twice_takes_nothing_from_another_requests(
    controllers: Controllers,
) -> None:
    script = [*STORED, ("prefetch", "r1", "a", 6), ("prefetch", "r2", "a", 6), ("flush",)]
    script += [("answered", "r1"), ("answered", "r2"), ("meet", "both"), ("cancel", "r1"), ("cancel", "r1"), ("flush",)]
    script += [("ended", "r1"), ("cancel", "r1"), ("flush",), ("empty host",), ("sleep", 0.02), ("restore", "r2")]
    reports = controllers.run(lives(2, script))
    assert_sound(reports)
    assert_constant_collectives(reports)
    assert lengths(reports, "r1", "r2") == [[6, 6]] * 2
    assert all(report["endings"]["r2"] == ["restored", {}] for report in reports)


@pytest.mark.parametrize("condition", ["write through", "without a store", "into a store that is full"])
def test_scenario_22_a_loop_that_only_decodes_leaves_no_claim(controllers: Controllers, condition: str) -> None:
    script = [
        order for index in range(36) for order in (("write", index, "abc"[index // 12], index % 12, 1), ("flush",))
    ]
    stores = {"write through": {}, "without a store": None, "into a store that is full": {"pages": 5}}
    reports = controllers.run(lives(2, script, host_slots=64, store=stores[condition]))
    assert_sound(reports)
    assert_constant_collectives(reports)
    assert all((report["left_out"] > 0) == ("full" in condition) for report in reports)
    assert all(set(report["nodes"].values()) == {"kept"} for report in reports)
    assert all(report["claims"]["taken"] >= 36 for report in reports)
