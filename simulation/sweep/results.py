"""What a sweep came to: each run's last metrics, and over the seeds of a point mean and spread."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.common.errors import SettingsError, StateError
from headwater.common.system.atomic_file import write_whole
from headwater.simulation.sweep.grid import Point, SweptRun
from headwater.simulation.sweep.worker import RESULT

LOSS = "loss"
PREFERRED = ("test_accuracy", "test_loss", LOSS)
RUNS_FILE, POINTS_FILE = "runs.csv", "points.csv"


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A run that has ended: as it should, or by diverging, which it would do again.

    ``curves`` are the points (round, value) of each metric, the training loss among them; what is
    not finite is left out.
    """

    run: SweptRun
    has_diverged: bool
    rounds: int
    curves: Mapping[str, tuple[tuple[int, float], ...]]

    def last(self, metric: str) -> float | None:
        """Return the last value of a metric; None if it has none, or has diverged."""
        curve = self.curves.get(metric)
        return curve[-1][1] if curve and not self.has_diverged else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """A point of the grid: what its seeds came to in one metric.

    ``spread`` is the sample's standard deviation; None with fewer than two values.
    """

    point: Point
    num_runs: int
    num_diverged: int
    values: tuple[float, ...]
    results: tuple[Result, ...]

    @property
    def mean(self) -> float | None:
        """The mean over the seeds; None without any."""
        return math.fsum(self.values) / len(self.values) if self.values else None

    @property
    def spread(self) -> float | None:
        """The standard deviation over the seeds."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


def result_of(run: SweptRun) -> Result | None:
    """Return what a run left; None if it has not ended.

    Raises:
        StateError: the file is there and cannot be read.
    """
    path = run.folder / RESULT
    try:
        told = json.loads(path.read_text())
        return Result(
            run=run,
            has_diverged=told["ended"] == "diverged",
            rounds=told["rounds"][-1]["round"] if told["rounds"] else 0,
            curves=_curves(told["rounds"]),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(
            f"{path} cannot be read: {error}", remedy="remove it: its run is then done again"
        ) from error


def _curves(rounds: Sequence[Mapping[str, Any]]) -> dict[str, tuple[tuple[int, float], ...]]:
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in rounds:
        for name, value in {LOSS: row["loss"], **row["metrics"]}.items():
            if value is not None:
                curves.setdefault(name, []).append((row["round"], value))
    return {name: tuple(curve) for name, curve in curves.items()}


def metric_of(results: Sequence[Result], asked: str | None) -> str:
    """Return the metric by which points are compared: the one asked for, or the best there is.

    Raises:
        SettingsError: no run has the one that was asked for.
    """
    found = {name for result in results for name in result.curves}
    if asked is not None and found and asked not in found:
        raise SettingsError(
            f"no run has the metric {asked!r}", remedy=f"take one of {', '.join(sorted(found))}"
        )
    return asked or next((name for name in PREFERRED if name in found), LOSS)


def is_less_better(metric: str) -> bool:
    """Whether the smaller value is the better one: it is of losses."""
    return metric.endswith(LOSS)


def summaries(runs: Sequence[SweptRun], results: Sequence[Result], metric: str) -> list[Summary]:
    """Return the points of a sweep, best first; those without a value come last, as they stand."""
    by_point: dict[str, list[SweptRun]] = {}
    for run in runs:
        by_point.setdefault(_key(run), []).append(run)
    found = [
        _summary(members, [r for r in results if _key(r.run) == key], metric)
        for key, members in by_point.items()
    ]
    sign = 1 if is_less_better(metric) else -1
    return sorted(found, key=lambda one: math.inf if one.mean is None else sign * one.mean)


def _key(run: SweptRun) -> str:
    return json.dumps(run.point)


def _summary(runs: Sequence[SweptRun], results: Sequence[Result], metric: str) -> Summary:
    values = [value for result in results if (value := result.last(metric)) is not None]
    return Summary(
        point=runs[0].point,
        num_runs=len(runs),
        num_diverged=sum(result.has_diverged for result in results),
        values=tuple(values),
        results=tuple(results),
    )


def short_names(points: Sequence[Point]) -> dict[str, str]:
    """Return a title for each setting that varies: its last word, where that is its own."""
    keys = [key for key in points[0] if len({str(point[key]) for point in points}) > 1]
    words = [key.rpartition(".")[2] for key in keys]
    return {
        key: word if words.count(word) == 1 else key for key, word in zip(keys, words, strict=True)
    }


def write_tables(
    folder: Path, summed: Sequence[Summary], results: Sequence[Result], metric: str
) -> None:
    """Write one CSV of the runs and one of the points.

    Raises:
        StateError: the folder cannot be written.
    """
    keys = list(summed[0].point)
    names = sorted({name for result in results for name in result.curves})
    runs = [
        [
            *(result.run.point[key] for key in keys),
            result.run.seed,
            "diverged" if result.has_diverged else "whole",
            result.rounds,
            *(result.last(name) for name in names),
            result.run.folder,
        ]
        for result in results
    ]
    points = [
        [
            *(one.point[key] for key in keys),
            len(one.values),
            one.num_runs,
            one.num_diverged,
            one.mean,
            one.spread,
            min(one.values, default=None),
            max(one.values, default=None),
        ]
        for one in summed
    ]
    counts = ["seeds", "planned", "diverged"]
    measures = [f"{metric}_{what}" for what in ("mean", "spread", "min", "max")]
    try:
        _write(folder / RUNS_FILE, [*keys, "seed", "ended", "rounds", *names, "folder"], runs)
        _write(folder / POINTS_FILE, [*keys, *counts, *measures], points)
    except OSError as error:
        raise StateError(f"cannot write the tables in {folder}: {error.strerror}") from error


def _write(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)  # csv writes nothing for None
    write_whole(path, text.getvalue().encode())
