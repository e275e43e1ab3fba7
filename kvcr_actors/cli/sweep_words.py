"""What a sweep found, as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from kvcr_actors.lab.money import Costs, best, next_gib, splits
from kvcr_actors.lab.replicas import Placement
from kvcr_actors.lab.stack import LruCurve
from kvcr_actors.lab.sweeping import INFINITE, Sweep


def sweep_table(found: Sweep) -> Table:
    """A row a capacity, a column a policy; below it where misses come from."""
    table = Table(title="hits by capacity and policy, % of the pages asked for", caption_justify="left")
    table.add_column("pages", justify="right", no_wrap=True)
    # The cache without limit has one figure, which the caption gives.
    policies = [policy for policy in dict.fromkeys(row.policy for row in found.rows) if policy != INFINITE]
    for policy in policies:
        table.add_column(policy, justify="right", overflow="fold")
    for capacity in dict.fromkeys(row.capacity_pages for row in found.rows):
        ratios = [f"{100 * found.row(policy, capacity).ratio:.2f}" for policy in policies]
        table.add_row(f"{capacity:,}", *ratios)
    table.caption = (
        f"{found.pages:,} pages asked for by {found.requests:,} requests, {found.cold:,} of them for the first time: "
        f"{found.infinite:,} can be found at most ({found.infinite / found.pages:.4f}); LRU finds them all with "
        f"{found.lru.enough:,} pages. What is missing below that is for want of capacity. A controller's host tier "
        f"needs {found.largest:,} pages, the largest request."
    )
    return table


def money_tables(curve: LruCurve, costs: Costs, budget: float) -> list[Table]:
    """The splits of a budget, and what the next GiB buys after the best of them."""
    options = splits(curve, costs, budget)
    chosen = best(options)
    table = Table(
        title=f"splits of {budget:g} GiB between host and disk, LRU, {costs.page_bytes / (1 << 20):,.4g} MiB a page",
        caption_justify="left",
    )
    for name in ("host, GiB", "disk, GiB", "host hits", "disk hits", "prefill saved, s", ""):
        table.add_column(name, justify="right")
    for option in options:
        hits = (f"{option.host_hits:,}", f"{option.disk_hits:,}")
        mark = "best" if option is chosen else ""
        table.add_row(f"{option.host_gib:g}", f"{option.disk_gib:g}", *hits, f"{option.saved_s:,.0f}", mark)
    host, disk = next_gib(curve, costs, chosen)
    table.caption = f"The next GiB saves {host:,.2f} s over the trace as host memory, {disk:,.2f} s as disk."
    return [table]


def replica_table(placements: Sequence[Placement]) -> Table:
    """A row a router."""
    one = placements[0]
    table = Table(title=f"{one.replicas} replicas of {one.capacity_pages:,} pages each, LRU")
    for name in ("router", "hit ratio", "busiest, x mean"):
        table.add_column(name, justify="right")
    for placement in placements:
        table.add_row(placement.router, f"{placement.hits / placement.pages:.4f}", f"{placement.busiest:.2f}")
    return table
