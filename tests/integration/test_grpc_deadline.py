"""A deadline over real sockets: a device sends what it has, early enough for it to arrive."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import Processes, port_of, rows

pytestmark = pytest.mark.slow

TASK = """
import time
import torch
from torch import nn

class Slow:
    def new_model(self):
        return nn.Linear(1000, 500)

    def train_examples(self, *, data, part, num_parts):
        return torch.utils.data.TensorDataset(torch.ones(1000, 1000))

    def loss_sum(self, model, batch):
        time.sleep(0.02)
        return model(batch[0]).square().sum(), len(batch[0])
"""


def test_a_device_that_is_asked_for_too_much_sends_what_it_has_in_time(tmp_path: Path) -> None:
    file = tmp_path / "slow.py"
    file.write_text(TASK)
    task = f"{file}:Slow"
    work = ("--accumulation-steps", 1000, "--micro-batch-size", 1, "--learning-rate", 1e-9)
    with Processes(tmp_path) as processes:
        server = processes.server("--rounds", 2, *work, "--deadline", 4, task=task)
        client = processes.client(port_of(server), 0, task=task)
        server.succeed()
        client.succeed()
    for row in rows(tmp_path / "out"):
        (only,) = row["clients"]
        assert row["refused"] == {}
        assert only["reason"] == "deadline"
        assert 0 < only["accumulation_steps"] < 1000
        assert row["weight"] == only["num_examples"] == only["accumulation_steps"]
