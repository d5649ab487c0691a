"""A task as a user writes one in a notebook: a class, and no file that an option could name."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset


class Signs:
    """Whether three numbers have a positive sum."""

    def new_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(part)
        inputs = torch.randn(40, 3, generator=generator)
        return TensorDataset(inputs, (inputs.sum(1) > 0).long())

    def test_examples(self) -> TensorDataset:
        return self.train_examples(data=None, part=999, num_parts=1)

    def loss_sum(
        self, model: nn.Module, batch: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, int, dict[str, Tensor]]:
        inputs, labels = batch
        logits = model(inputs)
        num_right = (logits.argmax(1) == labels).sum()
        return cross_entropy(logits, labels, reduction="sum"), len(labels), {"accuracy": num_right}


class Annealed(Signs):
    """Learns faster in later rounds: the loss is multiplied by the round's number."""

    number = 0

    def set_round(self, number: int) -> None:
        self.number = number

    def loss_sum(
        self, model: nn.Module, batch: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, int, dict[str, Tensor]]:
        loss, weight, metrics = super().loss_sum(model, batch)
        return self.number * loss, weight, metrics


SIGNS = f"{__file__}:Signs"

# A client algorithm that the trial must refuse.
REMEMBERING = """
class Remembering:
    number = 0

    def train(self, work):
        self.number += 1
        return work.sum() * self.number
"""
