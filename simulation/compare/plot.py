"""The plot of a comparison: the metric by rounds, bytes, examples and seconds."""

from __future__ import annotations

import importlib.util
import logging
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.common.system.printable import plot_label
from headwater.server.operations.curves import MIN_LOG_RATIO, scale_if_far_apart, short_ticks
from headwater.simulation.compare.budget import RESOURCES, Resource
from headwater.simulation.compare.standing import Standing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

PLOT = "compare.png"
TITLES: dict[Resource, tuple[str, float]] = {
    "rounds": ("rounds", 1.0),
    "bytes": ("MB up and down", 1e6),
    "examples": ("examples", 1.0),
    "seconds": ("seconds of the devices' clock", 1.0),
}


# Shares of a panel: the room for names on the right, and a line of small text.
NAMES_SHARE, LINE_SHARE = 0.28, 0.05


def draw_comparison(
    folder: Path, standings: Sequence[Standing], *, metric: str, target: float | None
) -> Path | None:
    """Draw each candidate's median and range over the seeds against all four resources.

    Bytes, examples and seconds have a logarithmic axis where candidates need far more than others.

    Returns None if there is no run to draw, or if matplotlib is not installed.
    """
    shown = [one for one in standings if any(run.values for run in one.runs)]
    if not shown:
        return None
    if importlib.util.find_spec("matplotlib") is None:
        log.warning("no %s: it needs matplotlib (pip install 'headwater[server]')", PLOT)
        return None
    path = folder / PLOT
    comparison_figure(shown, metric=metric, target=target).savefig(path, dpi=120)
    return path


def comparison_figure(
    standings: Sequence[Standing], *, metric: str, target: float | None
) -> Figure:
    """Return the figure of candidates that have runs with values."""
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib.figure import Figure

    words = plot_label(metric.replace("_", " "))
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    for axes, resource in zip(figure.subplots(2, 2, sharey=True).flat, RESOURCES, strict=True):
        for number, one in enumerate(standings):
            _draw_curve(axes, one, resource, f"C{number}")
        _make_room(axes, is_log=resource != "rounds" and _are_far_apart(axes))
        if target is not None:
            axes.axhline(target, color="0.6", linewidth=0.8, linestyle=":")
        title, _ = TITLES[resource]
        axes.set(xlabel=title, ylabel=words if resource in RESOURCES[::2] else "")
        axes.spines[["top", "right"]].set_visible(False)
    if metric.endswith("loss"):
        scale_if_far_apart(figure.axes[0])
    figure.canvas.draw()  # settles the limits that the four panels share
    for axes in figure.axes:
        _name_lines(axes)
    return figure


def _are_far_apart(axes: Any) -> bool:
    """Return whether one line ends where another has hardly begun."""
    ends = [float(line.get_xdata()[-1]) for line in axes.get_lines()]
    return min(ends) > 0 and max(ends) / min(ends) >= MIN_LOG_RATIO


def _make_room(axes: Any, *, is_log: bool) -> None:
    """Set the x axis, with room for the names behind the lines' ends."""
    places = [place for line in axes.get_lines() for place in line.get_xdata()]
    low, high = min(places), max(places)
    if is_log and low > 0:
        axes.set_xscale("log")
        axes.set_xlim(low / (high / low) ** 0.03, high * (high / low) ** NAMES_SHARE)
    else:
        span = (high - low) or 1.0
        axes.set_xlim(low - 0.03 * span, high + NAMES_SHARE * span)
    short_ticks(axes.xaxis)
    axes.xaxis.set_minor_formatter(lambda value, _: "")


def _name_lines(axes: Any) -> None:
    """Write each line's name behind its end, in its colour, no two names over each other."""
    lines = [line for line in axes.get_lines() if not line.get_label().startswith("_")]
    to_share = axes.transScale + axes.transLimits
    ends = [to_share.transform((line.get_xdata()[-1], line.get_ydata()[-1])) for line in lines]
    order = sorted(range(len(lines)), key=lambda at: ends[at][1])
    for at, height in zip(order, apart([ends[at][1] for at in order]), strict=True):
        axes.annotate(
            lines[at].get_label(),
            (ends[at][0] + 0.012, height),
            xycoords="axes fraction",
            color=lines[at].get_color(),
            fontsize="small",
            va="center",
            bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.5},
        )


def apart(heights: Sequence[float]) -> list[float]:
    """Return ascending heights, moved so that each is a line of text above the one before.

    As far as they have room, they stay below 1.
    """
    found: list[float] = []
    for height in heights:
        found.append(max(height, found[-1] + LINE_SHARE) if found else height)
    ceiling = 1.0
    for at in reversed(range(len(found))):
        found[at] = min(found[at], ceiling)
        ceiling = found[at] - LINE_SHARE
    return found


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
