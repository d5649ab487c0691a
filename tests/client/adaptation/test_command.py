"""``headwater-client adapt`` and ``predict``, as an owner types them."""

from __future__ import annotations

import csv
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

import headwater
from headwater.client.cli import app
from headwater.common.model.parameters import build_model
from headwater.common.model.trained_model import MODEL
from headwater.common.settings.schema import Settings
from headwater.examples.digits import Digits
from headwater.server.rounds.model_files import save_model
from tests.processes import ROOT

TASK = "examples/digits.py:Digits"
DEVICE = ("--task", TASK, "--part", "3", "--num-parts", "6", "--threads", "1")


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The file of a model as an operator hands it on."""
    settings = Settings.model_validate({"task": TASK, "evaluation": {"on_devices": True}})
    save_model(tmp_path / MODEL, build_model(Digits(), seed=0), settings, round_number=1)
    return tmp_path / MODEL


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [*map(str, words)])


def test_a_device_adapts_and_predicts(file: Path, tmp_path: Path) -> None:
    mine, rows = tmp_path / "mine", tmp_path / "rows.csv"
    few = ("--epochs", "2", "--name", "pi")
    found = run("adapt", "--model", file, "--out", mine, *DEVICE, *few)
    assert found.exit_code == 0, found.output
    assert "kept: the fine-tuned model" in found.output
    assert "was named pi in the run" in found.output
    found = run("predict", "--model", mine, "--out", rows, *DEVICE)
    assert found.exit_code == 0, found.output
    assert stat.S_IMODE(rows.stat().st_mode) == 0o600
    with rows.open(newline="") as opened:
        read = list(csv.DictReader(opened))
    inputs, _ = Digits().train_examples(data=None, part=3, num_parts=6).tensors
    wanted = headwater.load_model(mine, TASK)(inputs).argmax(1)
    assert [int(row["digit"]) for row in read] == wanted.tolist()


def test_with_json_the_result_is_alone_on_the_standard_output(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    found = run("adapt", "--model", file, "--out", out, *DEVICE, "--epochs", "1", "--json")
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["kept"] in ("fine-tuned", "common")


def test_predictions_are_json_lines_on_request(file: Path) -> None:
    found = run("predict", "--model", file, "--format", "jsonl", *DEVICE)
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout.splitlines()[1])["example"] == 1


def test_a_flag_of_the_network_is_refused(file: Path, tmp_path: Path) -> None:
    found = run("adapt", "--model", file, "--out", tmp_path / "mine", "--server", "here:1")
    assert found.exit_code == 2
    assert "No such option '--server'" in found.output


@pytest.mark.slow
def test_the_common_model_s_figures_over_all_devices_are_those_of_the_run(tmp_path: Path) -> None:
    """So the tested examples are those that each device held out in the run."""
    run = headwater.simulate(
        TASK,
        clients=4,
        rounds=2,
        evaluate_on_devices=True,
        seed=5,
        threads=1,
        out=tmp_path / "run",
        progress=False,
    )
    found = [
        headwater.adapt(
            tmp_path / "run", TASK, part=k, num_parts=4, name=str(k), epochs=1, progress=False
        ).found
        for k in range(4)
    ]
    number = sum(one.num_examples for one in found)
    mean = sum(one.loss * one.num_examples for one in found) / number
    assert mean == pytest.approx(run.metrics["held_out_loss"], rel=1e-5)


@pytest.mark.slow
def test_ctrl_c_ends_the_training_and_keeps_the_best_so_far(file: Path, tmp_path: Path) -> None:
    endless = ("--epochs", "1000000", "--patience", "1000000", "--lr", "1e-4")
    given = ("--model", str(file), "--out", str(tmp_path / "mine"), *DEVICE, *endless)
    with subprocess.Popen(
        [sys.executable, "-m", "headwater.client.cli", "adapt", *given],
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, first + said
    assert first.startswith("epoch 1 of at most 1000000")
    assert "It ended: it was stopped." in said
    headwater.load_model(tmp_path / "mine", Digits())
