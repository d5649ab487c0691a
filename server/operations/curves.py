"""Draws curves.png: loss, metrics, time, devices and left-out examples over a run's rounds."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from headwater.common.system.printable import plot_label
from headwater.common.user_code.run_scope import PREFIX
from headwater.common.wording import counted
from headwater.server.rounds.round_row import figure_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
MAX_COLUMNS, PANEL_INCHES, HEIGHT_INCHES, TITLE_INCHES = 4, 3.9, 3.1, 0.4
# More names than these could not be read: the other devices are drawn together.
MAX_LINES, MAX_BARS, MAX_METRICS = 5, 8, 6
FEW_ROUNDS = 12
"""So few rounds have a bar each for K."""
MAX_NAME_CHARACTERS = 34
# A logarithmic axis for a smaller range has ticks that are hard to read.
MIN_LOG_RATIO, MAX_LOG_RATIO = 5.0, 1e12
TIME_UNITS = (("days", 86_400.0), ("hours", 3_600.0), ("minutes", 60.0), ("seconds", 1.0))


def curves(rows: Sequence[Row], *, task: str | None = None) -> Figure:
    """Draw rows of rounds.jsonl, at least one: a title, and the panels that have something to show.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    panels = [draw for draw, is_shown in PANELS if is_shown(rows)]
    num_lines = -(-len(panels) // MAX_COLUMNS)
    num_columns = -(-len(panels) // num_lines)
    width, height = PANEL_INCHES * num_columns, HEIGHT_INCHES * num_lines + TITLE_INCHES
    figure = Figure(figsize=(width, height))
    # Margins in inches: measuring all labels for them would take as long as drawing the figure.
    # The widest tick label has six characters (``short_number``), which take half an inch.
    margins = {"left": 0.7 / width, "right": 1 - 0.15 / width}
    margins |= {"bottom": 0.5 / height, "top": 1 - (0.35 + TITLE_INCHES) / height}
    margins |= {"wspace": 0.22, "hspace": 0.42}
    subplots = figure.subplots(num_lines, num_columns, squeeze=False, gridspec_kw=margins)
    for axes in subplots.flat[len(panels) :]:
        axes.remove()
    for draw, axes in zip(panels, subplots.flat, strict=False):
        draw(axes, rows)
        axes.spines[["top", "right"]].set_visible(False)
    at = 1 - 0.22 / height
    figure.suptitle(run_title(rows, task), x=0.7 / width, y=at, ha="left", va="center")
    return figure


def run_title(rows: Sequence[Row], task: str | None) -> str:
    """Return the run's task, number of devices and rounds: "digits.py, 20 devices, 50 rounds"."""
    names = {name for row in rows for name in figure_of(row, "name")}
    parts = [counted(len(names), "device"), counted(rows[-1]["round"], "round")]
    name = _label((task or "").removeprefix(PREFIX).rpartition("/")[2])
    return ", ".join([name, *parts] if name else parts)


# Loss and metrics.


def _draw_loss(axes: Any, rows: Sequence[Row]) -> None:
    _draw_losses(axes, rows, _rounds(rows))
    _by_round(axes, "loss per unit of weight")


def _draw_loss_over_time(axes: Any, rows: Sequence[Row]) -> None:
    """Draw the loss over the time of the rounds: the devices' virtual time in a simulation."""
    virtual = [row.get("virtual_seconds") for row in rows]
    is_virtual = None not in virtual
    seconds = list(accumulate(virtual if is_virtual else [row["seconds"] for row in rows]))
    unit, size = next((unit for unit in TIME_UNITS if seconds[-1] >= 2 * unit[1]), TIME_UNITS[-1])
    _draw_losses(axes, rows, [second / size for second in seconds])
    axes.set(title="loss over time", xlabel=f"{'virtual time' if is_virtual else 'time'}, {unit}")
    short_ticks(axes.xaxis)
    short_ticks(axes.yaxis)


def _draw_losses(axes: Any, rows: Sequence[Row], at: Sequence[float]) -> None:
    losses = [math.nan if row["loss"] is None else row["loss"] for row in rows]
    _plot(axes, at, losses, "training")
    for name in ("test_loss", "held_out_loss"):
        _plot_metric(axes, rows, at, name, name.removesuffix("_loss").replace("_", " "))
    scale_if_far_apart(axes)
    axes.legend(frameon=False)


def _draw_metrics(axes: Any, rows: Sequence[Row]) -> None:
    names = _metric_names(rows)
    # The tests' metrics first: there may be more than a legend can name.
    names.sort(key=lambda name: name.startswith("train_"))
    for name in names[:MAX_METRICS]:
        _plot_metric(axes, rows, _rounds(rows), name, _label(name.replace("_", " ")))
    more = f" ({MAX_METRICS} of {len(names)})" if len(names) > MAX_METRICS else ""
    _by_round(axes, f"metrics{more}")
    axes.legend(frameon=False, fontsize="small")


def _metric_names(rows: Sequence[Row]) -> list[str]:
    return sorted({name for row in rows for name in row["metrics"] if not name.endswith("_loss")})


# The round's work.


def _draw_steps(axes: Any, rows: Sequence[Row]) -> None:
    """Draw the clients' accumulation steps; in a masked round, the plans'."""
    steps = [figure_of(row, "accumulation_steps") for row in rows]
    at, low, high = _rounds(rows), [min(s) for s in steps], [max(s) for s in steps]
    means = [sum(s) / len(s) for s in steps]
    if len(rows) <= FEW_ROUNDS:
        axes.bar(at, means, width=0.6, alpha=0.35, label="K, mean")
        if low != high:
            axes.vlines(at, low, high, label="K, min to max")
    else:
        axes.fill_between(at, low, high, alpha=0.3, label="K, min to max")
        _plot(axes, at, means, "K, mean")
    axes.set_ylim(0, 1.3 * max(*high, 1))
    _by_round(axes, "accumulation steps per device")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, loc="upper right", ncols=2)


def _draw_batch(axes: Any, rows: Sequence[Row]) -> None:
    """Draw the effective batch, and the noise scale if K followed it, both in units of weight."""
    _plot(axes, _rounds(rows), [row["weight"] for row in rows], "effective batch")
    if any(row.get("target_by") == "noise scale" for row in rows):
        # A round without an estimate leaves a gap.
        known = [row.get("noise_scale") for row in rows]
        scale = [math.nan if value is None else value for value in known]
        _plot(axes, _rounds(rows), scale, "noise scale")
    scale_if_far_apart(axes)
    _by_round(axes, "weight per round")
    axes.legend(frameon=False)


def _draw_left_out(axes: Any, rows: Sequence[Row]) -> None:
    """Draw the examples that devices left out, and the devices that are not in the sum.

    A private run releases no such number; it shows the privacy that it has spent.
    """
    if any(row.get("epsilon") is not None for row in rows):
        _draw_spent(axes, rows)
        return
    examples = [_num_left_out(row) for row in rows]
    devices = [len(row["left_out"]) + len(row["refused"]) for row in rows]
    _plot(axes, _rounds(rows), examples, "examples")
    if any(devices):
        _plot(axes, _rounds(rows), devices, "devices: too slow, lost or refused")
    axes.set_ylim(0, max(*examples, *devices, 1) * 1.3)
    _by_round(axes, "left out per round")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, loc="upper left")


