"""The picture of a sweep: hit ratio against capacity, a line a policy."""

# pyright: reportUnknownMemberType=false
# matplotlib's own annotations leave keyword arguments open.
from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from kvcr_actors.lab.sweeping import BELADY, INFINITE, Sweep

_BOUNDS = {BELADY: ("black", "-"), INFINITE: ("grey", ":")}


def draw_sweep(found: Sweep, target: Path, suffix: str) -> None:
    """Draw into `target` in the format that `suffix` (`.png`, `.svg`, `.pdf`) names."""
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, policy in enumerate(dict.fromkeys(row.policy for row in found.rows)):
        rows = sorted((row for row in found.rows if row.policy == policy), key=lambda row: row.capacity_pages)
        colour, style = _BOUNDS.get(policy, (f"C{index}", "-"))
        capacities, ratios = [row.capacity_pages for row in rows], [row.ratio for row in rows]
        axes.plot(capacities, ratios, style, color=colour, marker=".", label=policy)
    axes.set(
        title=f"{found.pages:,} pages asked for by {found.requests:,} requests",
        xlabel="capacity, pages",
        ylabel="hit ratio",
        xscale="log",
    )
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    figure.savefig(target, format=suffix.lower().removeprefix("."), dpi=150)
