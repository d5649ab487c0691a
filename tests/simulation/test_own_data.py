"""Simulated devices with files of their own do what real devices do with them, on every engine."""

from __future__ import annotations

import csv
import os
import random
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headwater.common.errors import MissingData, SettingsError
from headwater.common.model.trained_model import MODEL
from headwater.common.settings.sources import load
from headwater.common.user_code.run_scope import run_scope
from headwater.simulation.fleet.fleet_spec import with_fleet
from headwater.simulation.reports.partition_table import examples_of_devices, partition_line
from headwater.simulation.run import run_engine
from tests.processes import Processes, port_of, rows

SIZES = {"pi2": 9, "pi10": 31, "laptop": 70, "kitchen": 23}  # not in natural order
ORDER = ["kitchen", "laptop", "pi2", "pi10"]
PLAN = {"rounds": 3, "plan.accumulation_steps": 2, "plan.micro_batch_size": 4, "threads": 1}
FLAGS = ("--rounds", 3, "--accumulation-steps", 2, "--micro-batch-size", 4)
# A package with siblings; its files have the names of other things.
PACKAGE = {
    "__init__.py": "",
    "utils.py": "def width():\n    return 2\n",
    "model.py": "from torch import nn\n\nfrom .utils import width\n\n\n"
    "def net():\n    return nn.Linear(width(), 2)\n",
    "tasks.py": """
import csv

import torch
from torch.utils.data import TensorDataset

from .model import net


class Table:
    def new_model(self):
        return net()

    def train_examples(self, *, data, part, num_parts):
        import utils  # later, in whichever process

        with open(data, newline="") as lines:
            table = torch.tensor([[float(cell) for cell in row] for row in csv.reader(lines)])
        table = table.reshape(-1, utils.width() + 1)[part::num_parts]
        return TensorDataset(table[:, :-1], table[:, -1].long())

    def loss_sum(self, model, batch):
        inputs, labels = batch
        loss = torch.nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
        return loss, len(labels)
""",
}
TASK = "own_package.tasks"
UNREADABLE = "1\n"  # a row of one cell, where the task expects three
EXTENSIONS = Path("examples/extensions").resolve()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_package").mkdir()
    for name, text in PACKAGE.items():
        (tmp_path / "own_package" / name).write_text(text)
    (tmp_path / "devices").mkdir()
    for name, size in SIZES.items():
        draw = random.Random(name).random
        cells = [(draw(), draw()) for _ in range(size)]
        with (tmp_path / "devices" / f"{name}.csv").open("w", newline="") as lines:
            csv.writer(lines).writerows([(*pair, int(sum(pair) > 1)) for pair in cells])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def simulate(out: str, **changes: Any) -> dict[str, torch.Tensor]:
    given = {key.replace("__", "."): value for key, value in changes.items()}
    chosen = {**PLAN, "task": TASK, "simulation.data": "devices/*.csv", "out": Path(out), **given}
    with run_scope({}):
        run_engine(load(None, chosen), on_round=lambda row: None, resume=False)
    return load_file(Path(out) / MODEL)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_each_device_trains_on_its_own_file_under_the_file_s_name(folder: Path) -> None:
    simulate("out")
    assert [one["name"] for one in rows(folder / "out")[0]["clients"]] == ORDER
    settings = with_fleet(load(None, {"task": TASK, "simulation.data": "devices/*.csv"}))
    with run_scope({}):
        shares = [one.num_examples for one in examples_of_devices(settings)]
    assert shares == [SIZES[name] for name in ORDER]


@pytest.mark.parametrize("compute", ["fused", "vectorised"])
def test_devices_computed_together_give_the_sums_of_one_by_one(folder: Path, compute: str) -> None:
    expected = simulate("one", simulation__compute="one-by-one")
    found = simulate("together", simulation__compute=compute)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5)


def test_a_device_whose_file_is_empty_is_left_out_and_named(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "devices" / "a.csv").write_text("")  # the first of all
    simulate("out", simulation__compute="fused")
    first = rows(folder / "out")[0]["clients"]
    assert {client["name"] for client in first} == {*SIZES}
    assert "EmptyDataset: the task Table found no example in devices/a.csv" in caplog.text