def _draw_spent(axes: Any, rows: Sequence[Row]) -> None:
    epsilons = [math.nan if row.get("epsilon") is None else row["epsilon"] for row in rows]
    _plot(axes, _rounds(rows), epsilons, "epsilon")
    unit = rows[-1].get("privacy_unit") or "device"
    axes.set_ylim(bottom=0)
    _by_round(axes, f"privacy spent by each {unit}, at delta {rows[-1].get('delta') or 0:g}")


def _num_left_out(row: Row) -> int:
    known: int | None = row.get("num_examples_left_out")
    return sum(n or 0 for n in figure_of(row, "num_refused")) if known is None else known


# The devices.


def _draw_seconds(axes: Any, rows: Sequence[Row]) -> None:
    """Draw each device's seconds: a line for the slowest few, and a band for all others."""
    seconds: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        for name, value in zip(figure_of(row, "name"), figure_of(row, "seconds"), strict=True):
            seconds[name][row["round"]] = value
    names = sorted(seconds, key=lambda name: -statistics.fmean(seconds[name].values()))
    named = names if len(names) <= MAX_LINES + 1 else names[:MAX_LINES]
    others = names[len(named) :]
    for name in named:
        found = [seconds[name].get(number, math.nan) for number in _rounds(rows)]
        _plot(axes, _rounds(rows), found, _label(name))
    if others:
        _draw_others(axes, _rounds(rows), [seconds[name] for name in others])
    scale_if_far_apart(axes)
    _by_round(axes, "seconds per device")
    # The legend has the upper part of the panel to itself.
    (low, high), room = axes.get_ylim(), 0.15 * len(axes.get_lines())
    is_log = axes.get_yscale() == "log"
    axes.set_ylim(low, high * (high / low) ** room if is_log else high + room * (high - low))
    axes.legend(frameon=False, fontsize="small", loc="upper left")


def _draw_others(axes: Any, rounds: Sequence[int], others: Sequence[Mapping[int, float]]) -> None:
    found = [[one[number] for one in others if number in one] or [math.nan] for number in rounds]
    axes.fill_between(rounds, list(map(min, found)), list(map(max, found)), alpha=0.25, color="0.5")
    middle = [statistics.median(values) for values in found]
    axes.plot(rounds, middle, color="0.4", label=f"median of {len(others)} others")


