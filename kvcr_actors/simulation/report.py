"""What a simulation found, in numbers, in a table, and as a command that reproduces a failure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import attrs
from rich.console import Console
from rich.table import Table

from kvcr_actors.simulation.faults import Kind
from kvcr_actors.simulation.run import SeedResult
from kvcr_actors.simulation.world import SimulationOptions

TRACE_LINES = 30
"""The last events of a failing seed that are printed."""


@attrs.define
class SimulationReport:
    """The sums over all seeds that ran, and the first failure."""

    options: SimulationOptions
    faults: str
    """The faults in the words of the command line."""
    asked: int = 0
    """Seeds that were to run."""
    interrupted: bool = False
    """Whether the user stopped it: then a fault that never fired means nothing."""
    seeds: int = 0
    operations: int = 0
    virtual_s: float = 0.0
    wall_s: float = 0.0
    fired: Counter[Kind] = attrs.field(factory=Counter[Kind])
    failed: SeedResult | None = None

    def add(self, result: SeedResult) -> None:
        """Count one seed; of those that failed the first is kept."""
        self.seeds += 1
        self.operations += result.operations
        self.virtual_s += result.virtual_s
        self.fired.update(result.fired)
        if result.failure is not None and self.failed is None:
            self.failed = result

    @property
    def silent(self) -> Sequence[Kind]:
        """Kinds of faults that were asked for and never fired: what they would have found is not known."""
        return [kind for kind in self.options.kinds if not self.fired[kind]]

    @property
    def healthy(self) -> bool:
        """Whether no rule was broken and every kind of fault fired."""
        return self.failed is None and not self.silent

    def command(self, seed: int) -> str:
        """The command that runs one seed again, exactly."""
        options = self.options
        return (
            f"kvcr-actors simulate --seeds {seed}..{seed} --ranks {options.ranks} --faults {self.faults} "
            f"--steps {options.steps} --loop {options.loop}"
        )


def render(report: SimulationReport, console: Console) -> None:
    """Print the failure, if there is one, and the tables."""
    failed = report.failed
    if failed is not None:
        console.print(f"seed {failed.seed} failed after {failed.virtual_s:.3f} virtual seconds; its last events:")
        for line in failed.trace[-TRACE_LINES:]:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        console.print(failed.failure, style="bold", markup=False, highlight=False, soft_wrap=True)
        console.print(f"to see it again: {report.command(failed.seed)}", markup=False, highlight=False, soft_wrap=True)
    console.print(_totals(report))
    if report.options.kinds:
        console.print(_faults(report))
    if report.silent and not report.interrupted:
        console.print(
            f"never fired: {', '.join(report.silent)}; run more seeds, or name fewer with --faults",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def _totals(report: SimulationReport) -> Table:
    table = Table(title="simulation", show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    options = report.options
    table.add_row("seeds", f"{report.seeds:,}{f' of {report.asked:,}' if report.interrupted else ''}")
    table.add_row("ranks, steps, loop", f"{options.ranks}, {options.steps}, {options.loop}")
    table.add_row("operations", f"{report.operations:,}")
    table.add_row("faults", f"{report.fired.total():,}")
    table.add_row("virtual time", f"{report.virtual_s:,.0f} s")
    table.add_row("wall time", f"{report.wall_s:,.1f} s")
    table.add_row("broken rules", "0" if report.failed is None else f"1 (seed {report.failed.seed})")
    return table


def _faults(report: SimulationReport) -> Table:
    """One row an operation: each of its faults and how often it fired."""
    table = Table(title="faults that fired")
    table.add_column("operation")
    table.add_column("faults")
    rows: dict[str, list[str]] = {}
    for kind in report.options.kinds:
        operation, word = kind.split(".")
        rows.setdefault(operation, []).append(f"{word} {report.fired[kind]:,}")
    for operation, cells in rows.items():
        table.add_row(operation, ", ".join(cells))
    return table
