"""`kvcr-actors sweep`: a trace in; out come tables by capacity and policy, of splits of a budget, of replicas."""

from __future__ import annotations

import json as json_format
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import attrs
from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvcr_actors.cli.sweep_words import money_tables, replica_table, sweep_table
from kvcr_actors.errors import ConfigError
from kvcr_actors.lab.money import MODELS, Costs, page_bytes
from kvcr_actors.lab.replicas import ROUTERS, place
from kvcr_actors.lab.sweeping import POLICIES, Sweep, sweep
from kvcr_actors.lab.workload import workload
from kvcr_actors.replay.options import PLOT_SUFFIXES
from kvcr_actors.replay.outputs import check_output, whole_file
from kvcr_actors.replay.trace import TraceRequest, read_trace, shipped_trace
from kvcr_actors.types import Eviction

_COSTS = attrs.fields(Costs)


@Parameter(name="*")
@attrs.frozen
class MoneyOptions:
    """A budget, and what a page weighs and costs."""

    budget: Annotated[float | None, Parameter(help="GiB to split between host and disk.")] = None
    model: Annotated[str | None, Parameter(help=f"Gives a page's bytes: {', '.join(MODELS)}, or 32x8x128.")] = None
    page_bytes: Annotated[int | None, Parameter(help="A page's bytes.")] = None
    prefill_tokens_s: Annotated[float, Parameter(help="Tokens that the engine computes a second.")] = 10_000.0
    host_gb_s: Annotated[float, Parameter(help="From host to device, 10^9 bytes a second.")] = 25.0
    disk_gb_s: Annotated[float, Parameter(help="From disk to host, 10^9 bytes a second.")] = 3.0
    disk_price: Annotated[float, Parameter(help="Of a GiB of disk, in GiB of host memory.")] = 1.0

    def costs(self) -> Costs | None:
        """The cost model; None if no budget is asked for."""
        if self.model is not None and self.page_bytes is not None:
            raise ConfigError("--page-bytes: --model gives a page's bytes already; leave one of the two out")
        if self.budget is None:
            return None
        if not self.budget > 0:
            raise ConfigError(f"--budget: {self.budget} is not a number of GiB above 0")
        if self.model is None and self.page_bytes is None:
            raise ConfigError("--budget: how many pages fit it? give --model, or --page-bytes")
        size = page_bytes(self.model) if self.model is not None else self.page_bytes or 0
        return Costs(
            size,
            prefill_tokens_s=self.prefill_tokens_s,
            host_gb_s=self.host_gb_s,
            disk_gb_s=self.disk_gb_s,
            disk_price=self.disk_price,
        )


def sweep_trace(
    trace: Annotated[
        Path | None, Parameter(help="A .jsonl or .jsonl.gz file.", show_default="the shipped trace")
    ] = None,
    /,
    *,
    capacities: Annotated[str | None, Parameter(help="Pages, after commas.", show_default="eight that fit")] = None,
    policies: Annotated[str, Parameter(help=f"After commas: {', '.join(POLICIES)}.", show_default="all")] = "",
    limit: Annotated[int | None, Parameter(help="Read only the first requests.", show_default="all")] = None,
    first: Annotated[int, Parameter(help="Count hits from this request on; those before it fill the cache.")] = 0,
    money: MoneyOptions = MoneyOptions(),
    replicas: Annotated[int | None, Parameter(help="Serve the trace by so many caches behind a router too.")] = None,
    jobs: Annotated[int | None, Parameter(help="Processes that share the work.", show_default="one a core")] = None,
    json: Annotated[Path | None, Parameter(help="Write the rows here, as JSON.", show_default="none")] = None,
    plot: Annotated[
        Path | None, Parameter(help="Draw the curves here: .png, .svg or .pdf.", show_default="none")
    ] = None,
    progress: Annotated[bool, Parameter(help="Show a progress bar on a terminal.")] = True,
) -> int:
    """Say what each capacity and each policy would find on a trace, and how far that is from the best possible.

    Hits are those of the sequential replay; no bytes are moved. The exit status is 0, or 2 for bad input.
    """
    points = None if capacities is None else _capacities(capacities)
    names = POLICIES if not policies or policies == "all" else tuple(policies.split(","))
    costs = money.costs()
    _check_outputs(json, plot)
    if replicas is not None and replicas < 1:
        raise ConfigError(f"--replicas {replicas}: requests need one to go to; give 1 or more")
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit: {limit} is not a number of requests of 1 or more")
    requests = read_trace(trace or shipped_trace(), limit)
    found = _sweep(requests, points, names, first, jobs, shown=progress)
    console = Console()
    console.print(sweep_table(found))
    if costs is not None and money.budget is not None:
        for table in money_tables(found.lru, costs, money.budget):
            console.print(table)
    if replicas is not None:
        work, capacity = workload(requests), found.rows[0].capacity_pages
        placements = [place(work, replicas, capacity, router, Eviction.LRU) for router in ROUTERS]
        console.print(replica_table(placements))
    _write(found, trace or shipped_trace(), json, plot)
    return 0


def _capacities(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError(f"--capacities: {text!r} is no list of pages; write for example 1000,2000") from None


def _sweep(
    requests: list[TraceRequest],
    points: list[int] | None,
    names: tuple[str, ...],
    first: int,
    jobs: int | None,
    *,
    shown: bool,
) -> Sweep:
    errors = Console(stderr=True)
    columns = (TextColumn("sweeping"), BarColumn(), MofNCompleteColumn(), TextColumn("points"), TimeElapsedColumn())
    with Progress(*columns, console=errors, disable=not (shown and errors.is_terminal), transient=True) as bar:
        task = bar.add_task("sweep", total=None)
        return sweep(
            requests,
            points,
            names,
            first=first,
            jobs=jobs,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def _check_outputs(json: Path | None, plot: Path | None) -> None:
    if plot is not None and plot.suffix.lower() not in PLOT_SUFFIXES:
        raise ConfigError(f"--plot: {plot} has no picture's suffix; end it in {', '.join(PLOT_SUFFIXES)}")
    if json is not None and json == plot:
        raise ConfigError(f"--plot: {plot} is the --json file too; give each a file of its own")
    for name, path in (("--json", json), ("--plot", plot)):
        if path is not None:
            check_output(name, path)


def _write(found: Sweep, trace: Path, json: Path | None, plot: Path | None) -> None:
    """Write all files, then give them their names, so that an interrupt leaves none."""
    with ExitStack() as stack:
        if json is not None:
            whole = {
                "version": version("kvcr-actors"),
                "trace": str(trace),
                "requests": found.requests,
                "unique_pages": found.unique,
                "cold_pages": found.cold,
                "rows": [attrs.asdict(row) for row in found.rows],
            }
            stack.enter_context(whole_file(json)).write_text(json_format.dumps(whole, indent=2) + "\n")
        if plot is not None:
            from kvcr_actors.lab.plot import draw_sweep

            draw_sweep(found, stack.enter_context(whole_file(plot)), plot.suffix)
