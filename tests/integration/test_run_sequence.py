"""One server, one fleet, two runs: devices go on with the next run, and nobody touches them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

import headwater
from headwater.server.operations.round_log import read_rows
from tests.processes import Process, Processes, port_of, until, work_in

TASKS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


class First:
    hidden = 8

    def new_model(self):
        return nn.Sequential(nn.Linear(4, self.hidden), nn.ReLU(), nn.Linear(self.hidden, 2))

    def train_examples(self, *, data, part, num_parts):
        inputs = torch.randint(-3, 4, (24, 4), generator=torch.Generator().manual_seed(part))
        return TensorDataset(inputs.float(), (inputs.sum(1) > 0).long())

    def loss_sum(self, model, batch):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
        return loss, len(labels)


class Second(First):
    hidden = 12
"""


def rows(folder: Path) -> list[set[str]]:
    """Return the devices of each round."""
    return [{client["name"] for client in row["clients"]} for row in read_rows(folder)]


@pytest.mark.slow
def test_the_next_run_has_the_devices_on_which_its_task_is_installed(tmp_path: Path) -> None:
    """Device 1 is killed in between and starts anew; device 2 lacks the second task."""
    tasks, one, two = tmp_path / "tasks.py", tmp_path / "one", tmp_path / "two"
    tasks.write_text(TASKS)
    first, second = f"{tasks}:First", f"{tasks}:Second"
    config = tmp_path / "second.toml"
    config.write_text(f'task = "{second}"\nrounds = 3\nout = "{two}"\n[cohort]\nmin_clients = 2\n')
    with Processes(tmp_path / "processes") as processes:
        there = partial(work_in, tmp_path)
        server = processes.server(
            *("--rounds", "forever", "--min-clients", 2, "--out", one), task=first, prepare=there
        )
        port = port_of(server)

        def start(part: int, also: str) -> Process:
            parts = ("--num-parts", 3, "--also-task", also)
            return processes.client(port, part, *parts, task=first)

        device_0, device_1 = start(0, f"Second={second}"), start(1, f"Second={second}")
        device_2 = start(2, f"Third={second}")
        until(lambda: {"0", "1", "2"} in rows(one), what=server.text)
        device_1.kill()
        submit = ("submit", config, "--out", one, "--next")
        submitted = processes.complete("server", *submit, prepare=there)
        assert "it begins after the current round" in submitted.stdout
        server.wait_for(r"Second on \S+")
        start(1, f"Second={second}")
        assert server.wait() == 0, server.text()
        assert device_0.wait() == 0, device_0.text()
        assert device_2.wait() == 1
        refusal = device_2.text()
        status = processes.complete("server", "status", "--out", one).stdout
        again = processes.server("--resume", "--out", one, task=first, prepare=there)
        assert again.wait() == 0, again.text()
    assert rows(two) == [{"0", "1"}] * 3
    assert "goes on with the task Second" in device_0.text()
    assert "TaskNotInstalled" in refusal
    assert f"the server went on with the run in {two}" in " ".join(status.split())
    assert f"{one} is closed: the run in {two} follows it" in again.text()
    for out, task, hidden in ((one, first, 8), (two, second, 12)):
        model = headwater.load_model(out / "model.safetensors", task=task)
        assert model.get_parameter("0.weight").shape == (hidden, 4)
