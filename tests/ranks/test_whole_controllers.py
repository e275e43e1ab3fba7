"""Two and four real processes with a whole controller each over gloo: one killed, frozen, slow or without host memory.

Every life is driven through the synchronous front door by a scripted scheduler loop (`scripted_scheduler`). Its report
is checked in full by `assert_sound`: all ends agree, nothing is left, no collective on the scheduler's thread.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks.controller_processes import (
    Controllers,
    Report,
    assert_constant_collectives,
    assert_sound,
)
from tests.ranks.lives import lives, rotated

pytestmark = [pytest.mark.timeout(300)]

SIZES = [2, 4]
BACK_UP_A = [("write", 1, "a", 0, 6), ("flush",)]
STORE_AWAY = [("settle",), ("quiet",), ("meet", "stored"), ("empty host",)]
"""What was backed up stands in every rank's store, and in the store alone."""


def prefetch(request_id: str, name: str, pages: int) -> list[tuple[Any, ...]]:
    return [("prefetch", request_id, name, pages), ("flush",)]


def of_every_kind(rank: int) -> list[tuple[Any, ...]]:
    """Backups, prefetches, restores and aborts; each rank has them in another order, and aborts elsewhere."""
    steps = [
        [("write", 1, "a", 0, 3), ("write", 2, "a", 3, 3), ("flush",)],
        [("write", 3, "b", 0, 4), ("flush", 0.02 * rank)],
        [("write", 4, "c", 0, 5), ("flush",)],
    ]
    script: list[tuple[Any, ...]] = [order for step in rotated(steps, rank) for order in step]
    script += STORE_AWAY
    requests = [prefetch("a", "a", 6), prefetch("b", "b", 4), prefetch("c", "c", 5), prefetch("one", "a", 5)]
    script += [order for request in rotated(requests, rank) for order in request]
    if rank == 0:
        script += [("cancel", "one"), ("flush",)]
    script += prefetch("all", "b", 3) if rank % 2 else [("prefetch", "all", "b", 3)]
    script += [("sleep", 0.005 * rank), ("cancel", "all"), ("flush",)]
    script += [("restore", "a"), ("restore", "b"), ("restore", "c"), ("settle",)]
    return [*script, ("write", 5, "d", 0, 2), ("write", 6, "a", 0, 6), ("flush",), ("settle",)]


def every_kind(size: int, **common: Any) -> list[Any]:
    by_rank = {rank: {"script": of_every_kind(rank)} for rank in range(size)}
    for rank, options in common.pop("by_rank", {}).items():
        by_rank[rank] |= options
    return lives(size, [], by_rank=by_rank, **common)


def lengths(reports: list[Report], *request_ids: str) -> list[list[int]]:
    return [[report["lengths"][request_id] for request_id in request_ids] for report in reports]


def ends(reports: list[Report], *node_ids: int) -> list[list[str]]:
    return [[report["nodes"][str(node_id)] for node_id in node_ids] for report in reports]


@pytest.mark.parametrize("condition", ["healthy", "on trio", "one store is slow"])
@pytest.mark.parametrize("size", SIZES)
def test_orders_of_every_kind_end_alike_with_a_constant_number_of_collectives(
    controllers: Controllers, size: int, condition: str
) -> None:
    options = {"on trio": {"loop": "trio"}, "one store is slow": {"store": {"read_s": 0.1, "write_s": 0.05}}}
    reports = controllers.run(every_kind(size, by_rank={size - 1: options.get(condition, {})}))
    assert_sound(reports)
    assert_constant_collectives(reports)
    assert ends(reports, *range(1, 7)) == [["kept"] * 6] * size
    assert lengths(reports, "a", "b", "c") == [[6, 4, 5]] * size
    assert len({tuple(report["host"]) for report in reports}) == 1


@pytest.mark.parametrize("slots", [0, 4])
@pytest.mark.parametrize("size", SIZES)
def test_scenario_24_orders_of_every_kind_end_alike_though_one_rank_lacks_host_memory(
    controllers: Controllers, size: int, slots: int
) -> None:
    reports = controllers.run(every_kind(size, by_rank={size - 1: {"host_slots": slots}}))
    assert_sound(reports)
    assert_constant_collectives(reports)
    assert all("kept" not in kept for kept in ends(reports, 4, 6)), "five and six pages go into no four slots"
    if not slots:
        assert lengths(reports, "a", "b", "c") == [[0, 0, 0]] * size
        assert set(ends(reports, *range(1, 7))[-1]) == {"tier_off"}


