"""A device whose targets are all ignored: its update weighs nothing, and the run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from headwater.common.model.parameters import build_model
from headwater.common.model.trained_model import MODEL, load_model
from headwater.common.settings.schema import Settings
from headwater.server.operations.round_log import read_rows
from headwater.simulation.run import run_engine

IGNORED = -100
RATE = 0.5


class Labelled:
    """Examples of three devices; the second has no label."""

    def new_model(self) -> nn.Module:
        return nn.Linear(4, 3)

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        random = torch.Generator().manual_seed(part)
        inputs, labels = torch.randn(12, 4, generator=random), torch.arange(12) % 3
        return TensorDataset(inputs, torch.full_like(labels, IGNORED) if part == 1 else labels)

    def loss_sum(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Any]:
        inputs, labels = batch
        loss = functional.cross_entropy(
            model(inputs), labels, reduction="sum", ignore_index=IGNORED
        )
        return loss, (labels != IGNORED).sum()


@pytest.mark.parametrize("compute", ["one-by-one", "fused", "vectorised"])
def test_it_is_in_no_mean_and_its_row_has_no_loss(tmp_path: Path, compute: str) -> None:
    chosen: dict[str, Any] = {
        "task": f"{__file__}:Labelled",
        "rounds": 1,
        "threads": 1,
        "out": tmp_path,
        "plan": {"accumulation_steps": 3, "micro_batch_size": 4},
        "optimizer": {"name": "sgd", "learning_rate": RATE},
        "simulation": {"clients": 3, "compute": compute},
    }
    run_engine(Settings.model_validate(chosen), on_round=lambda row: None, resume=False)
    (row,) = read_rows(tmp_path)
    assert [(one["weight"], one["loss"] is None) for one in row["clients"]] == [
        (12, False),
        (0, True),
        (12, False),
    ]
    task = Labelled()
    image = build_model(task, seed=0)
    model, before = image.model, [one.detach().clone() for one in image.model.parameters()]
    model.zero_grad()
    for part in (0, 2):
        loss, _ = task.loss_sum(model, task.train_examples(data=None, part=part, num_parts=3)[:])
        (loss / row["weight"]).backward()
    trained = load_model(tmp_path / MODEL, task).parameters()
    for found, own, start in zip(trained, model.parameters(), before, strict=True):
        assert own.grad is not None
        torch.testing.assert_close(found, start - RATE * own.grad)
