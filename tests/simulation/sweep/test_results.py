"""The results of a sweep: how points are compared, and the tables and the plot."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from headwater.common.errors import SettingsError, StateError
from headwater.simulation.sweep.command import run_sweep, table_of
from headwater.simulation.sweep.grid import Sweep, SweepRun, plan_runs
from headwater.simulation.sweep.plot import draw_sweep
from headwater.simulation.sweep.results import (
    POINTS_FILE,
    RUNS_FILE,
    Result,
    check_metric,
    choose_metric,
    is_smaller_better,
    read_result,
    short_names,
    summarize,
    write_tables,
)
from headwater.simulation.sweep.worker import RESULT

TASK = "tests/tasks.py:TwoLayers"
RATE, SIZE = "optimizer.learning_rate", "plan.micro_batch_size"
GRID: dict[str, list[Any]] = {RATE: [0.1, 0.2], SIZE: [4, 8, 16]}


@pytest.fixture(autouse=True)
def no_plot() -> None:
    """Draw plots, as these tests look at them."""


def runs_of(
    out: Path, grid: dict[str, list[Any]], *, seeds: tuple[int, ...] = (0, 1)
) -> list[SweepRun]:
    return plan_runs({"task": TASK}, Sweep(seeds=seeds, grid=grid), {}, out=out)


def results_of(runs: list[SweepRun]) -> list[Result]:
    return [result for run in runs if (result := read_result(run)) is not None]


def write_result(run: SweepRun, *values: float | None, ended: str = "whole") -> None:
    """Write the result of a run whose test loss took these values."""
    rounds = [
        {"round": number, "loss": 1.0, "weight": 8, "metrics": {"test_loss": value}}
        for number, value in enumerate(values, 1)
    ]
    run.folder.mkdir(parents=True)
    result = {"ended": ended, "message": "", "rounds": rounds}
    (run.folder / RESULT).write_text(json.dumps(result))


def sweep_runs(out: Path) -> list[SweepRun]:
    """Return a sweep of three points: good, better and diverged; two runs have no result."""
    runs = runs_of(out, {RATE: [0.1, 0.2, 0.3]})
    write_result(runs[0], 5.0, 3.0)
    write_result(runs[1], 5.0, 4.0)
    write_result(runs[2], 5.0, 1.0)
    write_result(runs[4], 5.0, None, ended="diverged")
    return runs


@pytest.mark.parametrize(
    ("metric", "preferred", "is_smaller"),
    [
        ("loss", None, True),
        ("test_accuracy", None, False),
        ("test_mae", "test_mae", True),
        ("test_wer", "test_wer", True),
        ("test_score", "min:test_score", True),
        ("test_score", "max:test_score", False),
        ("test_loss", "max:test_score", True),  # where no run has ended with the other
    ],
)
def test_which_values_are_better_follows_from_the_name_or_from_the_user(
    metric: str, preferred: str | None, is_smaller: bool
) -> None:
    check_metric(preferred)
    assert is_smaller_better(metric, preferred) is is_smaller


def test_a_metric_without_a_direction_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="whether lower or higher values") as caught:
        check_metric("test_score")
    assert "min:test_score" in caught.value.remedy
    with pytest.raises(SettingsError, match="whether lower or higher values"):
        run_sweep(
            None, grid={}, seeds=(0,), metric="score", jobs=1, out=tmp_path / "s", overrides={}
        )
    assert not (tmp_path / "s").exists()


def test_points_are_sorted_by_the_mean_and_diverged_points_come_last(
    tmp_path: Path,
) -> None:
    runs = sweep_runs(tmp_path)
    results = results_of(runs)
    assert choose_metric(results, None) == "test_loss"
    better, good, diverged = summarize(runs, results, "test_loss")
    assert (better.point, better.mean, better.spread) == ({RATE: 0.2}, 1.0, None)
    # The sample's deviation of 3 and 4: sqrt(2 x 0.25 / 1).
    assert good.mean == 3.5
    assert good.spread == pytest.approx(0.5**0.5)
    assert (diverged.mean, diverged.num_diverged, diverged.num_runs) == (None, 1, 2)


def test_points_are_sorted_downwards_by_an_accuracy(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, {RATE: [0.1, 0.2]}, seeds=(0,))
    for run, value in zip(runs, (0.5, 0.9), strict=True):
        write_result(run)
        row = {"round": 1, "loss": 1.0, "weight": 1, "metrics": {"test_accuracy": value}}
        result = {"ended": "whole", "message": "", "rounds": [row]}
        (run.folder / RESULT).write_text(json.dumps(result))
    results = results_of(runs)
    assert [one.mean for one in summarize(runs, results, "test_accuracy")] == [0.9, 0.5]


def test_a_missing_metric_is_refused_with_the_names_of_the_metrics(tmp_path: Path) -> None:
    results = results_of(sweep_runs(tmp_path))
    with pytest.raises(SettingsError, match="'f1'") as caught:
        choose_metric(results, "f1")
    assert "loss, test_loss" in caught.value.remedy


def test_an_unreadable_result_is_refused_by_its_path(tmp_path: Path) -> None:
    (run, _) = runs_of(tmp_path, {})
    write_result(run, 1.0)
    (run.folder / RESULT).write_text("{")
    with pytest.raises(StateError, match=r"result\.json cannot be read"):
        read_result(run)


def test_tables_and_plot_contain_every_run_that_has_ended(tmp_path: Path) -> None:
    runs = sweep_runs(tmp_path)
    results = results_of(runs)
    summaries = summarize(runs, results, "test_loss")
    write_tables(tmp_path, summaries, results, "test_loss")
    with (tmp_path / RUNS_FILE).open() as file:
        rows = list(csv.DictReader(file))
    assert [(row[RATE], row["seed"], row["ended"], row["test_loss"]) for row in rows] == [
        ("0.1", "0", "whole", "3.0"),
        ("0.1", "1", "whole", "4.0"),
        ("0.2", "0", "whole", "1.0"),
        ("0.3", "0", "diverged", ""),
    ]
    with (tmp_path / POINTS_FILE).open() as file:
        means = [(row[RATE], row["seeds"], row["test_loss_mean"]) for row in csv.DictReader(file)]
    assert means == [("0.2", "1", "1.0"), ("0.1", "2", "3.5"), ("0.3", "0", "")]
    plot = draw_sweep(tmp_path, summaries, "test_loss")
    assert plot is not None
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert table_of(summaries, "test_loss").row_count == 3


def test_nothing_is_drawn_if_no_run_has_a_value(tmp_path: Path) -> None:
    assert draw_sweep(tmp_path, summarize(runs_of(tmp_path, GRID), [], "loss"), "loss") is None


def test_a_column_is_titled_by_the_setting_s_last_word_if_no_other_setting_shares_it() -> None:
    one = {"a.x": 1, "b.x": 1, "c.y": 1, "d.z": 5}
    other = {"a.x": 2, "b.x": 2, "c.y": 2, "d.z": 5}
    assert short_names([one, other]) == {"a.x": "a.x", "b.x": "b.x", "c.y": "y"}
