"""The report as a person reads it: a table by tier and a few lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from kvcr_actors.replay.report import ReplayReport


def render(report: ReplayReport, console: Console) -> None:
    """Print the table of hits by tier, a short summary, and what is wrong if the run is unhealthy."""
    console.print(_tier_table(report))
    console.print(_summary(report))
    for fault in report.faults():
        console.print(f"unhealthy: {fault}", style="bold red", markup=False)


def _tier_table(report: ReplayReport) -> Table:
    table = Table(title=f"{report.requests:,} requests asked for {report.blocks:,} blocks")
    table.add_column("tier")
    for heading in ("asked", "hits", "of all blocks"):
        table.add_column(heading, justify="right")
    table.add_column("not used, and why")
    for tier, totals in report.tiers.items():
        hits = report.hits[tier]
        table.add_row(tier.value, f"{totals.queried:,}", f"{hits:,}", _share(report, hits), _counts(totals.reasons))
    hits = sum(report.hits.values())
    table.add_section()
    table.add_row("all", f"{report.blocks:,}", f"{hits:,}", _share(report, hits), _counts(report.reasons))
    return table


def _summary(report: ReplayReport) -> Table:
    backup, prefetch, store, timing = report.backup, report.prefetch, report.store, report.timing
    rows = {
        "backup": f"{backup.nodes:,} nodes in {backup.steps:,} steps, {backup.submits:,} submits, "
        f"{backup.slices:,} slices, {backup.bytes / 1e6:,.1f} MB; skipped: {_counts(backup.skipped)}",
        "prefetch": f"{prefetch.started:,} started, {prefetch.used:,} used, {prefetch.cancelled:,} cancelled, "
        f"{prefetch.failed:,} failed",
        "store": f"{store.deposited:,} pages deposited, {store.failed:,} not, {store.evicted:,} evicted; "
        f"not: {_counts(store.skipped)}",
        "verified": f"{report.verify.pages:,} restored pages, {report.verify.mismatches:,} with wrong bytes",
        "claims": f"{report.claims.taken:,} taken, {report.claims.released:,} released, {report.claims.open:,} open, "
        f"{report.claims.quarantined:,} quarantined",
        "events": f"{report.events.published:,} published; the index built from them "
        f"{'matches' if report.events.index_matches else 'DIFFERS'}",
        "time": f"{timing.wall_s:,.2f} s, {report.blocks / max(timing.wall_s, 1e-9):,.0f} blocks/s; scheduler thread "
        f"{timing.step_us(50):,.1f} us a step at p50, {timing.step_us(99):,.1f} us at p99",
        "peak memory": f"{report.peak_bytes / (1 << 20):,.0f} MiB",
    }
    lines = Table.grid(padding=(0, 2))
    for name, text in rows.items():
        lines.add_row(name, text)
    return lines


def _share(report: ReplayReport, hits: int) -> str:
    return f"{hits / max(1, report.blocks):.1%}"


def _counts(counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{key} {count:,}" for key, count in counts.items() if count) or "none"
