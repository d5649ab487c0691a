"""The plot of a sweep: the metric by round, and its last value for each point of the grid."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headwater.common.system.printable import plot_label
from headwater.simulation.sweep.grid import Point
from headwater.simulation.sweep.results import LOSS, Summary, short_names

log = logging.getLogger(__name__)

PLOT = "sweep.png"
NUM_SHOWN = 10  # the best points, each with a colour and a name


def draw_sweep(folder: Path, summaries: Sequence[Summary], metric: str) -> Path | None:
    """Draw the best points' curves (mean and range over the seeds) and their last values.

    Returns None if no point has a value, or if matplotlib is not installed.
    """
    with_values = [one for one in summaries if one.values]
    shown = with_values[:NUM_SHOWN]
    if not shown:
        return None
    if importlib.util.find_spec("matplotlib") is None:
        log.warning("no %s: it needs matplotlib (pip install 'headwater[server]')", PLOT)
        return None
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, max(3.4, 1.2 + 0.3 * len(shown))), layout="constrained")
    curves, last_values = figure.subplots(1, 2)
    names = short_names([one.point for one in summaries])
    for row, one in enumerate(shown):
        _draw_curve(curves, one, metric, f"C{row}")
        last_values.plot(one.values, [row] * len(one.values), "o", color=f"C{row}", alpha=0.4)
        last_values.plot([one.mean], [row], "|", color=f"C{row}", markersize=16, markeredgewidth=2)
    title = plot_label(metric.replace("_", " "))
    total = len(with_values)
    best = f", the best {NUM_SHOWN} of {total}" if total > NUM_SHOWN else ""
    curves.set(title=f"{title}: mean and range over seeds", xlabel="round")
    if metric.endswith(LOSS):
        curves.set_yscale("log")
    last_values.set(title=f"{title} at the end{best}", yticks=range(len(shown)))
    last_values.set_yticklabels([plot_label(describe_point(one.point, names)) for one in shown])
    last_values.invert_yaxis()
    for axes in (curves, last_values):
        axes.spines[["top", "right"]].set_visible(False)
    path = folder / PLOT
    figure.savefig(path, dpi=120)
    return path


def describe_point(point: Point, names: dict[str, str]) -> str:
    """Return a point in words: each setting that varies, with its value."""
    return ", ".join(f"{name} {point[key]}" for key, name in names.items()) or "as it is"


def _draw_curve(axes: Any, one: Summary, metric: str, colour: str) -> None:
    """Draw the mean and the range at the rounds for which every seed has a value."""
    curves = [curve for result in one.results if (curve := result.curves.get(metric))]
    rounds = sorted(set.intersection(*(set(curve) for curve in curves)))
    columns = [[curve[number] for curve in curves] for number in rounds]
    axes.plot(rounds, [sum(column) / len(column) for column in columns], color=colour)
    if len(curves) > 1:
        low, high = [min(column) for column in columns], [max(column) for column in columns]
        axes.fill_between(rounds, low, high, color=colour, alpha=0.2, linewidth=0)