@pytest.mark.parametrize("size", SIZES)
def test_scenario_24_memory_that_one_rank_lacks_for_one_node_costs_that_node_alone(
    controllers: Controllers, size: int
) -> None:
    script = [("write", 1, "a", 0, 6), ("write", 2, "b", 0, 4), ("flush",), *STORE_AWAY]
    script += [("prefetch", "a", "a", 6), ("prefetch", "b", "b", 4), ("flush",), ("restore", "b")]
    reports = controllers.run(lives(size, script, by_rank={size - 1: {"host_slots": 5}}))
    assert_sound(reports)
    assert_constant_collectives(reports)
    assert ends(reports, 1, 2) == [["ranks_disagreed", "kept"]] * (size - 1) + [["no_host_memory", "kept"]]
    assert lengths(reports, "a", "b") == [[0, 4]] * size
    assert all(report["endings"]["b"] == ["restored", {}] for report in reports)


def test_scenario_24_a_prefix_that_is_too_long_for_one_ranks_host_is_cut_alike(controllers: Controllers) -> None:
    script = [("write", 1, "a", 0, 3), ("flush",), *STORE_AWAY, *prefetch("head", "a", 3), ("restore", "head")]
    script += [("write", 2, "a", 3, 2), ("flush",), ("settle",), ("quiet",), ("meet", "again"), ("empty host",)]
    script += [*prefetch("a", "a", 5), ("restore", "a")]
    config = {"host_reserve_fraction": 0.25}
    reports = controllers.run(lives(2, script, config=config, by_rank={1: {"host_slots": 5}}))
    assert_sound(reports)
    assert ends(reports, 1, 2) == [["kept", "kept"]] * 2
    (first,), (second,) = lengths(reports, "a")
    assert 0 < first == second < 5
    assert [report["endings"]["a"][0] for report in reports] == ["restored"] * 2


def scenario_23(deadline_s: float = 3.0, **options: Any) -> list[Any]:
    """Rank 0 copies while rank 1 has everything already; then it has much open, and something that rank 1 never has."""
    script = [*BACK_UP_A, ("settle",), ("quiet",), ("meet", "stored")]
    many = [("prefetch", f"r{index}", "a", 1 + index % 6) for index in range(12)]
    here = [("empty host",), ("write", 2, "a", 0, 6), ("flush", 0.1), ("settle",), ("meet", "backed up")]
    here += [*many, ("flush",), ("sleep", 0.1), ("meet", "opened"), ("settle",), ("meet", "found")]
    here += [("write", 3, "b", 0, 2), ("prefetch", "orphan", "a", 6), ("flush", 0.1), ("settle",)]
    there = [("write", 2, "a", 0, 6), ("flush",), ("settle",), ("meet", "backed up"), ("meet", "opened")]
    there += [*many[::-1], ("flush",), ("settle",), ("meet", "found"), ("write", 3, "b", 0, 2), ("flush", 0.1)]
    by_rank = {0: {"script": script + here}, 1: {"script": script + there, **options}}
    return lives(2, [], by_rank=by_rank, config={"agreement_deadline_s": deadline_s})


def test_scenario_23_a_rank_with_nothing_in_flight_makes_the_same_collectives_as_one_with_much(
    controllers: Controllers,
) -> None:
    reports = controllers.run(scenario_23())
    assert_sound(reports)
    assert_constant_collectives(reports)
    assert ends(reports, 1, 2, 3) == [["kept"] * 3] * 2
    assert lengths(reports, *[f"r{index}" for index in range(12)]) == [[1, 2, 3, 4, 5, 6] * 2] * 2
    assert reports[0]["endings"]["orphan"] == ["missed", {"ranks_disagreed": 6}]
    assert max(reports[0]["open_in_rounds"]) > 8, "more than a table's slots"
    assert min(reports[1]["open_in_rounds"]) == 0, "it joined the orphan's rounds with nothing"


