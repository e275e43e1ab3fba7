"""Whole clusters under every fault: nothing is lost, nothing is wrong, and the seed decides everything."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

from kvcr_actors.errors import ConfigError
from kvcr_actors.messages import RestoreFinished
from kvcr_actors.simulation import engine, restores
from kvcr_actors.simulation.faults import KINDS, Kind, parse_kinds
from kvcr_actors.simulation.restores import own_pages
from kvcr_actors.simulation.run import run_seed
from kvcr_actors.simulation.world import SimulationOptions, World
from kvcr_actors.types import NO_SLOT, RestoreOrder

SEEDS = int(os.environ.get("KVCR_ACTORS_SIMULATION_SEEDS", "20"))
"""How many seeds are run; continuous integration runs more."""

BUGS_FOUND = {
    "read.fail,store.restart,rank.restart": (163, "a child was committed whose parent's node the ranks had given up"),
    "order.delay,lookup.delay": (0, "a search stopped early took the next agreement for the last"),
}
"""Faults and the seed with which they showed a bug (`test_mutations.py` plants both again)."""


def test_every_seed_keeps_every_rule() -> None:
    fired: Counter[Kind] = Counter()
    operations = 0
    for seed in range(SEEDS):
        result = run_seed(SimulationOptions(), seed)
        assert result.failure is None, (seed, result.failure, *result.trace[-20:])
        fired.update(result.fired)
        operations += result.operations
    assert operations > 400 * SEEDS
    if SEEDS >= 300:
        assert not set(KINDS) - set(fired)
    assert len(fired) > 40


@pytest.mark.parametrize("faults", BUGS_FOUND)
def test_a_seed_that_showed_a_bug_keeps_every_rule(faults: str) -> None:
    result = run_seed(SimulationOptions(kinds=parse_kinds(faults)), BUGS_FOUND[faults][0])
    assert result.failure is None, (result.failure, *result.trace[-20:])


def test_restores_of_every_kind_are_ordered_and_some_of_each_bring_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    ordered, fruitful = Counter[str](), Counter[str]()

    def check(rank: int, order: RestoreOrder, held: int, total: int, done: RestoreFinished) -> None:
        kinds = {
            "whole": order.first == held and done.pages == order.first + order.count,
            "short": done.pages < order.first + order.count,
            "below": order.first < held,
            "grown": order.device_pages is not None,
            "beyond": order.first > held and order.device_pages is None,
            "hole": any(NO_SLOT in pages for pages in order.pages),
        }
        for kind, holds in kinds.items():
            ordered[kind] += holds
            fruitful[kind] += holds and done.pages > own_pages(order, held)
        real(rank, order, held, total, done)

    real = restores.check_restored
    monkeypatch.setattr(engine, "check_restored", check)
    for seed in range(10):
        result = run_seed(SimulationOptions(), seed)
        assert result.failure is None, (seed, result.failure, *result.trace[-20:])
    assert ordered["beyond"] > 0 == fruitful["beyond"]
    assert min(count for kind, count in fruitful.items() if kind != "beyond") > 0, fruitful


@pytest.mark.parametrize("ranks", [1, 4])
def test_other_numbers_of_ranks_keep_every_rule(ranks: int) -> None:
    for seed in range(4):
        result = run_seed(SimulationOptions(ranks=ranks), seed)
        assert result.failure is None, (seed, result.failure, *result.trace[-20:])


def test_asyncio_keeps_every_rule() -> None:
    for seed in range(5):
        result = run_seed(SimulationOptions(loop="asyncio"), seed)
        assert result.failure is None, (seed, result.failure, *result.trace[-20:])


def test_without_faults_none_fires_and_all_is_well() -> None:
    result = run_seed(SimulationOptions(kinds=()), 1)
    assert result.failure is None
    assert not result.fired


@pytest.mark.parametrize("loop", ["trio", "asyncio"])
def test_a_seed_gives_the_same_trace_each_time_in_every_process(loop: str) -> None:
    program = (
        "from kvcr_actors.simulation.run import run_seed\n"
        "from kvcr_actors.simulation.world import SimulationOptions\n"
        "for seed in (5, 11, 13): print('\\n'.join(run_seed(SimulationOptions(loop='LOOP'), seed).trace))\n"
    )
    traces = [
        subprocess.run(
            [sys.executable, "-c", program.replace("LOOP", loop)],
            check=True,
            capture_output=True,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        ).stdout
        for hash_seed in ("1", "2")
    ]
    here = "".join("\n".join(run_seed(SimulationOptions(loop=loop), seed).trace) + "\n" for seed in (5, 11, 13))
    assert len(here) > 10_000
    assert traces == [here.encode()] * 2


@pytest.mark.parametrize("loop", ["trio", "asyncio"])
def test_a_signal_that_a_loop_wrapped_is_no_finding(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupted(self: World) -> None:
        raise RuntimeError("internal error") from KeyboardInterrupt()

    monkeypatch.setattr(World, "live", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_seed(SimulationOptions(loop=loop), 0)


def test_seeds_differ() -> None:
    assert run_seed(SimulationOptions(steps=20), 1).trace != run_seed(SimulationOptions(steps=20), 2).trace


def test_faults_are_named_by_operation_by_word_or_by_both() -> None:
    assert parse_kinds("all") == KINDS
    assert parse_kinds("none") == ()
    assert parse_kinds("read.stall,fence") == ("read.stall", "fence.delay")
    assert {kind.split(".")[1] for kind in parse_kinds("stall")} == {"stall"}
    with pytest.raises(ConfigError, match="'raed' is no fault; give all, none, or operations"):
        parse_kinds("read,raed")


@pytest.mark.parametrize("options", [{"ranks": 0}, {"steps": 0}, {"loop": "gevent"}])
def test_impossible_clusters_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"--{next(iter(options))}"):
        SimulationOptions(**options)  # type: ignore[arg-type]
