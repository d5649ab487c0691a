"""A sweep's runs, where they lie, and what their results come to."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from headwater.common.errors import SettingsError, StateError
from headwater.simulation.sweep.command import table_of
from headwater.simulation.sweep.grid import Sweep, SweptRun, planned, points, read_sweep, slug
from headwater.simulation.sweep.plot import draw_sweep
from headwater.simulation.sweep.results import (
    POINTS_FILE,
    RUNS_FILE,
    metric_of,
    result_of,
    short_names,
    summaries,
    write_tables,
)
from headwater.simulation.sweep.worker import RESULT

TASK = "tests/tasks.py:TwoLayers"
RATE, SIZE = "optimizer.learning_rate", "plan.micro_batch_size"
GRID: dict[str, list[Any]] = {RATE: [0.1, 0.2], SIZE: [4, 8, 16]}


def runs_of(
    out: Path, grid: dict[str, list[Any]], *, seeds: tuple[int, ...] = (0, 1), **tree: Any
) -> list[SweptRun]:
    return planned({"task": TASK, **tree}, Sweep(seeds=seeds, grid=grid), {}, out=out)


def test_every_combination_is_run_with_every_seed_once(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, GRID)
    found = [
        (run.settings.optimizer.learning_rate, run.settings.plan.micro_batch_size, run.seed)
        for run in runs
    ]
    assert found == [(r, s, seed) for r in (0.1, 0.2) for s in (4, 8, 16) for seed in (0, 1)]
    assert all(run.settings.seed == run.seed for run in runs)
    assert len({run.folder for run in runs}) == len(runs)
    assert len({run.folder.parent for run in runs}) == 6


def test_an_empty_grid_is_one_point(tmp_path: Path) -> None:
    assert list(points({})) == [{}]
    assert [run.folder.name for run in runs_of(tmp_path, {})] == ["seed-0", "seed-1"]


def test_the_grid_lies_over_the_file_s_settings_and_leaves_the_others(tmp_path: Path) -> None:
    tree: dict[str, Any] = {"optimizer": {"name": "adam", "learning_rate": 7.0}, "rounds": 4}
    for run in runs_of(tmp_path, GRID, **tree):
        assert run.settings.optimizer.name == "adam"
        assert run.settings.optimizer.learning_rate == run.point[RATE]
        assert run.settings.rounds == 4


def test_a_run_keeps_its_folder_when_the_grid_grows_or_is_given_in_another_order(
    tmp_path: Path,
) -> None:
    before = {run.folder for run in runs_of(tmp_path, GRID)}
    grown: dict[str, list[Any]] = {RATE: [0.3, 0.2, 0.1], SIZE: [16, 8, 4]}
    after = {run.folder for run in runs_of(tmp_path, grown, seeds=(5, 1, 0))}
    assert before < after


def test_other_settings_or_another_task_s_content_are_another_run(tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    folders = set()
    for text, rounds in (("a = 1", 3), ("a = 1", 4), ("a = 2", 3)):
        task.write_text(text)
        (run,) = runs_of(tmp_path, {}, seeds=(0,), rounds=rounds, task=f"{task}:Task")
        folders.add(run.folder)
    assert len(folders) == 3


def test_other_faults_are_another_run(tmp_path: Path) -> None:
    faults = tmp_path / "faults.toml"
    folders = set()
    for share in (0.1, 0.2):
        faults.write_text(f"[[dropout]]\nshare = {share}\n")
        (run,) = runs_of(tmp_path, {}, seeds=(0,), simulation={"faults": str(faults)})
        folders.add(run.folder)
    assert len(folders) == 2


def test_a_folder_s_name_says_what_is_in_it_and_holds_no_path() -> None:
    assert slug({RATE: 0.1, SIZE: 4}) == "learning_rate=0.1,micro_batch_size=4"
    assert slug({"task": "../a b.py:X"}) == "task=.._a_b.py_X"
    assert len(slug({RATE: "x" * 500})) <= 80


@pytest.mark.parametrize(
    ("grid", "tree", "named"),
    [
        ({RATE: [0.1, -1]}, {}, r"the sweep at learning_rate=-1: optimizer.learning_rate: .*-1"),
        ({"optimizer.rate": [1]}, {}, "optimizer.rate: extra inputs"),
        ({"seed": [1, 2]}, {}, "seed is set, and a sweep sets it by itself"),
        ({}, {"out": "here"}, "out is set, and a sweep sets it by itself"),
        ({RATE: [0.1, 0.1]}, {}, "two runs of the sweep are the same"),
        ({RATE: list(range(1, 102)), SIZE: list(range(1, 101))}, {}, "comes to 10,100 runs"),
    ],
)
def test_what_is_wrong_with_a_grid_is_named(
    tmp_path: Path, grid: dict[str, list[Any]], tree: dict[str, Any], named: str
) -> None:
    with pytest.raises(SettingsError, match=named):
        planned({"task": TASK, **tree}, Sweep(seeds=(0,), grid=grid), {}, out=tmp_path)


def test_a_sweep_s_file_is_settings_and_a_table(tmp_path: Path) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text(
        'rounds = 3\n[sweep]\nseeds = [4]\nmetric = "loss"\n[sweep.grid]\n'
        '"optimizer.learning_rate" = [0.1]\n'
    )
    tree, sweep = read_sweep(path)
    assert tree == {"rounds": 3}
    assert sweep == Sweep(seeds=(4,), metric="loss", grid={RATE: [0.1]})
    assert read_sweep(None) == ({}, Sweep())


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[sweep]\nseed = 1", r"sweep\.toml: sweep\.seed: extra inputs"),
        ("[sweep]\nseeds = []", r"sweep\.seeds: "),
        ("[sweep]\nseeds = [-1]", r"sweep\.seeds\.0: .*found -1"),
        ("[sweep.grid]\nrounds = 3", r"sweep\.grid\.rounds: .*found 3"),
        ("[sweep.grid]\nrounds = []", r"sweep\.grid\.rounds: "),
        ("[sweep", "is not a TOML file"),
    ],
)
def test_what_is_wrong_with_a_sweep_s_file_is_named(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=named):
        read_sweep(path)
    with pytest.raises(SettingsError, match="cannot read the sweep's file"):
        read_sweep(tmp_path / "nowhere.toml")


# Results.


def leave(run: SweptRun, *values: float | None, ended: str = "whole") -> None:
    """Leave what a run leaves whose test loss took these values."""
    rounds = [
        {"round": number, "loss": 1.0, "weight": 8, "metrics": {"test_loss": value}}
        for number, value in enumerate(values, 1)
    ]
    run.folder.mkdir(parents=True)
    told = {"ended": ended, "message": "", "rounds": rounds}
    (run.folder / RESULT).write_text(json.dumps(told))


def swept(out: Path) -> list[SweptRun]:
    """Return a sweep of three points: good, better, and diverged, with a run still to be done."""
    runs = runs_of(out, {RATE: [0.1, 0.2, 0.3]})
    leave(runs[0], 5.0, 3.0)
    leave(runs[1], 5.0, 4.0)
    leave(runs[2], 5.0, 1.0)
    leave(runs[4], 5.0, None, ended="diverged")
    return runs


def test_points_are_sorted_by_the_mean_with_their_spread_and_the_diverged_come_last(
    tmp_path: Path,
) -> None:
    runs = swept(tmp_path)
    results = [found for run in runs if (found := result_of(run)) is not None]
    assert metric_of(results, None) == "test_loss"
    better, good, diverged = summaries(runs, results, "test_loss")
    assert (better.point, better.mean, better.spread) == ({RATE: 0.2}, 1.0, None)
    # The sample's deviation of 3 and 4: sqrt(2 x 0.25 / 1).
    assert good.mean == 3.5
    assert good.spread == pytest.approx(0.5**0.5)
    assert (diverged.mean, diverged.num_diverged, diverged.num_runs) == (None, 1, 2)


def test_a_metric_of_which_more_is_better_is_sorted_downwards(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, {RATE: [0.1, 0.2]}, seeds=(0,))
    for run, value in zip(runs, (0.5, 0.9), strict=True):
        leave(run)
        row = {"round": 1, "loss": 1.0, "weight": 1, "metrics": {"test_accuracy": value}}
        told = {"ended": "whole", "message": "", "rounds": [row]}
        (run.folder / RESULT).write_text(json.dumps(told))
    results = [found for run in runs if (found := result_of(run)) is not None]
    assert [one.mean for one in summaries(runs, results, "test_accuracy")] == [0.9, 0.5]


def test_a_metric_that_no_run_has_is_named_with_those_there_are(tmp_path: Path) -> None:
    results = [found for run in swept(tmp_path) if (found := result_of(run)) is not None]
    with pytest.raises(SettingsError, match="'f1'") as caught:
        metric_of(results, "f1")
    assert "loss, test_loss" in caught.value.remedy


def test_a_result_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (run, _) = runs_of(tmp_path, {})
    leave(run, 1.0)
    (run.folder / RESULT).write_text("{")
    with pytest.raises(StateError, match=r"result\.json cannot be read"):
        result_of(run)


def test_tables_and_plot_hold_every_run_that_has_ended(tmp_path: Path) -> None:
    runs = swept(tmp_path)
    results = [found for run in runs if (found := result_of(run)) is not None]
    summed = summaries(runs, results, "test_loss")
    write_tables(tmp_path, summed, results, "test_loss")
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
    plot = draw_sweep(tmp_path, summed, "test_loss")
    assert plot is not None
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert table_of(summed, "test_loss").row_count == 3


def test_nothing_is_drawn_where_no_run_has_a_value(tmp_path: Path) -> None:
    assert draw_sweep(tmp_path, summaries(runs_of(tmp_path, GRID), [], "loss"), "loss") is None


def test_only_what_varies_is_a_column_by_its_last_word_where_that_is_its_own() -> None:
    one = {"a.x": 1, "b.x": 1, "c.y": 1, "d.z": 5}
    other = {"a.x": 2, "b.x": 2, "c.y": 2, "d.z": 5}
    assert short_names([one, other]) == {"a.x": "a.x", "b.x": "b.x", "c.y": "y"}
