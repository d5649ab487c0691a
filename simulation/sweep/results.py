"""The results of a sweep: each run's metrics, their mean and spread for each point, CSV files."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwater.common.errors import SettingsError, StateError
from headwater.common.parsed_text import json_of
from headwater.common.settings.fields import direction, split_criterion
from headwater.common.system.atomic_file import write_atomically
from headwater.simulation.sweep.grid import Point, SweepRun
from headwater.simulation.sweep.worker import RESULT

LOSS = "loss"
PREFERRED = ("test_accuracy", "test_loss", LOSS)
RUNS_FILE, POINTS_FILE = "runs.csv", "points.csv"


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundCost:
    """What one round took: bytes up and down, examples, and seconds of the devices' clock."""

    num_bytes: int
    num_examples: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A run that is complete, or that diverged, as it would again.

    ``curves`` maps each metric, and the training loss, to its values by round, without those that
    are not finite. ``costs`` has each round's; an earlier version's result has none.
    """

    run: SweepRun
    has_diverged: bool
    num_rounds: int
    curves: Mapping[str, Mapping[int, float]]
    costs: Mapping[int, RoundCost] = field(default_factory=dict)

    def last(self, metric: str) -> float | None:
        """Return the last value of a metric; None if it has no value or the run diverged."""
        curve = self.curves.get(metric)
        return list(curve.values())[-1] if curve and not self.has_diverged else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The results of one point of the grid; ``values`` are the seeds' last values of the metric."""

    point: Point
    num_runs: int
    results: tuple[Result, ...]
    values: tuple[float, ...]

    @property
    def num_diverged(self) -> int:
        """The number of seeds that diverged."""
        return sum(result.has_diverged for result in self.results)

    @property
    def mean(self) -> float | None:
        """The mean over the seeds; None without any value."""
        return statistics.fmean(self.values) if self.values else None

    @property
    def spread(self) -> float | None:
        """The sample standard deviation over the seeds; None with fewer than two values."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


def read_result(run: SweepRun) -> Result | None:
    """Return the result that a run has written; None if the run has not ended.

    Raises:
        StateError: the file exists and cannot be read.
    """
    path = run.folder / RESULT
    try:
        result = json_of(path.read_text(encoding="utf-8"))
        rounds = result["rounds"]
        curves: dict[str, dict[int, float]] = {}
        for row in rounds:
            for name, value in {LOSS: row["loss"], **row["metrics"]}.items():
                if value is not None:
                    curves.setdefault(name, {})[row["round"]] = value
        return Result(
            run=run,
            has_diverged=result["ended"] == "diverged",
            num_rounds=rounds[-1]["round"] if rounds else 0,
            curves=curves,
            costs={row["round"]: _cost_of(row) for row in rounds if "bytes_up" in row},
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(
            f"{path} cannot be read: {error}", remedy="remove the file, and the run is done again"
        ) from error


def _cost_of(row: Mapping[str, Any]) -> RoundCost:
    virtual = row["virtual_seconds"]
    return RoundCost(
        num_bytes=row["bytes_up"] + row["bytes_down"],
        num_examples=row["num_examples"],
        seconds=row["seconds"] if virtual is None else virtual,
    )


def check_metric(criterion: str | None) -> None:
    """Check the metric that a user names, as ``min:NAME``, ``max:NAME`` or ``NAME``.

    Raises:
        SettingsError: it has another form, or the name does not tell which values are better.
    """
    try:
        direction(criterion or LOSS)
    except ValueError as error:
        raise SettingsError(
            f"--metric {criterion}: {error}",
            remedy=f"write --metric min:{criterion}, or max:{criterion}",
        ) from error


def choose_metric(results: Sequence[Result], preferred: str | None) -> str:
    """Return the metric that compares points: the preferred one, or the first of ``PREFERRED``.

    Raises:
        SettingsError: no run has the preferred metric.
    """
    names = {name for result in results for name in result.curves}
    if preferred is None:
        return next((name for name in PREFERRED if name in names), LOSS)
    _, wanted = split_criterion(preferred)
    if names and wanted not in names:
        raise SettingsError(
            f"no run has the metric {wanted!r}", remedy=f"take one of {', '.join(sorted(names))}"
        )
    return wanted


def is_smaller_better(metric: str, preferred: str | None) -> bool:
    """Return whether smaller values of a metric are better, as the user says or by its name."""
    if preferred is not None and split_criterion(preferred)[1] == metric:
        return direction(preferred) == "min"
    return direction(metric) == "min"


def summarize(
    runs: Sequence[SweepRun],
    results: Sequence[Result],
    metric: str,
    preferred: str | None = None,
) -> list[Summary]:
    """Return a summary of each point, best first; points without a value come last."""
    runs_of: dict[str, list[SweepRun]] = {}
    for run in runs:
        runs_of.setdefault(json.dumps(run.point), []).append(run)
    results_of: dict[str, list[Result]] = {point: [] for point in runs_of}
    for result in results:
        results_of[json.dumps(result.run.point)].append(result)
    summaries = [
        Summary(
            point=members[0].point,
            num_runs=len(members),
            results=tuple(results_of[key]),
            values=tuple(v for r in results_of[key] if (v := r.last(metric)) is not None),
        )
        for key, members in runs_of.items()
    ]
    sign = 1 if is_smaller_better(metric, preferred) else -1
    return sorted(summaries, key=lambda one: math.inf if one.mean is None else sign * one.mean)


def short_names(points: Sequence[Point]) -> dict[str, str]:
    """Return a title for each setting that varies: its last word, or all of it where two agree."""
    keys = [key for key in points[0] if len({str(point[key]) for point in points}) > 1]
    words = [key.rpartition(".")[2] for key in keys]
    return {
        key: word if words.count(word) == 1 else key for key, word in zip(keys, words, strict=True)
    }


def write_tables(
    folder: Path, summaries: Sequence[Summary], results: Sequence[Result], metric: str
) -> None:
    """Write ``runs.csv``, a row per run, and ``points.csv``, a row per point.

    Raises:
        StateError: the folder cannot be written.
    """
    names = sorted({name for result in results for name in result.curves})
    runs: list[list[tuple[str, Any]]] = [
        [
            *result.run.point.items(),
            ("seed", result.run.seed),
            ("ended", "diverged" if result.has_diverged else "whole"),
            ("rounds", result.num_rounds),
            *((name, result.last(name)) for name in names),
            ("folder", result.run.folder),
        ]
        for result in results
    ]
    points: list[list[tuple[str, Any]]] = [
        [
            *one.point.items(),
            ("seeds", len(one.values)),
            ("planned", one.num_runs),
            ("diverged", one.num_diverged),
            (f"{metric}_mean", one.mean),
            (f"{metric}_spread", one.spread),
            (f"{metric}_min", min(one.values, default=None)),
            (f"{metric}_max", max(one.values, default=None)),
        ]
        for one in summaries
    ]
    try:
        for path, rows in ((folder / RUNS_FILE, runs), (folder / POINTS_FILE, points)):
            text = io.StringIO()
            writer = csv.writer(text, lineterminator="\n")
            writer.writerow(name for name, _ in rows[0])
            writer.writerows([value for _, value in row] for row in rows)  # None: an empty cell
            write_atomically(path, text.getvalue().encode())
    except OSError as error:
        raise StateError(f"cannot write the tables in {folder}: {error.strerror}") from error
