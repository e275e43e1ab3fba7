"""The picture of a replay: the share of blocks that each tier gave, over the requests."""

# pyright: reportUnknownMemberType=false
# matplotlib's own annotations leave keyword arguments open.
from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from kvcr_actors.replay.report import HitSeries
from kvcr_actors.types import Tier

BUCKETS = 60
_COLOURS = {Tier.DEVICE: "#2f6fab", Tier.HOST: "#6aaf6a", Tier.STORE: "#e0a030"}


def draw_hits(series: HitSeries, target: Path, suffix: str) -> None:
    """Draw stacked hit ratios into `target` in the format that `suffix` (`.png`, `.svg`, `.pdf`) names."""
    ends, ratios = series.ratios(BUCKETS)
    figure = Figure(figsize=(10, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.stackplot(
        [0, *ends],
        [[ratios[tier][0], *ratios[tier]] for tier in Tier],
        labels=[f"{tier} hits" for tier in Tier],
        colors=[_COLOURS[tier] for tier in Tier],
        step="pre",
    )
    axes.set(
        title="Where requested blocks were found",
        xlabel="requests finished",
        ylabel="share of blocks asked for",
        xlim=(0, ends[-1]),
        ylim=(0, 1),
    )
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), reverse=True, frameon=False)
    figure.savefig(target, format=suffix.lower().removeprefix("."), dpi=150)
