"""A device that has no room for a model as its task builds it, over real sockets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from tests.processes import Processes, model_digest, port_of

pytestmark = pytest.mark.slow

TASK = f"{Path(__file__)}:Wide"
WIDTH, NUM_LAYERS = 2048, 24  # 403 MB in float32, 57 in four bits
SETTINGS = ("--rounds", 2, "--min-clients", 1, "--accumulation-steps", 4, "--micro-batch-size", 1)
NF4 = ("--frozen-dtype", "nf4")


class Layer(nn.Module):
    """A frozen layer beside what the values were, and a bias that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, values: Tensor) -> Tensor:
        return values + torch.tanh(self.base(values) + self.shift)


class Wide:
    """The sum of cross-entropies of 12 rows of noise."""

    def new_model(self) -> nn.Module:
        return nn.Sequential(*(Layer() for _ in range(NUM_LAYERS)), nn.Linear(WIDTH, 3))

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        random = torch.Generator().manual_seed(part)
        return TensorDataset(
            torch.randn(12, WIDTH, generator=random), torch.randint(3, (12,), generator=random)
        )

    def loss_sum(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        values, labels = batch
        return cross_entropy(model(values), labels, reduction="sum"), len(labels)


def trained(processes: Processes, out: Path, *limit: object) -> str:
    """Run a server and a device; return what the device has told."""
    server = processes.server(*SETTINGS, *NF4, "--seed", 5, "--out", out, task=TASK)
    state = ("--state", processes.folder / f"state-{out.name}")
    device = processes.client(port_of(server), 0, "--num-parts", 1, *NF4, *state, *limit, task=TASK)
    for process in (server, device):
        process.succeed()
    return device.text()


def test_it_is_sent_the_frozen_part_and_trains_the_same_model(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        whole = trained(processes, tmp_path / "whole")
        sent = trained(processes, tmp_path / "sent", "--memory-limit", "640MB")
    assert "The server sends its frozen part" not in whole
    assert "The server sends its frozen part" in sent
    assert model_digest(tmp_path / "whole") == model_digest(tmp_path / "sent")


def test_without_room_for_what_is_sent_it_is_refused(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        server = processes.server(*SETTINGS, *NF4, "--out", tmp_path / "out", task=TASK)
        limit = ("--memory-limit", "300MB")
        device = processes.client(port_of(server), 0, "--num-parts", 1, *NF4, *limit, task=TASK)
        assert device.wait() != 0
        assert "OutOfMemory" in device.text()
