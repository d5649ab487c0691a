"""A device whose power goes in mid-window, and that goes on where it was: over real sockets."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import Processes, model_digest, port_of, rows, until

pytestmark = pytest.mark.slow

# Device 0 takes longer than the spool's pause for its third micro-batch, and stops at its fifth
# until the gate is open; so when it stops, the first three are on disk.
TASK = """
import os, time
import torch
from torch import nn
from torch.utils.data import TensorDataset
from headwater.client.training.spool import EVERY_SECONDS


class Task:
    def new_model(self):
        return nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 2))

    def train_examples(self, *, data, part, num_parts):
        self.part = part
        random = torch.Generator().manual_seed(part)
        inputs = torch.randn((50 + 7 * part, 4), generator=random)
        return TensorDataset(inputs, (inputs.sum(1) > 0).long())

    def loss_sum(self, model, batch):
        inputs, labels = batch
        if torch.is_grad_enabled() and len(labels) == 8 and self.part == 0:
            self.pass_gate()
        loss = nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
        return loss, len(labels)

    def pass_gate(self):
        with open({begun!r}, "a") as file:
            file.write("x")
            num_begun = file.tell()
        if num_begun == 3:
            time.sleep(EVERY_SECONDS + 0.2)
        while num_begun == 5 and not os.path.exists({gate!r}):
            time.sleep(0.01)
"""

SETTINGS = (
    *("--rounds", 2, "--accumulation-steps", 6, "--micro-batch-size", 8),
    *("--optimizer", "adam", "--learning-rate", 0.01),
)


def test_a_device_that_is_killed_in_mid_window_sums_no_example_twice(tmp_path: Path) -> None:
    begun, gate, spool = (tmp_path / name for name in ("begun", "gate", "spool"))
    file = tmp_path / "task.py"
    file.write_text(TASK.format(begun=str(begun), gate=str(gate)))
    task = f"{file}:Task"
    with Processes(tmp_path) as processes:
        server = processes.server(*SETTINGS, "--min-clients", 2, task=task)
        port = port_of(server)
        killed = processes.client(port, 0, "--spool", spool, task=task)
        other = processes.client(port, 1, "--spool", spool, task=task)
        until(lambda: begun.exists() and begun.stat().st_size == 5, what=lambda: "device 0 at work")
        killed.kill()
        killed.wait()
        assert [path.name.split("-")[0] for path in spool.iterdir()] == ["0"]
        gate.touch()
        again = processes.client(port, 0, "--spool", spool, task=task)
        for process in (server, again, other):
            process.succeed()
        assert "continues after 24 of 48 examples" in again.text()
        # Five of six were begun before the kill, three of which count: the other three after it.
        # The second round has six again.
        assert begun.stat().st_size == 5 + 3 + 6
        assert list(spool.iterdir()) == []
        out = tmp_path / "unbroken"
        more = ("--clients", 2, "--threads", 1, "--out", out, "--task", task)
        processes.run("simulation", *SETTINGS, *more).succeed()
        assert model_digest(tmp_path / "out") == model_digest(out)
    clients = {client["name"]: client for client in rows(tmp_path / "out")[0]["clients"]}
    assert (clients["0"]["num_examples"], clients["0"]["accumulation_steps"]) == (48, 6)
    assert clients["0"]["reason"] == "quota"