@pytest.mark.parametrize(
    "how",
    [
        {"simulation__compute": "one-by-one"},
        {"simulation__compute": "fused"},
        {"simulation__compute": "vectorised"},
        {"algorithm__name": f"{EXTENSIONS}/fedprox.py:FedProx"},
        pytest.param(
            {"secure__aggregation": "semi-honest", "secure__min_members": 3},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_device_whose_file_the_task_cannot_read_is_left_out_and_named_in_one_line(
    folder: Path, how: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "devices" / "a.csv").write_text(UNREADABLE)  # the first of all
    simulate("out", **how)
    row = rows(folder / "out")[0]
    assert {client["name"] for client in row["clients"] + row["masked_clients"]} == {*SIZES}
    [line] = [line for line in caplog.messages if "a.csv" in line]
    assert line.startswith("device a is refused: TaskFailed: train_examples failed on devices/a")
    assert re.search(r'RuntimeError: .*File ".*tasks\.py", line \d+, in train_examples', line)


def test_a_file_that_the_task_cannot_read_does_not_end_the_command_before_the_run(
    folder: Path,
) -> None:
    (folder / "devices" / "a.csv").write_text(UNREADABLE)
    chosen = with_fleet(load(None, {"task": TASK, "simulation.data": "devices/*.csv"}))
    with run_scope({}):
        said = partition_line(chosen)
    assert said.startswith("9 to 70 examples a device")
    assert said.endswith("; 1 device cannot open the data")


def test_a_file_without_an_example_is_counted_as_that_before_the_run(folder: Path) -> None:
    (folder / "devices" / "a.csv").write_text("")
    (folder / "devices" / "b.csv").write_text(UNREADABLE)
    chosen = with_fleet(load(None, {"task": TASK, "simulation.data": "devices/*.csv"}))
    with run_scope({}):
        said = partition_line(chosen)
    assert said.endswith("; no example in the data of 1 device; 1 device cannot open the data")


@pytest.mark.parametrize("engine", [{}, {"secure__aggregation": "semi-honest"}])
def test_without_data_a_task_that_needs_some_says_so_once(
    folder: Path, engine: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    text = r"(?s)^no --data was given, .*Table found no data: TypeError: .*line \d+.*open\(data"
    with pytest.raises(MissingData, match=text) as raised:
        simulate("out", simulation__data=None, simulation__clients=100, **engine)
    assert "--data" in raised.value.remedy
    assert not caplog.messages


def test_data_that_no_device_can_read_end_the_run(folder: Path) -> None:
    for file in (folder / "devices").iterdir():
        file.write_text("a,b,c\n1,2,3\n")
    with pytest.raises(MissingData, match=r"cannot use devices/\w+\.csv: ValueError: could not"):
        simulate("out")


def test_a_resumed_run_keeps_its_devices_when_files_come(folder: Path) -> None:
    simulate("out", rounds=2)
    (folder / "devices" / "b.csv").write_text("1,2,0\n")
    again = load(folder / "out" / "settings.toml", {"rounds": 3, "out": Path("out")})
    with run_scope({}):
        run_engine(again, on_round=lambda row: None, resume=True)
    assert {client["name"] for client in rows(folder / "out")[-1]["clients"]} == {*SIZES}
    (folder / "devices" / "kitchen.csv").unlink()  # so that the number is the same
    other = load(None, {**PLAN, "task": TASK, "simulation.data": "devices/*.csv", "out": "out"})
    with run_scope({}), pytest.raises(SettingsError, match=r"simulation\.data"):
        run_engine(other, on_round=lambda row: None, resume=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    [
        ("--compute", "one-by-one", "--workers", 2),
        ("--engine", "grpc"),
        ("--engine", "flower-ray"),
    ],
)
def test_every_engine_gives_the_bits_of_one_process(
    folder: Path, engine: tuple[object, ...]
) -> None:
    (folder / "devices" / "a.csv").write_text(UNREADABLE)
    with (folder / "devices" / "pi2.csv").open("a") as lines:
        lines.write("nan,0.5,1\n")
    expected = simulate("one")
    with Processes(folder) as processes:
        given = ("--task", TASK, "--data", "devices/*.csv", "--out", "other", *FLAGS, *engine)
        run = processes.run("simulation", *given, prepare=partial(os.chdir, folder))
        run.succeed()
        [line] = [line for line in run.text().splitlines() if "devices/a.csv" in line]
        assert "tasks.py" in line
        if "flower-ray" not in engine:
            assert "1 of 134 examples looked at on 4 of 5 devices" in run.text()
    assert same(load_file(folder / "other" / MODEL), expected)


@pytest.mark.slow
def test_masked_rounds_sum_the_same_files(folder: Path) -> None:
    expected = simulate("plain")
    found = simulate("masked", secure__aggregation="semi-honest", secure__min_members=3)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_real_devices_with_these_names_and_files_make_the_same_model(folder: Path) -> None:
    expected = simulate("simulated")
    there = partial(os.chdir, folder)
    with Processes(folder) as processes:
        server = processes.server(*FLAGS, "--min-clients", len(SIZES), task=TASK, prepare=there)
        port = port_of(server)
        clients = [
            processes.client(
                *(port, number, "--name", name, "--data", f"devices/{name}.csv"),
                *("--part", 0, "--num-parts", 1),
                task=TASK,
                prepare=there,
            )
            for number, name in enumerate(SIZES)
        ]
        for process in (server, *clients):
            process.succeed()
    assert same(load_file(folder / "out" / MODEL), expected)
