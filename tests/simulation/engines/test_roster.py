"""A large population: only the devices of the cohort are created."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import headwater
from headwater.common.settings.sources import load
from headwater.server.operations.round_log import read_rows
from headwater.server.rounds.round_row import RoundRow
from headwater.simulation.fleet.fleet_spec import with_fleet
from headwater.simulation.run import run_engine, run_on_messages

OPENED = "HEADWATER_TEST_OPENED"


def test_the_devices_that_are_refused_keep_no_data_of_the_task_alive() -> None:
    """Each error had its frames, and these the whole data set: 4 GB of 8,562 small devices."""
    large: list[weakref.ref[Tensor]] = []

    class Poor(Slope):
        def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
            whole = torch.zeros(1000)
            large.append(weakref.ref(whole))
            if part:
                raise FileNotFoundError(f"the disk of device {part} is gone")
            return TensorDataset(whole[:, None], whole[:, None])

    def on_round(row: RoundRow) -> None:
        gc.collect()
        assert len(large) >= 20
        assert sum(one() is not None for one in large) < 5

    headwater.simulate(Poor, clients=20, rounds=1, progress=False, observer=on_round)


class Slope:
    """One number in, one out; each device that is opened leaves its number in a file."""

    def new_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        import os

        if part % 7 == 6:
            raise FileNotFoundError(f"the disk of device {part} is gone")
        with Path(os.environ[OPENED]).open("a") as file:
            file.write(f"{part}\n")
        inputs = torch.linspace(-1, 1, 20).unsqueeze(1) + part % 3
        return TensorDataset(inputs, 2 * inputs + 1)

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        inputs, wanted = batch
        return ((model(inputs) - wanted) ** 2).sum(), len(wanted)


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "opened"
    path.touch()
    monkeypatch.setenv(OPENED, str(path))
    return path


def run(out: Path, *, engine: Any = run_engine, **overrides: Any) -> list[dict[str, Any]]:
    chosen = {
        "task": f"{__file__}:Slope",
        "rounds": 3,
        "threads": 1,
        "out": out,
        "check_task": False,
        "optimizer.name": "sgd",
        "optimizer.learning_rate": 0.01,
        "plan.effective_batch_size": 40,
        "cohort.size": 5,
    }
    settings = with_fleet(load(None, chosen | overrides))
    engine(settings, on_round=lambda _: None, resume=False)
    return read_rows(out)


def test_only_the_cohort_of_a_large_population_is_created(tmp_path: Path, opened: Path) -> None:
    rows = run(tmp_path / "out", **{"simulation.clients": 20_000})
    invited = [client["name"] for row in rows for client in row["clients"]]
    assert len(invited) == len(set(invited)) == 3 * 5
    parts = set(opened.read_text().split())
    assert parts >= set(invited)
    # Beside them the first device, on whom the task is tried, and no other.
    assert parts <= {*invited, "0"}


def test_devices_created_on_demand_act_like_devices_created_at_once(
    tmp_path: Path, opened: Path
) -> None:
    """On messages every device describes itself as it joins; one that cannot is replaced."""
    one, other = (
        run(tmp_path / name, engine=engine, **{"simulation.clients": 20, "rounds": 2})
        for name, engine in (("lazy", run_engine), ("messages", run_on_messages))
    )

    def told(rows: list[dict[str, Any]]) -> list[Any]:
        keys = ("name", "plan", "num_examples", "seconds", "loss")
        return [[[client[key] for key in keys] for client in row["clients"]] for row in rows]

    assert told(one) == told(other)
    assert all(len(row["clients"]) == 5 for row in one)
