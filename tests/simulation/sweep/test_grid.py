"""The runs of a sweep: the combinations, their folders, and errors in the grid or the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headwater.common.errors import SettingsError
from headwater.simulation.sweep.grid import Sweep, SweepRun, plan_runs, points, read_sweep, slug

TASK = "tests/tasks.py:TwoLayers"
RATE, SIZE = "optimizer.learning_rate", "plan.micro_batch_size"
GRID: dict[str, list[Any]] = {RATE: [0.1, 0.2], SIZE: [4, 8, 16]}


def runs_of(
    out: Path, grid: dict[str, list[Any]], *, seeds: tuple[int, ...] = (0, 1), **tree: Any
) -> list[SweepRun]:
    return plan_runs({"task": TASK, **tree}, Sweep(seeds=seeds, grid=grid), {}, out=out)


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


def test_the_grid_wins_over_the_file_s_settings_and_keeps_the_other_settings(
    tmp_path: Path,
) -> None:
    tree: dict[str, Any] = {"optimizer": {"name": "adam", "learning_rate": 7.0}, "rounds": 4}
    for run in runs_of(tmp_path, GRID, **tree):
        assert run.settings.optimizer.name == "adam"
        assert run.settings.optimizer.learning_rate == run.point[RATE]
        assert run.settings.rounds == 4


def test_a_run_keeps_its_folder_when_the_grid_grows_or_changes_its_order(
    tmp_path: Path,
) -> None:
    before = {run.folder for run in runs_of(tmp_path, GRID)}
    grown: dict[str, list[Any]] = {RATE: [0.3, 0.2, 0.1], SIZE: [16, 8, 4]}
    after = {run.folder for run in runs_of(tmp_path, grown, seeds=(5, 1, 0))}
    assert before < after


def test_other_settings_or_another_content_of_the_task_make_another_run(tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    folders = set()
    for text, rounds in (("a = 1", 3), ("a = 1", 4), ("a = 2", 3)):
        task.write_text(text)
        (run,) = runs_of(tmp_path, {}, seeds=(0,), rounds=rounds, task=f"{task}:Task")
        folders.add(run.folder)
    assert len(folders) == 3


def test_other_faults_make_another_run(tmp_path: Path) -> None:
    faults = tmp_path / "faults.toml"
    folders = set()
    for share in (0.1, 0.2):
        faults.write_text(f"[[dropout]]\nshare = {share}\n")
        (run,) = runs_of(tmp_path, {}, seeds=(0,), simulation={"faults": str(faults)})
        folders.add(run.folder)
    assert len(folders) == 2


def test_a_folder_s_name_shows_the_settings_and_contains_no_path() -> None:
    assert slug({RATE: 0.1, SIZE: 4}) == "learning_rate=0.1,micro_batch_size=4"
    assert slug({"task": "../a b.py:X"}) == "task=.._a_b.py_X"
    assert len(slug({RATE: "x" * 500})) <= 80


@pytest.mark.parametrize(
    ("grid", "tree", "message"),
    [
        ({RATE: [0.1, -1]}, {}, r"the sweep at learning_rate=-1: optimizer.learning_rate .*-1"),
        ({"optimizer.rate": [1]}, {}, "optimizer.rate is not a setting"),
        ({"seed": [1, 2]}, {}, "seed is set, and a sweep sets it by itself"),
        ({}, {"out": "here"}, "out is set, and a sweep sets it by itself"),
        ({RATE: [0.1, 0.1]}, {}, "two runs of the sweep are the same"),
        ({RATE: list(range(1, 102)), SIZE: list(range(1, 101))}, {}, "the sweep has 10,100 runs"),
    ],
)
def test_an_error_names_what_is_wrong_with_the_grid(
    tmp_path: Path, grid: dict[str, list[Any]], tree: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        plan_runs({"task": TASK, **tree}, Sweep(seeds=(0,), grid=grid), {}, out=tmp_path)


def test_a_setting_that_changes_none_of_the_runs_is_refused(tmp_path: Path) -> None:
    """Or the sweep would show three equal columns, one for each rank of no factor."""
    one = {"task": TASK}
    ranks: dict[str, list[Any]] = {"compression.rank": [2, 4]}
    with pytest.raises(SettingsError, match=r"--compress-rank has no effect without --compress"):
        plan_runs(one, Sweep(seeds=(0,), grid=ranks), {}, out=tmp_path)
    with pytest.raises(SettingsError, match=r"--ring-bits has no effect without"):
        plan_runs(one, Sweep(seeds=(0,)), {"secure.ring_bits": 16}, out=tmp_path)
    with_factors = Sweep(seeds=(0,), grid={**ranks, "compression.up": ["off", "low-rank"]})
    assert len(plan_runs(one, with_factors, {}, out=tmp_path)) == 4
    assert (
        len(
            plan_runs(
                one, Sweep(seeds=(0,), grid=ranks), {"compression.up": "low-rank"}, out=tmp_path
            )
        )
        == 2
    )


def test_a_sweep_s_file_contains_settings_and_a_table(tmp_path: Path) -> None:
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
    ("text", "message"),
    [
        ("[sweep]\nseed = 1", r"sweep\.toml: sweep\.seed: extra inputs"),
        ("[sweep]\nseeds = []", r"sweep\.seeds: "),
        ("[sweep]\nseeds = [-1]", r"sweep\.seeds\.0: .*found -1"),
        ("[sweep.grid]\nrounds = 3", r"sweep\.grid\.rounds: .*found 3"),
        ("[sweep.grid]\nrounds = []", r"sweep\.grid\.rounds: "),
        ("[sweep", "is not a TOML file"),
    ],
)
def test_an_error_names_what_is_wrong_with_the_file(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=message):
        read_sweep(path)
    with pytest.raises(SettingsError, match="cannot read the sweep's file"):
        read_sweep(tmp_path / "nowhere.toml")