@pytest.mark.parametrize("size", SIZES)
def test_scenario_25_steps_and_copies_in_another_order_on_each_rank_make_the_same_nodes_final(
    controllers: Controllers, size: int
) -> None:
    steps = [[("write", 1 + index, name, 0, 3)] for index, name in enumerate("abcd")]

    def script(rank: int) -> list[tuple[Any, ...]]:
        late = 0.03 * (size - rank)
        orders = [[*step, ("flush", late if index % 2 else 0.0)] for index, step in enumerate(steps)]
        return [order for step in rotated(orders, rank) for order in step]

    by_rank = {rank: {"script": script(rank)} for rank in range(size)}
    by_rank[size - 1]["host_slots"] = 9
    reports = controllers.run(lives(size, [], by_rank=by_rank, store=None))
    assert_sound(reports)
    assert_constant_collectives(reports)
    assert all(one.count("kept") >= 3 for one in ends(reports, 1, 2, 3, 4)), "the last rank has room for three"


@pytest.mark.parametrize("size", SIZES)
def test_scenario_26_a_page_that_one_rank_loses_between_lookup_and_read_shortens_the_prefix_on_all(
    controllers: Controllers, size: int
) -> None:
    script = [*BACK_UP_A, *STORE_AWAY, *prefetch("r", "a", 6), ("answered", "r"), ("meet", "ready"), ("empty host",)]
    script += [("sleep", 0.02), ("restore", "r")]
    reports = controllers.run(lives(size, script, by_rank={1: {"store": {"loses": [("a", 3)]}}}))
    assert_sound(reports)
    assert_constant_collectives(reports)
    assert lengths(reports, "r") == [[3]] * size
    assert all(report["endings"]["r"][0] == "restored" for report in reports), "what is agreed stays until it is loaded"


def test_a_store_that_is_slower_than_the_deadline_makes_misses_on_all_ranks(controllers: Controllers) -> None:
    script = [*BACK_UP_A, *STORE_AWAY, *prefetch("r", "a", 4), ("settle",)]
    config = {"agreement_deadline_s": 0.8}
    reports = controllers.run(lives(2, script, config=config, by_rank={1: {"store": {"read_s": 1.3}}}))
    assert_sound(reports)
    assert lengths(reports, "r") == [[0], [0]]


