"""The table of ``headwater-server plan``, for given rows and for runs of the in-process engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headwater.common.settings.sources import load
from headwater.common.system.console import console
from headwater.server.cli import app
from headwater.server.operations.round_log import ROUNDS, row_to_dict
from headwater.simulation.run import run_engine
from tests.round_rows import client, row


@pytest.fixture(autouse=True)
def wide_console() -> Iterator[None]:
    """Set a fixed width: the console has the width at its import, maybe by another test."""
    before = console.width
    console.width = 200
    yield
    console.width = before


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    overrides = {"task": "examples/digits.py:Digits", "simulation.clients": 4, "rounds": 2}
    run_engine(load(None, overrides | {"out": out}), on_round=lambda row: None, resume=False)
    return out


@pytest.mark.slow  # runs an engine
def test_the_table_shows_every_device_and_the_reason_for_its_plan(run_folder: Path) -> None:
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(
        app, ["plan", "--out", str(run_folder), "--explain"]
    )
    assert shown.exit_code == 0
    assert "round 2: 4 of 4 clients" in shown.output
    assert sum("bound" in line or "all its" in line for line in shown.output.splitlines()) == 4


FLEET = """
[[device]]
count = 3
examples_per_second = 1000
micro_batch_seconds = 0
memory_bytes = 1_000_000_000
upload_bytes_per_second = 1_000_000_000

[[device]]
examples_per_second = 0.1
memory_bytes = 1_000_000_000
upload_bytes_per_second = 1_000_000_000
"""


@pytest.mark.slow  # runs an engine
@pytest.mark.parametrize("explain", [True, False])
def test_a_left_out_device_is_shown_with_the_reason(tmp_path: Path, explain: bool) -> None:
    (tmp_path / "fleet.toml").write_text(FLEET)
    overrides = {
        "task": "examples/digits.py:Digits",
        "simulation.fleet": tmp_path / "fleet.toml",
        "cohort.deadline_seconds": 2.0,
        "rounds": 1,
        "out": tmp_path / "run",
    }
    run_engine(load(None, overrides), on_round=lambda row: None, resume=False)
    command = ["plan", "--out", str(tmp_path / "run"), *(["--explain"] if explain else [])]
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, command)
    assert "3 of 3 clients" in shown.output
    assert "1 device left out as too slow" in shown.output
    # 10 s of the 90 % of the deadline that are planned.
    said = "3 was left out: one example takes 10.0 s of its 1.8 s"
    assert (said in shown.output) == explain


@pytest.mark.slow  # runs an engine
def test_a_missing_round_is_named(run_folder: Path) -> None:
    shown = CliRunner().invoke(app, ["plan", "--out", str(run_folder), "--round", "7"])
    assert shown.exit_code == 2


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["plan", "--out", str(tmp_path)]).exit_code == 2


HOSTILE = "[/bold]\x1b[2J"


def write_row(folder: Path, **changes: object) -> None:
    fields = row_to_dict(row(1, "pi", **changes))
    (folder / ROUNDS).write_text(json.dumps(fields) + "\n")


def test_texts_of_hostile_devices_are_shown_as_they_are(tmp_path: Path) -> None:
    """A name or an error that looks like rich's markup once ended the command with an error."""
    write_row(
        tmp_path,
        clients=[client("nas" + HOSTILE, plan="plan" + HOSTILE)],
        left_out={"out" + HOSTILE: "slow" + HOSTILE},
        refused={"bad" + HOSTILE: "Error" + HOSTILE},
    )
    shown = CliRunner().invoke(app, ["plan", "--out", str(tmp_path), "--explain"])
    assert shown.exit_code == 0, shown.exception
    for start in ("nas", "plan", "out", "slow", "bad", "Error"):
        assert start + r"[/bold]\x1b[2J" in shown.output
    assert "\x1b" not in shown.output


def test_devices_are_listed_in_natural_order(tmp_path: Path) -> None:
    names = ["pi10", "pi2", "pi1"]
    write_row(tmp_path, clients=[client(name) for name in names], refused={"b10": "x", "b9": "y"})
    shown = CliRunner().invoke(app, ["plan", "--out", str(tmp_path)]).output
    places = [shown.index(name) for name in ("pi1 ", "pi2 ", "pi10 ", "b9 ", "b10 ")]
    assert places == sorted(places)


def test_in_a_terminal_of_80_columns_the_table_wraps_and_cuts_nothing_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "width", 80)
    monkeypatch.setattr(console, "_force_terminal", True)
    name = "kitchen-pi-of-the-third-floor.example.org"
    plan = "all its 128,000 examples, giving 50% of its time on battery; in 4,096 micro-batches"
    wide = client(
        name, num_examples=128_000, accumulation_steps=4096, micro_batch_size=65_536, plan=plan
    )
    write_row(tmp_path, clients=[wide])
    lines = CliRunner().invoke(app, ["plan", "--out", str(tmp_path), "--explain"]).output
    assert max(map(len, lines.splitlines())) <= 80
    assert "…" not in lines
    cells = [line.split() for line in lines.splitlines()]
    for word in plan.split():
        assert any(word in line for line in cells), word
    assert name in "".join(line[0] for line in cells if line)
