"""A sweep's plot: the metric over the rounds, and where each point of the grid ended."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headwater.simulation.sweep.grid import Point
from headwater.simulation.sweep.results import LOSS, Summary, short_names

log = logging.getLogger(__name__)

PLOT = "sweep.png"
SHOWN = 10  # points, the best ones, that have a colour and a name


def draw_sweep(folder: Path, summed: Sequence[Summary], metric: str) -> Path | None:
    """Draw the best points' curves, mean over the seeds and their range, and all last values.

    None if there is nothing to draw, or nothing to draw it with.
    """
    drawn = [one for one in summed if one.values][:SHOWN]
    if not drawn:
        return None
    if importlib.util.find_spec("matplotlib") is None:
        log.warning("no %s: pip install 'headwater[server]' draws one", PLOT)
        return None
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, max(3.4, 1.2 + 0.3 * len(drawn))), layout="constrained")
    curves, ends = figure.subplots(1, 2)
    names = short_names([one.point for one in summed])
    for place, one in enumerate(drawn):
        colour = f"C{place}"
        _draw_curve(curves, one, metric, colour)
        _draw_end(ends, one, place, colour)
    shown = metric.replace("_", " ")
    of_all = len([one for one in summed if one.values])
    best = f", the best {SHOWN} of {of_all}" if of_all > SHOWN else ""
    curves.set(title=f"{shown}: mean and range over seeds", xlabel="round")
    if metric.endswith(LOSS):
        curves.set_yscale("log")
    ends.set(title=f"{shown} at the end{best}", yticks=range(len(drawn)))
    ends.set_yticklabels([named(one.point, names) for one in drawn])
    ends.invert_yaxis()
    for axes in (curves, ends):
        axes.spines[["top", "right"]].set_visible(False)
    path = folder / PLOT
    figure.savefig(path, dpi=120)
    return path


def named(point: Point, names: dict[str, str]) -> str:
    """Return a point in words."""
    return ", ".join(f"{name} {point[key]}" for key, name in names.items()) or "as it is"


def _draw_curve(axes: Any, one: Summary, metric: str, colour: str) -> None:
    """Draw the mean at the rounds that all seeds have a value for."""
    found = [dict(result.curves.get(metric, ())) for result in one.results]
    found = [curve for curve in found if curve]
    rounds = sorted(set.intersection(*(set(curve) for curve in found)))
    columns = [[curve[number] for curve in found] for number in rounds]
    axes.plot(rounds, [sum(column) / len(column) for column in columns], color=colour)
    if len(found) > 1:
        low, high = [min(column) for column in columns], [max(column) for column in columns]
        axes.fill_between(rounds, low, high, color=colour, alpha=0.2, linewidth=0)


def _draw_end(axes: Any, one: Summary, place: int, colour: str) -> None:
    axes.plot(one.values, [place] * len(one.values), "o", color=colour, alpha=0.4)
    axes.plot([one.mean], [place], "|", color=colour, markersize=16, markeredgewidth=2)
