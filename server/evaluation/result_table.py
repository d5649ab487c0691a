"""What a test found, as people read it: lines for the log and the report, and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from headwater.common.errors import StateError
from headwater.common.parsed_text import result_in
from headwater.common.system.printable import printable, printable_name
from headwater.common.wording import counted, figure_text

FILE = "evaluation.json"
MAX_CLASSES, MAX_NAMES = 20, 5
"""Of a matrix that is printed whole, and of devices that a line names."""


def read_result(folder: Path) -> dict[str, Any]:
    """Read what a test has written into a folder.

    Raises:
        StateError: it has written nothing, or it cannot be read.
    """
    absent = StateError(
        f"there is no {folder / FILE}: no test on the devices has ended there",
        remedy="start it with headwater-server evaluate --on-devices",
    )
    return result_in(folder / FILE, absent=absent)


def summary(found: Mapping[str, Any]) -> list[str]:
    """Return what was found in a few lines."""
    examples = counted(found["num_examples"], "example")
    lines = [
        f"tested on {examples} of {counted(found['num_devices'], 'device')}"
        + (", under masks" if found["is_masked"] else "")
        + (f"; {found['num_left_out']:,} left out" if found["num_left_out"] else "")
    ]
    for one in found["results"]:
        parts = [f"{name} {_shown(value)}" for name, value in _figures(one).items()]
        lines.append(f"{one['model']}: {', '.join(parts)}")
    if (devices := found["devices"]) is not None:
        lines.append(
            f"the first model is better on {counted(devices['num_better'], 'device')}, worse on "
            f"{devices['num_worse']:,}, equal on {devices['num_equal']:,}"
        )
    if found["spread"] is None:
        lines.append(f"no spread over the devices: {found['why_no_spread']}")
    if far_off := found["far_off"]:
        some = ", ".join(far_off[:MAX_NAMES])
        lines.append(f"the figures of {some} are far from the others', and in the sums")
    if missing := found["not_evaluated"]:
        some = "; ".join(f"{name}: {why}" for name, why in list(missing.items())[:MAX_NAMES])
        lines.append(f"without {counted(len(missing), 'device')}: {some}")
    return lines


def as_table(found: Mapping[str, Any]) -> RenderableType:
    """Return the result as tables: figures, their spread, and what was counted of predictions."""
    head, *rest = summary(found)
    notes = rest[len(found["results"]) :]
    parts: list[RenderableType] = [Text(printable(head)), _of_figures(found["results"])]
    if found["spread"]:
        parts.append(_of_spread(found["spread"]))
    parts += [Text(printable(line)) for line in notes]
    for one in found["results"]:
        for name, counts in one["predictions"].items():
            title = printable(name if len(found["results"]) == 1 else f"{name}, {one['model']}")
            if "matrix" in counts:
                parts.append(_of_confusion(title, counts))
            elif "confidence" in counts:
                parts.append(_of_calibration(title, counts))
            else:
                parts.append(_of_roc(title, counts))
    return Group(*parts)


def report_lines(folder: Path) -> list[str]:
    """Return what the report of a run's folder says of its last test; nothing without one."""
    try:
        found = read_result(folder)
        return summary(found)
    except (StateError, KeyError, TypeError, AttributeError, ValueError):
        return []


def _figures(result: Mapping[str, Any]) -> dict[str, float | None]:
    """Return loss and metrics, and one number of each count of predictions."""
    found = {"loss": result["loss"], **result["metrics"]}
    for name, counts in result["predictions"].items():
        if "confidence" in counts:
            found[f"{name} error"] = counts["error"]
        elif "auc" in counts:
            areas = [one for one in counts["auc"] if one is not None]
            found[f"{name} AUC"] = sum(areas) / len(areas) if areas else None
        else:
            found[f"{name} accuracy"] = counts["accuracy"]
    return found


def _of_figures(results: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("model", overflow="fold", min_width=8)
    names = list(_figures(results[0]))
    for title in ("round", "weight", *names):
        table.add_column(_title(title), justify="right", no_wrap=True)
    for one in results:
        figures = _figures(one)
        table.add_row(
            escape(printable(one["model"])),
            "-" if one["round"] is None else f"{one['round']:,}",
            f"{one['weight']:,}",
            *(_shown(figures[name]) for name in names),
        )
    return table


def _of_spread(spread: Mapping[str, Mapping[str, float | None]]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for title in ("over the devices", "median", "worst tenth"):
        is_name = title == "over the devices"
        table.add_column(title, justify="left" if is_name else "right", no_wrap=True)
    for name, one in spread.items():
        table.add_row(_title(name), _shown(one["median"]), _shown(one["worst_tenth"]))
    return table


def _of_confusion(title: str, counts: Mapping[str, Any]) -> Table:
    matrix = counts["matrix"]
    is_whole = len(matrix) <= MAX_CLASSES
    table = Table(box=SIMPLE_HEAD)
    table.add_column(f"{escape(title)}: label", no_wrap=True)
    classes = [f"as {at}" for at in range(len(matrix))] if is_whole else []
    for column in (*classes, "examples", "recall", "precision", "F1"):
        table.add_column(column, justify="right", no_wrap=True)
    for label, row in enumerate(matrix):
        table.add_row(
            str(label),
            *([f"{number:,}" for number in row] if is_whole else []),
            f"{sum(row):,}",
            *(_shown(counts[name][label]) for name in ("recall", "precision", "f1")),
        )
    return table


def _of_calibration(title: str, counts: Mapping[str, Any]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column(f"{escape(title)}: probability", no_wrap=True)
    for column in ("predictions", "mean probability", "right"):
        table.add_column(column, justify="right", no_wrap=True)
    edges = counts["edges"]
    columns = (counts[name] for name in ("counts", "confidence", "accuracy"))
    rows = zip(edges[:-1], edges[1:], *columns, strict=True)
    for low, high, number, confidence, accuracy in rows:
        if number:
            table.add_row(
                f"{low:.3g} to {high:.3g}", f"{number:,}", _shown(confidence), _shown(accuracy)
            )
    return table


def _of_roc(title: str, counts: Mapping[str, Any]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column(f"{escape(title)}: class", no_wrap=True)
    for column in ("examples", "others", "AUC"):
        table.add_column(column, justify="right", no_wrap=True)
    columns = (counts[name] for name in ("classes", "positives", "negatives", "auc"))
    for label, positives, negatives, area in zip(*columns, strict=True):
        table.add_row(str(label), f"{sum(positives):,}", f"{sum(negatives):,}", _shown(area))
    return table


def _title(name: str) -> str:
    return escape(printable_name(name.replace("_", " ")))


def _shown(value: float | None) -> str:
    return "-" if value is None else figure_text(value)
