"""Flower's Ray engine on a Ray of its own: the same model, and nothing is left of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.settings import Settings
from server.rounds import MODEL
from simulation.engines import run_engine
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
def test_flower_ray_gives_the_in_process_model_bit_for_bit_and_leaves_nothing_running(
    tmp_path: Path, started: Started
) -> None:
    ray, alone = tmp_path / "ray", tmp_path / "in-process"
    process = started.simulate(*DIGITS, *FOUR_CLIENTS, *K_2_OF_8, "--rounds", "2", out=ray)
    said = finish(process)
    assert process.returncode == 0, said
    chosen = {
        "task": "examples/digits.py:Digits",
        "rounds": 2,
        "threads": 1,
        "out": alone,
        "plan": {"accumulation_steps": 2, "micro_batch_size": 8},
        "simulation": {"clients": 4},
    }
    run_engine(Settings.model_validate(chosen), on_round=lambda row: None, resume=False)
    assert (ray / MODEL).read_bytes() == (alone / MODEL).read_bytes()
    assert names_by_round(ray) == names_by_round(alone) == [["0", "1", "2", "3"]] * 2
    started.until_nothing_runs()


def names_by_round(out: Path) -> list[list[str]]:
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    return [[client["name"] for client in row["clients"]] for row in rounds]


@pytest.mark.slow
def test_ctrl_c_ends_ray_and_keeps_what_was_committed(tmp_path: Path, started: Started) -> None:
    process = started.simulate(
        *DIGITS, *K_2_OF_8, "--clients", "1", "--rounds", "100000", out=tmp_path
    )
    until_committed(process, tmp_path)
    interrupt(process)
    said = finish(process)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert (tmp_path / MODEL).exists()
    started.until_nothing_runs()


@pytest.mark.slow
def test_without_ray_the_remedy_is_named(tmp_path: Path, started: Started) -> None:
    process = started.run(
        "-c",
        "import sys; sys.modules['ray'] = None; from simulation.cli import main; main()",
        *DIGITS, "--engine", "flower-ray", "--out", tmp_path,
    )  # fmt: skip
    said = finish(process)
    assert process.returncode == 2
    assert "SettingsError" in said
    assert "pip install 'headwater[ray]'" in said
