"""A resumed run with other settings: what changes is applied, said and recorded, or refused."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from safetensors import safe_open
from typer.testing import CliRunner

import headwater
from headwater.common.errors import SettingsError
from headwater.common.model.trained_model import MODEL
from headwater.common.settings.schema import SETTINGS_FILE
from headwater.server.operations.round_log import read_rows
from headwater.server.rounds import checkpoint
from headwater.simulation.cli import app
from tests.python_tasks import Signs

START = (
    *("--task", "tests/tasks.py:TwoLayers", "--clients", "3", "--rounds", "2", "--threads", "1"),
    *("--accumulation-steps", "1", "--micro-batch-size", "4", "--optimizer", "sgd"),
    *("--learning-rate", "0.01"),
)


def simulated(out: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["--out", str(out), *arguments])


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The folder of a run of two rounds."""
    done = simulated(tmp_path / "run", *START)
    assert done.exit_code == 0, done.output
    return tmp_path / "run"


def test_another_learning_rate_is_used_said_and_recorded(out: Path) -> None:
    done = simulated(out, "--resume", "--rounds", "4", "--learning-rate", "0.0025")
    assert done.exit_code == 0, done.output
    assert "continues after round 2" in done.stdout
    assert "changed: rounds 2 → 4, learning rate 0.01 → 0.0025" in done.stdout
    rows = read_rows(out)
    assert [row["learning_rate"] for row in rows] == [0.01, 0.01, 0.0025, 0.0025]
    change = {"optimizer.learning_rate": [0.01, 0.0025]}
    assert [row["settings_changed"] for row in rows] == [{}, {}, change, {}]
    with safe_open(out / MODEL, framework="pt") as model:
        recorded = json.loads(model.metadata()["settings"])
    assert recorded["optimizer"]["learning_rate"] == 0.0025


def test_a_change_is_recorded_though_the_run_ended_before_its_next_round(out: Path) -> None:
    simulated(out, "--resume", "--learning-rate", "0.0025")
    assert tomllib.loads((out / SETTINGS_FILE).read_text())["optimizer"]["learning_rate"] == 0.0025
    simulated(out, "--resume", "--rounds", "3")
    assert "optimizer.learning_rate" in read_rows(out)[-1]["settings_changed"]


def test_a_config_file_keeps_the_run_s_other_settings(out: Path, tmp_path: Path) -> None:
    (tmp_path / "more.toml").write_text("rounds = 3\n")
    done = simulated(out, "--resume", "--config", str(tmp_path / "more.toml"))
    assert done.exit_code == 0, done.output
    left = tomllib.loads((out / SETTINGS_FILE).read_text())
    assert (left["rounds"], left["simulation"]["clients"]) == (3, 3)
    assert (left["optimizer"]["name"], left["plan"]["micro_batch_size"]) == ("sgd", 4)
    assert [row["learning_rate"] for row in read_rows(out)] == [0.01] * 3


def test_a_run_that_has_its_rounds_is_called_done(out: Path) -> None:
    done = simulated(out, "--resume")
    assert done.exit_code == 0, done.output
    assert "already done: the run has 2 rounds, and --rounds is 2" in done.stdout
    assert "--rounds N" in done.stdout


def test_fewer_rounds_than_a_run_has_change_nothing_in_its_folder(out: Path) -> None:
    before = (out / SETTINGS_FILE).read_bytes()
    done = simulated(out, "--resume", "--rounds", "1")
    assert "already done: the run has 2 rounds, and --rounds is 1" in done.stdout
    assert "changed:" not in done.stdout
    assert (out / SETTINGS_FILE).read_bytes() == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("--optimizer", "adam"), "was started with the optimizer SGD"),
        (("--task", "tests/tasks.py:Other"), "UnknownTask"),
        (("--clients", "4"), "simulation.clients = 3, not 4"),
        (("--partition", "iid"), "partition.kind = 'task', not 'iid'"),
        (("--initial-model", "{out}"), "has a model already"),
        (("--set", "schedule.name=OneCycleLR"), "OneCycleLR"),
    ],
)
def test_what_a_run_cannot_change_is_refused_and_its_settings_stay(
    change: tuple[str, ...], words: str, out: Path
) -> None:
    before = (out / SETTINGS_FILE).read_bytes()
    given = [word.replace("{out}", str(out)) for word in change]
    done = simulated(out, "--resume", "--rounds", "3", *given)
    assert done.exit_code == 2
    assert words in done.stderr
    assert "remedy: " in done.stderr
    assert (out / SETTINGS_FILE).read_bytes() == before


def test_a_folder_that_holds_the_same_run_is_called_so(out: Path) -> None:
    done = simulated(out, *START)
    assert done.exit_code == 2
    assert "already holds a run of 2 rounds" in done.stderr
    assert "continue that run with --resume" in done.stderr


def test_to_resume_nothing_is_an_error_unless_a_task_is_named(tmp_path: Path) -> None:
    done = simulated(tmp_path / "typo", "--resume", "--rounds", "3")
    assert done.exit_code == 2
    assert "there is no run to resume in" in done.stderr
    assert not (tmp_path / "typo").exists()
    done = simulated(tmp_path / "service", *START, "--resume")
    assert done.exit_code == 0, done.output
    assert "has no checkpoint yet: the run begins with round 1" in done.stdout
    assert "WARNING" not in done.stderr


def test_a_checkpoint_of_an_earlier_version_is_compared_with_settings_toml(out: Path) -> None:
    saved = checkpoint.load(out)
    assert saved is not None
    saved.progress.settings.clear()
    checkpoint.save(out, saved.progress, image_U8=saved.image_U8, optimizer=saved.optimizer)
    simulated(out, "--resume", "--rounds", "3", "--learning-rate", "0.0025")
    assert read_rows(out)[-1]["learning_rate"] == 0.0025


def test_python_resumes_with_the_run_s_settings_and_what_the_call_changes(tmp_path: Path) -> None:
    given: dict[str, Any] = {"out": tmp_path / "run", "progress": False}
    headwater.simulate(Signs, clients=3, rounds=2, optimizer="sgd", learning_rate=0.01, **given)
    (tmp_path / "more.toml").write_text("[optimizer]\nlearning_rate = 0.0025\n")
    more = {"settings": tmp_path / "more.toml", "resume": True, **given}
    run = headwater.simulate(Signs, rounds=3, **more)
    assert [row.learning_rate for row in run.history] == [0.01, 0.01, 0.0025]
    assert run.history[2].settings_changed == {"optimizer.learning_rate": [0.01, 0.0025]}
    with pytest.raises(SettingsError, match="was started with the optimizer SGD"):
        headwater.simulate(Signs, rounds=4, optimizer="adam", **more)