def weight_shares(rows: Sequence[Row]) -> list[tuple[str, float]]:
    """Return the devices' names and shares of all weight, the largest first; they add up to 1.

    Of masked and private rounds the server knows no device's weight: the examples of the plans
    stand for it, which the server chose itself. Without any weight all shares are 0.
    """
    weights: defaultdict[str, float] = defaultdict(float)
    for row in rows:
        for name, weight in zip(figure_of(row, "name"), figure_of(row, "weight"), strict=True):
            weights[name] += weight
    total = math.fsum(weights.values()) or 1.0
    found = [(name, weight / total) for name, weight in weights.items()]
    return sorted(found, key=lambda one: -one[1])


def _draw_share(axes: Any, rows: Sequence[Row]) -> None:
    """Draw each device's share of all weight as a bar; in masked rounds the plans' examples."""
    shares = weight_shares(rows)
    num_named = len(shares) if len(shares) <= MAX_BARS + 1 else MAX_BARS
    bars = [(_label(name), share) for name, share in shares[:num_named]]
    others = shares[num_named:]
    if others:
        rest = math.fsum(share for _, share in others)
        bars.append((f"{len(others)} others, {rest / len(others):.2%} each", rest))
    axes.barh(range(len(bars)), [100 * share for _, share in bars], color="C0", alpha=0.35)
    for at, (label, share) in enumerate(bars):
        # Inside the axes, where a long name needs no margin.
        axes.annotate(f" {label}: {share:.1%}", (0, at), va="center", fontsize="small")
    lowest = max(len(bars), 5) - 0.4
    axes.set(title="share of all weight", xlabel="%", yticks=[], xlim=(0, None))
    axes.set_ylim(lowest, -0.6)
    short_ticks(axes.xaxis)


# Axes.


def _plot(axes: Any, at: Sequence[float], values: Sequence[float], label: str) -> None:
    """Plot a line; a value between two gaps, and a single round, are points."""
    axes.plot(at, values, label=label, marker="." if _has_single(values) else "", markersize=3)


def _has_single(values: Sequence[float]) -> bool:
    is_known = [False, *(not math.isnan(value) for value in values), False]
    return any(
        now and not before and not after
        for before, now, after in zip(is_known, is_known[1:], is_known[2:], strict=False)
    )


def _plot_metric(
    axes: Any, rows: Sequence[Row], at: Sequence[float], name: str, label: str
) -> None:
    """Plot a metric in the rounds that have it."""
    points = [
        (x, row["metrics"][name])
        for x, row in zip(at, rows, strict=True)
        if row["metrics"].get(name) is not None
    ]
    if points:
        found, values = zip(*points, strict=True)
        _plot(axes, found, values, label)


def scale_if_far_apart(axes: Any) -> None:
    """Make the y axis logarithmic where the values are positive and far apart."""
    lines = [value for line in axes.get_lines() for value in line.get_ydata()]
    known = [value for value in lines if math.isfinite(value)]
    if known and min(known) > 0 and MIN_LOG_RATIO <= max(known) / min(known) <= MAX_LOG_RATIO:
        from matplotlib.ticker import LogLocator, NullLocator

        axes.set_yscale("log")
        parts = (1, 2, 5) if max(known) / min(known) < 1e3 else (1,)
        axes.yaxis.set_major_locator(LogLocator(subs=parts, numticks=9))
        axes.yaxis.set_minor_locator(NullLocator())


def _by_round(axes: Any, title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set(title=title, xlabel="round")
    first, last = axes.dataLim.intervalx
    if first == last:
        axes.set_xlim(first - 1, last + 1)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    short_ticks(axes.xaxis)
    short_ticks(axes.yaxis)


def short_ticks(axis: Any) -> None:
    """Label an axis with ``short_number``."""
    axis.set_major_formatter(lambda value, _: short_number(value))


def short_number(value: float) -> str:
    """Return a tick's label of at most six characters: 0.025, 150, 12.5k, 3M, 1e-07."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}"
    if value and abs(value) < 1e-3:
        return f"{value:.0e}"
    return f"{value:.4g}"


def _label(text: str) -> str:
    return plot_label(text, max_characters=MAX_NAME_CHARACTERS)


def _rounds(rows: Sequence[Row]) -> list[int]:
    return [row["round"] for row in rows]


def _has_loss(rows: Sequence[Row]) -> bool:
    return any(row["loss"] is not None and math.isfinite(row["loss"]) for row in rows) or any(
        name.endswith("_loss") for row in rows for name in row["metrics"]
    )


def _has_left_out(rows: Sequence[Row]) -> bool:
    return any(
        row.get("epsilon") is not None or _num_left_out(row) or row["left_out"] or row["refused"]
        for row in rows
    )


Draw = Callable[[Any, Sequence[Row]], None]
PANELS: tuple[tuple[Draw, Callable[[Sequence[Row]], bool]], ...] = (
    (_draw_loss, _has_loss),
    (_draw_loss_over_time, _has_loss),
    (_draw_metrics, lambda rows: bool(_metric_names(rows))),
    (_draw_left_out, _has_left_out),
    (_draw_seconds, bool),
    (_draw_share, bool),
    (_draw_steps, bool),
    (_draw_batch, bool),
)
"""The panels, and whether each has something to show."""
