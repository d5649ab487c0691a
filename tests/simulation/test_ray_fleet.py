"""Flower's Ray workers simulate the same devices as this process, round by round."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from server.metrics import read_rows
from server.rounds import MODEL

FLEET = """
[[device]]
count = 2
examples_per_second = 50
memory_bytes = 400_000_000
upload_bytes_per_second = 1_000_000
jitter = 0.2
on_battery = 0.5
"""


def simulate(folder: Path, engine: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "simulation", "--task", "tests/tasks.py:TwoLayers"]
    command += ["--fleet", str(folder / "fleet.toml"), "--engine", engine, "--rounds", "3"]
    command += ["--effective-batch-size", "12", "--learning-rate", "0.001"]
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    done = subprocess.run(
        [*command, "--out", str(folder / engine)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return read_rows(folder / engine)


@pytest.mark.slow
def test_jitter_and_batteries_are_the_same_on_ray(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(FLEET)
    here, on_ray = (simulate(tmp_path, engine) for engine in ("in-process", "flower-ray"))
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
