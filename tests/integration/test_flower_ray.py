"""Flower's Ray engine on a Ray of its own: the same model, and nothing is left of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.common.model.trained_model import MODEL
from headwater.common.settings.schema import Settings
from headwater.server.operations.round_log import read_rows
from headwater.simulation.run import run_engine
from tests.ray_sessions import Started, finish, interrupt, until_committed

DIGITS = ["--task", "examples/digits.py:Digits"]
FOUR_CLIENTS = ["--clients", "4", "--threads", "1"]
K_2_OF_8 = ["--accumulation-steps", "2", "--micro-batch-size", "8"]


@pytest.fixture
def started() -> Iterator[Started]:
    it = Started()
    yield it
    it.end()


@pytest.mark.slow
def test_until_ctrl_c_ray_gives_the_in_process_model_bit_for_bit_and_nothing_is_left_running(
    tmp_path: Path, started: Started
) -> None:
    ray, alone = tmp_path / "ray", tmp_path / "in-process"
    process = started.simulate(*DIGITS, *FOUR_CLIENTS, *K_2_OF_8, "--rounds", "100000", out=ray)
    until_committed(process, ray)
    interrupt(process)
    said = finish(process)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    started.until_nothing_runs()
    rows = read_rows(ray)
    assert all({client["name"] for client in row["clients"]} == set("0123") for row in rows)
    chosen = {
        "task": "examples/digits.py:Digits",
        "rounds": len(rows),
        "threads": 1,
        "out": alone,
        "plan": {"accumulation_steps": 2, "micro_batch_size": 8},
        "simulation": {"clients": 4},
    }
    run_engine(Settings.model_validate(chosen), on_round=lambda row: None, resume=False)
    assert (ray / MODEL).read_bytes() == (alone / MODEL).read_bytes()
    seconds = [row["virtual_seconds"] for row in read_rows(alone)]
    assert [row["virtual_seconds"] for row in rows] == seconds


@pytest.mark.slow
def test_without_ray_the_remedy_is_named(tmp_path: Path, started: Started) -> None:
    process = started.run(
        "-c",
        "import sys; sys.modules['ray'] = None; from headwater.simulation.cli import main; main()",
        *DIGITS, "--engine", "flower-ray", "--out", tmp_path,
    )  # fmt: skip
    said = finish(process)
    assert process.returncode == 2
    assert "SettingsError" in said
    assert "pip install 'headwater[ray]'" in said
