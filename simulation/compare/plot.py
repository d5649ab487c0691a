"""The plot of a comparison: the metric by rounds, bytes, examples and seconds."""

from __future__ import annotations

import importlib.util
import logging
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headwater.common.system.printable import plot_label
from headwater.simulation.compare.budget import RESOURCES, Resource
from headwater.simulation.compare.standing import Standing

log = logging.getLogger(__name__)

PLOT = "compare.png"
TITLES: dict[Resource, tuple[str, float]] = {
    "rounds": ("rounds", 1.0),
    "bytes": ("MB up and down", 1e6),
    "examples": ("examples", 1.0),
    "seconds": ("seconds of the devices' clock", 1.0),
}


def draw_comparison(
    folder: Path, standings: Sequence[Standing], *, metric: str, target: float | None
) -> Path | None:
    """Draw each candidate's median and range over the seeds against all four resources.

    Returns None if there is no run to draw, or if matplotlib is not installed.
    """
    shown = [one for one in standings if any(run.values for run in one.runs)]
    if not shown:
        return None
    if importlib.util.find_spec("matplotlib") is None:
        log.warning("no %s: it needs matplotlib (pip install 'headwater[server]')", PLOT)
        return None
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib.figure import Figure

    words = plot_label(metric.replace("_", " "))
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    for axes, resource in zip(figure.subplots(2, 2, sharey=True).flat, RESOURCES, strict=True):
        for number, one in enumerate(shown):
            _draw_curve(axes, one, resource, f"C{number}")
        if target is not None:
            axes.axhline(target, color="0.6", linewidth=0.8, linestyle=":")
        title, _ = TITLES[resource]
        axes.set(xlabel=title, ylabel=words if resource in RESOURCES[::2] else "")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False, loc="best")
    path = folder / PLOT
    figure.savefig(path, dpi=120)
    return path


def _draw_curve(axes: Any, one: Standing, resource: Resource, colour: str) -> None:
    """Draw the median and the range wherever every seed has a value."""
    runs = [run for run in one.runs if run.values]
    _, unit = TITLES[resource]
    first = max(run.spent[0][resource] for run in runs)
    last = min(run.spent[-1][resource] for run in runs)
    ends = sorted({cost[resource] for run in runs for cost in run.spent})
    amounts = [amount for amount in ends if first <= amount <= last]
    found = [[run.at(resource, amount) for run in runs] for amount in amounts]
    columns = [[value for value in column if value is not None] for column in found]
    places = [amount / unit for amount in amounts]
    medians = [statistics.median(column) for column in columns]
    axes.plot(places, medians, color=colour, label=one.candidate.name)
    if len(runs) > 1:
        low, high = [min(column) for column in columns], [max(column) for column in columns]
        axes.fill_between(places, low, high, color=colour, alpha=0.2, linewidth=0)
