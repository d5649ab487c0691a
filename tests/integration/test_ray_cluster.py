"""Flower's Ray engine on a cluster of two workers, which other runs use before and after."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from headwater.common.errors import SettingsError
from headwater.common.model.trained_model import MODEL
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import load
from headwater.server.operations.round_log import read_rows
from headwater.simulation.cluster.ray_cluster import ADDRESS, joined
from headwater.simulation.fleet.fleet_spec import fleet_spec, with_fleet
from headwater.simulation.fleet.random_events import vanishes_at
from headwater.simulation.run import run_engine
from tests.own_feature.test_own_features import kept_in, named
from tests.processes import Processes, until
from tests.python_tasks import REMEMBERING, SIGNS
from tests.ray_sessions import Started, cluster, finish, until_committed

SMALL = "tests/tasks.py:TwoLayers"  # needs no scikit-learn in three processes
ENDLESS = ["--task", SMALL, "--learning-rate", "0.001", "--clients", "2", "--rounds", "100000"]
WORKER = "ray::ClientApp"

FLEET = """
[[device]]
count = 4
examples_per_second = 50
memory_bytes = 400_000_000
upload_bytes_per_second = 1_000_000
jitter = 0.2
on_battery = 0.5
"""

# Each device notes under whom its process runs: a node of Ray is the parent of its workers.
TASK = """
import os
from tests.tasks import TwoLayers


class Noting(TwoLayers):
    def train_examples(self, *, data, part, num_parts):
        with open("parents", "a") as file:
            file.write(f"{os.getppid()}\\n")
        return super().train_examples(data=data, part=part, num_parts=num_parts)
"""

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


@pytest.fixture(scope="module")
def two_workers() -> Iterator[tuple[str, Started]]:
    """A cluster, of which nothing is left when the module is done."""
    with cluster() as found:
        yield found


@pytest.fixture
def nodes(two_workers: tuple[str, Started]) -> Started:
    return two_workers[1]


@pytest.fixture
def started(two_workers: tuple[str, Started]) -> Iterator[Started]:
    """Simulators on the cluster; after each the cluster is as it was before."""
    address, nodes = two_workers
    it = Started(address=address)
    yield it
    try:
        it.until_nothing_runs()
        until(lambda: not nodes.named(WORKER), what=lambda: f"the end of {nodes.named(WORKER)}")
        assert len(nodes.named("raylet")) == 3
    finally:
        it.end()


def simulate_here(settings: Settings) -> None:
    run_engine(with_fleet(settings), on_round=lambda row: None, resume=False)


@pytest.mark.slow
def test_a_fleet_on_both_workers_is_that_of_this_process_bit_for_bit(
    tmp_path: Path, started: Started, nodes: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jitter and batteries are drawn there as here; files are found from the driver's folder."""
    monkeypatch.chdir(tmp_path)
    Path("fleet.toml").write_text(FLEET)
    Path("task.py").write_text(TASK)
    chosen = load(
        None,
        {
            "task": "task.py:Noting",
            "simulation.fleet": "fleet.toml",
            "simulation.clients": 4,
            "threads": 1,
            "rounds": 3,
            "plan.effective_batch_size": 24,
            "optimizer.name": "sgd",
            "optimizer.learning_rate": 0.001,
        },
    )
    Path("settings.toml").write_text(chosen.to_toml())
    process = started.simulate("--config", "settings.toml", out=Path("ray"), folder=tmp_path)
    said = finish(process)
    assert process.returncode == 0, said
    assert "2 clients at a time on 2 nodes" in said
    parents = {int(line) for line in Path("parents").read_text().split()}
    assert len(parents) == 2
    assert parents <= {raylet.pid for raylet in nodes.named("raylet")}
    simulate_here(chosen.model_copy(update={"out": tmp_path / "here"}))
    keys = ("name", "num_examples", "step_seconds", "seconds", "peak_bytes", "plan", "reason")
    told = [
        [sorted([client[key] for key in keys] for client in row["clients"]) for row in rows]
        for rows in (read_rows(tmp_path / "here"), read_rows(tmp_path / "ray"))
    ]
    assert told[0] == told[1]
    seconds = [one[2] for row in told[0] for one in row]
    assert len({str(steps) for steps in seconds}) == len(seconds) == 12
    models = [(tmp_path / name / MODEL).read_bytes() for name in ("here", "ray")]
    assert models[0] == models[1]


