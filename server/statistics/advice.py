"""What a run's statistics say to people: a table, and the classes that are rare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from headwater.common.errors import StateError
from headwater.common.parsed_text import result_in
from headwater.common.statistics.kinds import SURE, FoundCounts, FoundMoments
from headwater.common.system.printable import printable

FILE = "statistics.json"
IMBALANCE = 2.0
"""A label is named as rare if the most frequent one occurs more than so many times as often."""
MAX_ROWS = 40


def advice(found: Mapping[str, Any]) -> list[str]:
    """Return a line for each column that needs a look.

    Those are numbers whose spread is hardly known within their bounds, and labels that occur unlike
    often, with weights.
    """
    lines = []
    for name, one in found.items():
        if isinstance(one, FoundMoments):
            lines += _of_spread(name, one)
        if not isinstance(one, FoundCounts):
            continue
        sure = SURE * one.noise  # a count below it may be noise alone
        there = {label: n for label, n in zip(one.labels, one.counts, strict=True) if n > sure}
        if not there or max(there.values()) <= IMBALANCE * min(there.values()):
            continue
        most, least = max(there, key=there.__getitem__), min(there, key=there.__getitem__)
        total = sum(there.values())
        weights = ", ".join(f"{one:.3g}" for one in one.weights.tolist()[:MAX_ROWS])
        more = ", ..." if len(one.labels) > MAX_ROWS else ""
        lines.append(
            f"{name}: {least!r} is {there[least] / total:.1%} of all and {most!r} "
            f"{there[most] / total:.1%}; weights with which all count alike, as of a cross "
            f"entropy: [{weights}{more}]"
        )
    return lines


def _of_spread(name: str, one: FoundMoments) -> list[str]:
    pairs = zip(one.variances, one.resolution, strict=True)
    narrow = [at for at, (variance, least) in enumerate(pairs) if variance < least * least]
    if not narrow:
        return []
    which = "" if len(one.num) == 1 else f"[{', '.join(map(str, narrow[:MAX_ROWS]))}]"
    why = (
        "the noise hides how far the values spread, or they spread over less than a 256th of the "
        "bounds"
        if one.noise
        else "the values spread over less than a 256th of the bounds"
    )
    return [
        f"{name}{which}: {why}, so that their standard deviation is hardly known, or taken for 0, "
        "and scaled() makes them 0: give narrower bounds, unless they are the same in all examples"
    ]


def read_statistics(folder: Path) -> dict[str, Any]:
    """Return what a run has measured, as plain data.

    Raises:
        StateError: the run has measured nothing, or the file cannot be read.
    """
    absent = StateError(
        f"there is no {folder / FILE}: the run has not measured its examples",
        remedy="start it with --statistics",
    )
    return result_in(folder / FILE, absent=absent)


def as_table(found: Mapping[str, Any]) -> RenderableType:
    """Return plain data of statistics as tables: of numbers, of histograms, of labels."""
    parts: list[RenderableType] = []
    numbers = {name: one for name, one in found.items() if "means" in one}
    if numbers:
        parts.append(_of_numbers(numbers))
    for name, one in found.items():
        if "edges" in one:
            edges = one["edges"]
            parts_of = zip(edges[:-1], edges[1:], one["counts"], strict=True)
            rows = [(f"{low:g} to {high:g}", number) for low, high, number in parts_of]
            beyond = {"below": "num_below", "above": "num_above", "missing": "num_missing"}
            rows += [(word, one[key]) for word, key in beyond.items() if one[key]]
            parts.append(_of_counts(name, "from", rows))
        elif "labels" in one:
            rows = [(str(label), n) for label, n in zip(one["labels"], one["counts"], strict=True)]
            rows += [("other", one["num_other"])] if one["num_other"] else []
            parts.append(_of_counts(name, "label", rows))
            labels = FoundCounts(**one)
            parts += [escape(printable(line)) for line in advice({name: labels})]
    noises = {one.get("noise", 0.0) for one in found.values()}
    if any(noises):
        parts.append(f"each count has noise with a standard deviation of {max(noises):.3g}")
    return Group(*parts)


def _of_numbers(found: Mapping[str, Any]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("numbers", overflow="fold")
    for title in ("values", "mean", "std", "least", "largest", "missing", "cut"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, one in found.items():
        size = len(one["num"])
        for at in range(min(size, MAX_ROWS)):
            variance = one["variances"][at]
            table.add_row(
                escape(printable(name if size == 1 else f"{name}[{at}]")),
                f"{one['num'][at]:,}",
                _number(one["means"][at]),
                _number(None if variance is None else variance**0.5),
                _number(one["lowest"][at]),
                _number(one["highest"][at]),
                f"{one['num_missing'][at]:,}",
                f"{one['num_below'][at] + one['num_above'][at]:,}",
            )
        if size > MAX_ROWS:
            table.add_row(escape(printable(f"{name}: {size - MAX_ROWS:,} more")))
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _of_counts(name: str, title: str, rows: Sequence[tuple[str, int]]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column(escape(printable(f"{name}: {title}")), overflow="fold")
    table.add_column("number", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    total = max(sum(number for _, number in rows), 1)
    for label, number in rows[:MAX_ROWS]:
        table.add_row(escape(printable(label)), f"{number:,}", f"{number / total:.1%}")
    if len(rows) > MAX_ROWS:
        table.add_row(f"{len(rows) - MAX_ROWS:,} more")
    return table
