"""`kvcr-actors simulate`: seeds in, one line of progress, tables and an exit status out."""

from __future__ import annotations

import re
import time
from typing import Annotated, Final, Literal

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvcr_actors.errors import ConfigError
from kvcr_actors.simulation.faults import parse_kinds
from kvcr_actors.simulation.report import SimulationReport, render
from kvcr_actors.simulation.run import SeedResult, run_seeds
from kvcr_actors.simulation.world import SimulationOptions

_MOST_JOBS: Final = 1_024


def simulate(
    *,
    seeds: Annotated[str, Parameter(help="The seeds to run, both ends included: A..B, or one.")] = "0..99",
    ranks: Annotated[int, Parameter(help="Ranks that must end every operation alike.")] = 2,
    faults: Annotated[
        str, Parameter(help="all, none, or after commas: operations (read), faults (stall), both (read.stall).")
    ] = "all",
    steps: Annotated[int, Parameter(help="Turns of the engine's scheduler a seed.")] = 200,
    loop: Annotated[Literal["asyncio", "trio"], Parameter(help="The event loop that the actors run on.")] = "trio",
    jobs: Annotated[int, Parameter(help="Processes that share the seeds; the results are those of one.")] = 1,
) -> int:
    """Run whole clusters in virtual time, with faults of every kind, and check what must always hold.

    A seed decides everything: workload, schedule and faults. The exit status is 0 if no rule was broken, 1 if a seed
    failed (its last events and the command to see it again are printed) or a kind of fault that was asked for never
    fired, 2 for bad input and 130 for Ctrl-C, which ends all processes at once and prints what ran until then.
    """
    chosen = _seeds(seeds)
    if not 1 <= jobs <= _MOST_JOBS:
        raise ConfigError(f"--jobs {jobs}: seeds need processes to run in; give 1 to {_MOST_JOBS}")
    options = SimulationOptions(ranks=ranks, kinds=parse_kinds(faults), steps=steps, loop=loop)
    report = SimulationReport(options, faults, asked=len(chosen))
    try:
        _run(report, chosen, jobs)
    except KeyboardInterrupt as interrupt:
        report.interrupted = True
        render(report, Console())
        raise type(interrupt)(f"{report.seeds:,} of {report.asked:,} seeds ran") from None
    render(report, Console())
    return 0 if report.healthy else 1


def _run(report: SimulationReport, seeds: range, jobs: int) -> None:
    errors = Console(stderr=True)
    columns = (
        TextColumn("simulating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("seeds"),
        TimeRemainingColumn(),
    )
    started = time.perf_counter()
    try:
        with Progress(*columns, console=errors, disable=not errors.is_terminal, transient=True) as bar:
            task = bar.add_task("simulate", total=len(seeds))

            def advance(result: SeedResult) -> None:
                report.add(result)
                bar.advance(task)

            run_seeds(report.options, seeds, advance, jobs)
    finally:
        report.wall_s = time.perf_counter() - started


def _seeds(text: str) -> range:
    match = re.fullmatch(r"(\d{1,18})(?:\.\.(\d{1,18}))?", text)
    if match is None:
        raise ConfigError(f"--seeds: {text[:40]!r} is no range of seeds; write for example 0..99, or 17")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise ConfigError(f"--seeds: {text} is empty; the first seed must not be above the last")
    return range(first, last + 1)
