"""Draws curves.png: loss, metrics, K and, if it was followed, the noise scale over the rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
PANEL_INCHES, HEIGHT_INCHES = 3.7, 3.4


def draw_curves(rows: Sequence[Row], path: Path) -> None:
    """Draw the ``curves`` into a PNG file.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    curves(rows).savefig(path, dpi=120)


def curves(rows: Sequence[Row]) -> Figure:
    """Draw rows of rounds.jsonl, at least one; a fourth panel shows a noise scale that K followed.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    panels = [_draw_loss, _draw_metrics, _draw_steps]
    if any(row.get("target_by") == "noise scale" for row in rows):
        panels.append(_draw_batch)
    width = PANEL_INCHES * len(panels)
    figure = Figure(figsize=(width, HEIGHT_INCHES))
    # Margins in inches: measuring all labels for them would take as long as drawing the figure.
    margins = {"left": 0.8 / width, "right": 1 - 0.1 / width, "bottom": 0.15, "top": 0.9}
    subplots = figure.subplots(1, len(panels), gridspec_kw={**margins, "wspace": 0.22})
    for draw, axes in zip(panels, subplots, strict=True):
        draw(axes, rows)
        axes.set(xlabel="round")
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_loss(axes: Any, rows: Sequence[Row]) -> None:
    losses = [math.nan if row["loss"] is None else row["loss"] for row in rows]
    axes.plot(_rounds(rows), losses, label="training")
    for name in ("test_loss", "held_out_loss"):
        _plot_metric(axes, rows, name, name.removesuffix("_loss").replace("_", " "))
    values = [value for line in axes.get_lines() for value in line.get_ydata()]
    scale = "linear" if any(value <= 0 for value in values) else "log"
    axes.set(title="loss per unit of weight", yscale=scale)
    axes.legend(frameon=False)


def _draw_metrics(axes: Any, rows: Sequence[Row]) -> None:
    names = sorted({name for row in rows for name in row["metrics"] if not name.endswith("_loss")})
    for name in names:
        _plot_metric(axes, rows, name, name.replace("_", " "))
    axes.set(title="metrics")
    if names:
        axes.legend(frameon=False)


def _draw_steps(axes: Any, rows: Sequence[Row]) -> None:
    """Draw the clients' accumulation steps; in a masked round, the plans'."""
    steps = [
        [client["accumulation_steps"] for client in row["clients"]]
        + [client["planned_steps"] for client in row.get("masked_clients", [])]
        for row in rows
    ]
    low, high = [min(s) for s in steps], [max(s) for s in steps]
    axes.fill_between(_rounds(rows), low, high, alpha=0.3, label="K, min to max")
    axes.plot(_rounds(rows), [sum(s) / len(s) for s in steps], label="K, mean")
    axes.set(title="accumulation steps per device")
    axes.legend(frameon=False)


def _draw_batch(axes: Any, rows: Sequence[Row]) -> None:
    """Draw the effective batch and the noise scale, both in units of weight."""
    axes.plot(_rounds(rows), [row["weight"] for row in rows], label="effective batch")
    # A round without an estimate leaves a gap.
    scale = [math.nan if row["noise_scale"] is None else row["noise_scale"] for row in rows]
    axes.plot(_rounds(rows), scale, label="noise scale")
    axes.set(title="weight per round")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.legend(frameon=False)


def _plot_metric(axes: Any, rows: Sequence[Row], name: str, label: str) -> None:
    points = [
        (row["round"], row["metrics"][name]) for row in rows if row["metrics"].get(name) is not None
    ]
    if points:
        axes.plot(*zip(*points, strict=True), label=label)


def _rounds(rows: Sequence[Row]) -> list[int]:
    return [row["round"] for row in rows]
