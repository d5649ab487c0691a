from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from common.settings import Settings
from server.metrics import read_rows
from server.rounds import MODEL
from simulation.draws import vanishes_at
from simulation.engines import run_engine

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 180
DIGITS = ["--task", "examples/digits.py:Digits"]
FOUR_CLIENTS = ["--clients", "4", "--threads", "1"]
K_2_OF_8 = ["--accumulation-steps", "2", "--micro-batch-size", "8"]

MEAN_NOT_SUM = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Mean:
    def new_model(self):
        return nn.Linear(3, 1)

    def train_examples(self, *, data, part, num_parts):
        return TensorDataset(torch.randn(8, 3, generator=torch.Generator().manual_seed(part)))

    def loss_sum(self, model, batch):
        return model(batch[0]).square().mean(), len(batch[0])
"""


@dataclass
class Started:
    """The simulators that a test has started, each with its descendants in a session of its own.

    Ray's agents overwrite their own environment and leave their parent: the session still tells.
    """

    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def simulate(self, *arguments: str | Path, out: Path) -> subprocess.Popen[str]:
        return self.run("-m", "simulation", *arguments, "--out", out)

    def run(self, *arguments: str | Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            cwd=ROOT,
            env={key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def alive(self) -> list[psutil.Process]:
        sessions = {process.pid for process in self.processes}
        return [process for process in psutil.process_iter() if session_of(process) in sessions]

    def alive_after(self, seconds: float) -> list[str]:
        end = time.monotonic() + seconds
        while self.alive() and time.monotonic() < end:
            time.sleep(0.2)
        return [process.name() for process in self.alive()]


def session_of(process: psutil.Process) -> int | None:
    """Return the session of a process that still runs, else None."""
    try:
        is_done = process.status() == psutil.STATUS_ZOMBIE
        return None if is_done else os.getsid(process.pid)
    except (psutil.NoSuchProcess, OSError):
        return None


@pytest.fixture
def started() -> Iterator[Started]:
    it = Started()
    yield it
    for process in it.alive():
        process.kill()
    for opened in it.processes:
        opened.communicate()


def finish(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=PATIENCE_SECONDS)
    return said


@pytest.mark.slow
def test_flower_ray_gives_the_in_process_model_bit_for_bit_and_leaves_nothing_running(
    tmp_path: Path, started: Started
) -> None:
    ray, alone = tmp_path / "ray", tmp_path / "in-process"
    process = started.simulate(
        *DIGITS, *FOUR_CLIENTS, *K_2_OF_8, "--rounds", "2", "--engine", "flower-ray", out=ray
    )
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
    assert (ray / "model.safetensors").read_bytes() == (alone / "model.safetensors").read_bytes()
    assert names_by_round(ray) == names_by_round(alone) == [["0", "1", "2", "3"]] * 2
    assert started.alive_after(10) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "dropout", "seed", "vanish"),
    [
        ("semi-honest", 0.3, 32, [{"3": "masked_update"}, {"5": "unmask"}]),
        ("active", 0.15, 98, [{"5": "masked_update"}, {}]),
    ],
)
def test_masked_rounds_on_ray_give_the_in_process_model_though_devices_vanish_in_mid_session(
    mode: str,
    dropout: float,
    seed: int,
    vanish: list[dict[str, str]],
    tmp_path: Path,
    started: Started,
) -> None:
    """Other devices vanish before the masks; what the dictionaries name comes behind them."""
    chosen = {
        "task": "examples/digits.py:Digits",
        "seed": seed,
        "rounds": 2,
        "threads": 1,
        "plan": {"accumulation_steps": 2, "micro_batch_size": 8},
        "secure": {"aggregation": mode},
        "simulation": {"clients": 6, "dropout": dropout},
    }
    alone, ray = tmp_path / "in-process", tmp_path / "ray"
    settings = Settings.model_validate({**chosen, "out": alone})
    for round_number, named in enumerate(vanish, start=1):
        for part, action in named.items():
            stage = vanishes_at(settings, int(part), round_number=round_number, attempt=0)
            assert stage == f"query.{action}"
    run_engine(settings, on_round=lambda row: None, resume=False)
    (tmp_path / "settings.toml").write_text(Settings.model_validate(chosen).to_toml())
    process = started.simulate(
        "--config", tmp_path / "settings.toml", "--engine", "flower-ray", out=ray
    )
    said = finish(process)
    assert process.returncode == 0, said
    assert (ray / MODEL).read_bytes() == (alone / MODEL).read_bytes()
    rows = read_rows(ray)
    assert [(row["num_clients"], row["weight"]) for row in rows] == [
        (row["num_clients"], row["weight"]) for row in read_rows(alone)
    ]
    for row, named in zip(rows, vanish, strict=True):
        gone = {name for name, action in named.items() if action == "masked_update"}
        assert gone <= row["refused"].keys()
    assert started.alive_after(10) == []


def names_by_round(out: Path) -> list[list[str]]:
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    return [[client["name"] for client in row["clients"]] for row in rounds]


@pytest.mark.slow
def test_an_error_of_the_server_app_comes_out_of_ray_as_itself(
    tmp_path: Path, started: Started
) -> None:
    (tmp_path / "task.py").write_text(MEAN_NOT_SUM)
    process = started.simulate(
        "--task", tmp_path / "task.py:Mean", "--engine", "flower-ray", "--clients", "1",
        out=tmp_path / "out",
    )  # fmt: skip
    said = finish(process)
    assert process.returncode == 1
    assert "TaskNotAdditive: the loss of 2 examples together" in said
    assert "Traceback" not in said
    assert started.alive_after(10) == []


@pytest.mark.slow
def test_ctrl_c_ends_ray_and_keeps_what_was_committed(tmp_path: Path, started: Started) -> None:
    process = started.simulate(
        *DIGITS, *K_2_OF_8, "--clients", "1", "--rounds", "100000", "--engine", "flower-ray",
        out=tmp_path,
    )  # fmt: skip
    end = time.monotonic() + PATIENCE_SECONDS
    while not (tmp_path / "checkpoint.safetensors").exists():
        assert process.poll() is None, finish(process)
        assert time.monotonic() < end, "no round was committed"
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    said = finish(process)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert (tmp_path / "model.safetensors").exists()
    assert started.alive_after(10) == []


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
