"""Flower's Ray workers simulate the same devices as this process, round by round."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.settings import Settings, load
from server.metrics import read_rows
from server.rounds import MODEL
from simulation.engines import run_engine
from simulation.profiles import with_fleet

FLEET = """
[[device]]
count = 2
examples_per_second = 50
memory_bytes = 400_000_000
upload_bytes_per_second = 1_000_000
jitter = 0.2
on_battery = 0.5
"""


def chosen(folder: Path, engine: str) -> Settings:
    overrides = {
        "task": "tests/tasks.py:TwoLayers",
        "simulation.fleet": folder / "fleet.toml",
        "simulation.engine": engine,
        "simulation.clients": 2,
        "rounds": 3,
        "plan.effective_batch_size": 12,
        "optimizer.learning_rate": 0.001,
        "out": folder / engine,
    }
    return load(None, overrides)


def simulate_here(folder: Path) -> list[dict[str, Any]]:
    settings = with_fleet(chosen(folder, "in-process"))
    run_engine(settings, on_round=lambda row: None, resume=False)
    return read_rows(folder / "in-process")


def simulate_on_ray(folder: Path) -> list[dict[str, Any]]:
    config = folder / "settings.toml"
    config.write_text(chosen(folder, "flower-ray").to_toml())
    done = subprocess.run(
        [sys.executable, "-m", "simulation", "--config", str(config)],
        env={key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return read_rows(folder / "flower-ray")


@pytest.mark.slow
def test_jitter_and_batteries_are_the_same_on_ray(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(FLEET)
    here, on_ray = simulate_here(tmp_path), simulate_on_ray(tmp_path)
    keys = ("name", "num_examples", "step_seconds", "seconds", "peak_bytes", "plan", "reason")
    told = [
        [sorted([client[key] for key in keys] for client in row["clients"]) for row in rows]
        for rows in (here, on_ray)
    ]
    assert told[0] == told[1]
    seconds = [one[2] for row in told[0] for one in row]
    assert len({str(steps) for steps in seconds}) == len(seconds)
    models = [(tmp_path / engine / MODEL).read_bytes() for engine in ("in-process", "flower-ray")]
    assert models[0] == models[1]
