"""Devices whose masked windows must be taken apart are late once, and then get the time for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import Processes, port_of, rows

pytestmark = pytest.mark.slow

# A micro-batch takes 20 ms and 1 ms an example: 0.15 s for 64 in four, and 1.3 s one by one.
TASK = """
import time
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Task:
    def new_model(self):
        return nn.Linear(4, 2)

    def train_examples(self, *, data, part, num_parts):
        inputs = torch.randn((64, 4), generator=torch.Generator().manual_seed(part))
        labels = (inputs[:, 0] > 0).long()
        inputs[5] = torch.nan
        return TensorDataset(inputs, labels)

    def loss_sum(self, model, batch):
        inputs, labels = batch
        time.sleep(0.02 + 0.001 * len(labels))
        return nn.functional.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)
"""
MASKED = ("--secure-aggregation", "semi-honest")


def test_a_run_goes_on_when_all_its_devices_ask_for_more_time(tmp_path: Path) -> None:
    path = tmp_path / "late.py"
    path.write_text(TASK)
    task = f"{path}:Task"
    planned = ("--rounds", 4, "--accumulation-steps", 4, "--micro-batch-size", 16, *MASKED)
    with Processes(tmp_path) as processes:
        server = processes.server(*planned, "--min-clients", 3, task=task)
        flags = ("--num-parts", 3, "--no-check", *MASKED)
        port = port_of(server)
        clients = [processes.client(port, part, *flags, task=task) for part in range(3)]
        for process in (server, *clients):
            process.succeed()
        said = [client.text() for client in clients]
    found = rows(tmp_path / "out")
    assert [row["round"] for row in found] == [1, 2, 3, 4]
    for row in found:
        assert row["num_clients"] == 3
        assert (row["num_examples"], row["num_examples_left_out"]) == (3 * 63, 3)
    for text in said:
        assert text.count("its masked window was late") == 1
        assert text.count("TooLittleTime") == 1
