"""The line and the table that describe a partition, and partitions that are refused."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message, RecordDict

from headwater.client.device.hardware import this_machine
from headwater.client.flower.request import read_request
from headwater.common.errors import MissingColumn, NoSuchPartition
from headwater.common.flower.grid import enter_run
from headwater.common.model.trained_model import MODEL
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import load
from headwater.server.rounds.round_row import RoundRow
from headwater.simulation.reports.partition_table import examples_of_devices, partition_line
from headwater.simulation.run import run_engine
from tests.processes import Processes

# Forty examples of four labels; a method returns their writers.
TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Letters:
    def new_model(self):
        return nn.Linear(3, 4)

    def train_examples(self, *, data, part, num_parts):
        labels = torch.arange(40) % 4
        inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
        return TensorDataset(inputs[part::num_parts], labels[part::num_parts])

    def columns(self, examples):
        return {"author": ["ABCDEFGHIJ"[at // 4] for at in range(40)]}

    def loss_sum(self, model, batch):
        inputs, labels = batch
        return nn.functional.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)
"""


def settings_of(folder: Path, partition: str, **others: Any) -> Settings:
    file = folder / f"{folder.name}.py"
    file.write_text(TASK)
    chosen = {
        "task": f"{file}:Letters",
        "threads": 1,
        "rounds": 2,
        "plan.accumulation_steps": 2,
        "plan.micro_batch_size": 4,
        "simulation.clients": 5,
        "partition.kind": partition,
        "out": folder / "out",
    }
    dotted = {name.replace("__", "."): value for name, value in others.items()}
    return load(None, chosen | dotted)


def sizes(settings: Settings) -> list[int]:
    return [held.num_examples for held in examples_of_devices(settings)]


def test_the_devices_report_their_partition(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "quantity:1", plan__accumulation_steps=None)
    rows: list[RoundRow] = []
    run_engine(settings, on_round=rows.append, resume=False)
    # The planner gives each device all its examples, as the target is more than they have.
    found = {int(client.name): client.num_examples for client in rows[0].clients}
    assert [found[part] for part in range(5)] == sizes(settings)


def test_another_seed_is_another_partition_and_the_same_seed_the_same_model(
    tmp_path: Path,
) -> None:
    models = []
    for number, seed in enumerate([1, 1, 2]):
        out = tmp_path / str(number)
        settings = settings_of(tmp_path, "dirichlet:0.5", seed=seed, out=out)
        run_engine(settings, on_round=lambda row: None, resume=False)
        models.append((out / MODEL).read_bytes())
    assert models[0] == models[1] != models[2]


def test_the_line_shows_sizes_and_labels(tmp_path: Path) -> None:
    said = partition_line(settings_of(tmp_path, "labels:4"))
    # Ten examples of each label in five shards of two, one on each device.
    assert said == "8 examples a device, median 8; 4 values of label"
    said = partition_line(settings_of(tmp_path, "column:author"))
    assert said == "8 examples a device, median 8; 2 values of author"
    said = partition_line(settings_of(tmp_path, "task"))
    assert said == "8 examples a device, median 8; 4 values of label"


def test_the_line_counts_devices_that_would_have_been_empty(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "dirichlet:0.001", simulation__clients=40)
    # Each of forty devices has just one of forty examples, so all owners but those four or so that
    # the four labels have were given one.
    assert partition_line(settings).startswith("1 example a device, median 1; 1 value of label; 3")
    assert partition_line(settings).endswith("empty devices got an example of the largest")


def test_the_line_describes_the_first_of_many_devices(tmp_path: Path) -> None:
    settings = settings_of(
        tmp_path, "iid", simulation__clients=10**6, partition__examples_per_device=3
    )
    assert partition_line(settings).startswith(
        "of 1,000,000 devices the first 1,000 have 3 examples"
    )


@pytest.mark.parametrize(
    ("partition", "clients", "error"),
    [("column:region", 5, MissingColumn), ("iid", 41, NoSuchPartition)],
)
def test_an_impossible_partition_is_refused_before_the_first_round(
    partition: str, clients: int, error: type[Exception], tmp_path: Path
) -> None:
    with pytest.raises(error):
        partition_line(settings_of(tmp_path, partition, simulation__clients=clients))


@pytest.mark.slow
def test_the_command_shows_the_partition_and_refuses_an_impossible_one(tmp_path: Path) -> None:
    task = settings_of(tmp_path, "task").task

    def simulate(*given: str, status: int) -> subprocess.CompletedProcess[str]:
        run = ("--task", task, "--clients", 5, "--out", tmp_path / "out")
        with Processes(tmp_path / f"status-{status}") as processes:
            return processes.complete("simulation", *run, *given, status=status)

    shown = simulate("--partition", "column:author", "--show-partition", status=0)
    assert "author" in shown.stdout.splitlines()[0]
    assert len(shown.stdout.splitlines()) == 1 + 5 + 1
    assert not (tmp_path / "out").exists()
    refused = simulate("--partition", "column:region", status=2)
    assert "MissingColumn: the examples of Letters have no column 'region'" in refused.stderr
    assert "columns(examples)" in refused.stderr
    assert not (tmp_path / "out").exists()


def test_under_flower_the_run_s_configuration_partitions_the_data() -> None:
    chosen = {"partition.kind": "labels:3", "partition.examples_per_device": 8, "seed": 5}
    settings = load(None, {"task": "tests/tasks.py:TwoLayers", **chosen})
    context = Context(
        run_id=1,
        node_id=1,
        node_config={"partition-id": 3, "num-partitions": 7},
        state=RecordDict(),
        run_config=settings.to_run_config(),
    )
    enter_run(1)
    request = read_request(Message(RecordDict(), 1, "train"), context, this_machine)
    assert request.identity.rule == settings.partition.rule(seed=5)
    assert (request.identity.part, request.identity.num_parts) == (3, 7)