PLANTED = {
    "goes by its own answer": "node 1 ended differently",
    "joins only for its own": r"rank 0: \d*[13579] collectives in",
    "never answers": "had no answer in 1 s",
    "leaks a claim": "claims left open",
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_of_one_rank_is_caught(controllers: Controllers, fault: str) -> None:
    if "own answer" in fault:
        script = [("write", 1, "a", 0, 6), ("flush",), ("settle",)]
        planted = lives(2, script, by_rank={0: {"planted": fault}, 1: {"host_slots": 5}})
    elif "answers" in fault:
        planted = lives(2, prefetch("r", "a", 6), by_rank={1: {"planted": fault, "patience_s": 1.0}})
    elif "claim" in fault:
        planted = lives(2, prefetch("r", "a", 6), by_rank={1: {"planted": fault, "settle_s": 0.2}})
    else:
        planted = scenario_23(deadline_s=1.5, planted=fault)
    reports = controllers.run(planted)
    with pytest.raises(AssertionError, match=PLANTED[fault]):
        assert_sound_and_constant(reports)


def assert_sound_and_constant(reports: list[Report]) -> None:
    assert_sound(reports)
    assert_constant_collectives(reports)


WARM = [("write", 9, "d", 0, 1), ("flush",), ("settle",), ("quiet",), ("meet", "warm")]
"""The ranks have agreed once, so that they have a group."""
READ_A = [*WARM, *BACK_UP_A, *STORE_AWAY, *prefetch("r", "a", 6)]
KILLS: dict[str, list[tuple[Any, ...]]] = {
    "before its first order": [],
    "with a backup in flight": [*WARM, ("write", 1, "a", 0, 6), ("flush", 0.1), ("sleep", 0.05)],
    "when its backup ends": [*WARM, ("write", 1, "a", 0, 6), ("flush",)],
    "with a read in flight": [*READ_A, ("sleep", 0.05)],
    "with a prefix that stands ready": [*READ_A, ("answered", "r"), ("meet", "ready")],
}
AFTERWARDS = [("write", 7, "b", 0, 4), ("prefetch", "late", "a", 6), ("flush",), ("settle",)]
SHORT = {"agreement_deadline_s": 1.0}


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_that_is_frozen_costs_misses_on_all_ranks_alike_and_agrees_again_when_it_wakes(
    controllers: Controllers, size: int
) -> None:
    script = [*BACK_UP_A, *STORE_AWAY, *prefetch("r", "a", 6)]
    rest = [("settle",), ("write", 2, "b", 0, 4), ("flush",), ("settle",), ("meet", "awake")]
    for attempt in range(3):
        rest += [("write", 10 + attempt, "c", 4 * attempt, 4), ("flush",), ("settle",), ("meet", f"tried {attempt}")]
    by_rank = {1: {"script": [*script, ("freeze", 2.5), *rest], "store": {"read_s": 0.2}}}
    reports = controllers.run(lives(size, script + rest, by_rank=by_rank, config=SHORT))
    assert_sound(reports)
    assert lengths(reports, "r") == [[0]] * size
    assert "kept" in ends(reports, 10, 11, 12)[0]
    assert len({report["ranks"]["epoch"] for report in reports}) == 1


def assert_misses_afterwards(reports: list[Report]) -> None:
    """What was asked for after a rank was gone is a miss everywhere, with a reason."""
    for report in reports:
        assert report["nodes"]["7"] == "ranks_disagreed"
        ending, reasons = report["endings"]["late"]
        was_stored = report["nodes"]["1"] == "kept"
        assert (ending, reasons) == ("missed", {"ranks_disagreed" if was_stored else "absent": 6})


@pytest.mark.parametrize(
    ("size", "when"), [(4, "when its backup ends"), (4, "with a read in flight"), *((2, when) for when in KILLS)]
)
def test_a_rank_that_is_killed_makes_misses_of_what_is_open_and_nothing_is_left_on_the_others(
    controllers: Controllers, size: int, when: str
) -> None:
    victim = KILLS[when]
    script = [*(WARM if victim else []), *BACK_UP_A, ("settle",), ("quiet",)]
    script += [("meet", "stored"), ("empty host",)] if ("meet", "stored") in victim else [("empty host",)]
    script += [*prefetch("r", "a", 6), ("answered", "r")]
    script += [("meet", "ready")] if ("meet", "ready") in victim else []
    reports = controllers.run(
        lives(
            size,
            [*script, ("restore", "r"), *AFTERWARDS],
            by_rank={size - 1: {"script": [*victim, ("kill",)]}},
            config=SHORT if "ready" not in when else {"agreement_deadline_s": 3.0},
            store={"read_s": 0.1},
            survivors=size - 1,
        )
    )
    assert len(reports) == size - 1
    assert_sound(reports)
    assert_misses_afterwards(reports)
    for report in reports:
        assert report["lengths"]["r"] in (0, 6)
        assert report["endings"]["r"][0] == ("restored" if report["lengths"]["r"] else "missed")
    if "ready" in when:
        assert lengths(reports, "r") == [[6]] * (size - 1)
    if "flight" in when:
        assert lengths(reports, "r") == [[0]] * (size - 1)


def test_a_killed_rank_that_starts_again_agrees_with_the_others_again(controllers: Controllers) -> None:
    stays = [*WARM, *BACK_UP_A, ("settle",), ("meet", "again"), ("write", 2, "b", 0, 4), ("flush",), *STORE_AWAY]
    stays += [*prefetch("r", "b", 4), ("restore", "r"), *prefetch("old", "a", 6), ("settle",)]
    killed, again = [*WARM, *BACK_UP_A, ("kill",)], stays[stays.index(("meet", "again")) :]
    config = {"agreement_deadline_s": 3.0}
    first = lives(2, stays, by_rank={1: {"script": killed}}, config=config)
    second = lives(1, again, config=config)
    reports = controllers.run(first, restarts={1: second[0]})
    assert_sound(reports)
    assert len({report["ranks"]["epoch"] for report in reports}) == 1
    assert ends(reports, 2) == [["kept"]] * 2
    assert lengths(reports, "r", "old") == [[4, 0]] * 2, "what the new process lacks is no hit"