@pytest.mark.slow
def test_masked_rounds_on_ray_give_the_in_process_model_though_devices_vanish_in_mid_session(
    tmp_path: Path, started: Started
) -> None:
    """Other devices vanish before the masks; what the dictionaries name comes behind them.

    (An active session whose device vanishes is in ``test_flwr_run``.)
    """
    vanish = [{"3": "masked_update"}, {"5": "unmask"}]
    chosen: dict[str, Any] = {
        "task": SMALL,
        "optimizer": {"name": "sgd", "learning_rate": 0.001},
        "seed": 32,
        "rounds": 2,
        "threads": 1,
        "plan": {"accumulation_steps": 2, "micro_batch_size": 8},
        "secure": {"aggregation": "semi-honest"},
        "simulation": {"clients": 6, "dropout": 0.3},
    }
    alone, ray = tmp_path / "in-process", tmp_path / "ray"
    settings = Settings.model_validate({**chosen, "out": alone})
    for round_number, leaving in enumerate(vanish, start=1):
        for part, action in leaving.items():
            stage = vanishes_at(
                fleet_spec(settings), int(part), round_number=round_number, attempt=0
            )
            assert stage == f"query.{action}"
    simulate_here(settings)
    (tmp_path / "settings.toml").write_text(Settings.model_validate(chosen).to_toml())
    process = started.simulate("--config", tmp_path / "settings.toml", out=ray)
    said = finish(process)
    assert process.returncode == 0, said
    assert (ray / MODEL).read_bytes() == (alone / MODEL).read_bytes()
    rows = read_rows(ray)
    assert [(row["num_clients"], row["weight"]) for row in rows] == [
        (row["num_clients"], row["weight"]) for row in read_rows(alone)
    ]
    for row, leaving in zip(rows, vanish, strict=True):
        gone = {name for name, action in leaving.items() if action == "masked_update"}
        assert gone <= row["refused"].keys()


@pytest.mark.slow
def test_an_error_of_the_server_app_comes_out_of_ray_as_itself(
    tmp_path: Path, started: Started
) -> None:
    (tmp_path / "task.py").write_text(MEAN_NOT_SUM)
    task = ("--task", tmp_path / "task.py:Mean", "--clients", "1")
    process = started.simulate(*task, out=tmp_path / "out")
    said = finish(process)
    assert process.returncode == 1
    assert "TaskNotAdditive: the loss of 2 examples together" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_worker_tries_the_client_algorithm_before_the_first_round(
    tmp_path: Path, started: Started
) -> None:
    (tmp_path / "mine.py").write_text(REMEMBERING)
    algorithm = ["--client-algorithm", f"{tmp_path}/mine.py:Remembering"]
    process = started.simulate("--task", SIGNS, "--clients", "2", *algorithm, out=tmp_path / "run")
    said = finish(process)
    assert process.returncode == 1, said
    assert "AlgorithmBroken: the client algorithm Remembering made two vectors" in said


@pytest.mark.slow
def test_sums_beside_the_model_s_wait_sealed_for_their_session(
    tmp_path: Path, started: Started
) -> None:
    """No process of Ray's keeps an update from one phase of a session to the next."""
    given = ["--task", SIGNS, "--clients", "4", "--rounds", "2"]
    given += ["--accumulation-steps", "2", "--micro-batch-size", "8", "--feature", named("Thirds")]
    masks = ["--secure-aggregation", "semi-honest"]
    masked = finish(process := started.simulate(*given, *masks, out=tmp_path / "masked"))
    assert process.returncode == 0, masked
    with Processes(tmp_path / "processes") as processes:
        processes.run("simulation", *given, "--out", tmp_path / "plain").succeed()
    assert kept_in(tmp_path / "masked") == kept_in(tmp_path / "plain"), masked


@pytest.mark.slow
def test_a_worker_that_is_killed_ends_the_run_by_name_and_what_was_committed_is_kept(
    tmp_path: Path, started: Started, nodes: Started
) -> None:
    process = started.simulate(*ENDLESS, out=tmp_path)
    until_committed(process, tmp_path)
    max(nodes.named(WORKER), key=psutil.Process.create_time).kill()
    said = finish(process)
    assert process.returncode == 1, said
    assert "WorkerDied: a worker of Ray failed" in said
    assert (tmp_path / MODEL).exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("ray://localhost:10001", "not HOST:PORT"),
        ("localhost:1", "refused"),
        ("localhost:70000", ""),
        ("nonsense", "Invalid address format"),
    ],
)
def test_a_cluster_that_cannot_be_joined_is_named_at_once(
    address: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADDRESS, address)
    named = f"{ADDRESS}={address} cannot be joined: .*{why}"
    with pytest.raises(SettingsError, match=named), joined(Settings(), tmp_path):
        pass
