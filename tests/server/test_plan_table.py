from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from common.settings import load
from server.cli import app
from simulation.engines import run_engine


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    overrides = {"task": "examples/digits.py:Digits", "simulation.clients": 4, "rounds": 2}
    run_engine(load(None, overrides | {"out": out}), on_round=lambda row: None, resume=False)
    return out


def test_the_table_names_every_device_and_why_it_was_asked_for_so_much(run_folder: Path) -> None:
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(
        app, ["plan", "--out", str(run_folder), "--explain"]
    )
    assert shown.exit_code == 0
    assert "round 2: 4 of 4 clients" in shown.output
    assert sum("bound" in line or "all its" in line for line in shown.output.splitlines()) == 4


def test_a_round_that_is_not_there_is_named(run_folder: Path) -> None:
    shown = CliRunner().invoke(app, ["plan", "--out", str(run_folder), "--round", "7"])
    assert shown.exit_code == 2


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["plan", "--out", str(tmp_path)]).exit_code == 2
