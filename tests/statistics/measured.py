"""Tasks that measure their examples."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import headwater

WEIGHTS = torch.tensor([0.002, -3.0, 40.0])


class Houses:
    """A price from three columns of very unlike scales; ``kind`` is a rare class, or not."""

    measured: ClassVar = {
        "inputs": headwater.Moments([0, -1, 0], [4000, 1, 0.1], size=3),
        "price": headwater.Histogram([-4.0, 0.0, 4.0, 12.0]),
        "kind": headwater.Counts(["small", "large"]),
    }
    mean, std = torch.zeros(3), torch.ones(3)

    def new_model(self) -> nn.Module:
        return nn.Linear(3, 1)

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(part)
        size = 20 + part
        areas = 2000 + 300 * torch.randn(size, 1, generator=generator)
        rest = torch.rand(size, 2, generator=generator) * torch.tensor([2.0, 0.1])
        inputs = torch.cat([areas, rest - torch.tensor([1.0, 0.0])], 1)
        return TensorDataset(inputs, inputs @ WEIGHTS)

    def test_examples(self) -> TensorDataset:
        return self.train_examples(data=None, part=77, num_parts=1)

    def statistics(self, example: tuple[Tensor, Tensor]) -> Mapping[str, Any]:
        inputs, price = example
        kind = "large" if inputs[0] > 2400 else "small"
        return {"inputs": inputs, "price": price, "kind": kind}

    def use_statistics(self, found: headwater.Statistics) -> None:
        self.mean, self.std = found["inputs"].mean, found["inputs"].std

    def loss_sum(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        inputs, price = batch
        predicted = model((inputs - self.mean) / self.std).squeeze(1)
        return mse_loss(predicted, price, reduction="sum"), len(price)


class WideHouses(Houses):
    """The same with a matrix that factors make shorter."""

    def new_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 1))


class Jittered(TensorDataset):
    """Examples that differ each time they are read."""

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor]:
        inputs, price = super().__getitem__(at)  # type: ignore[no-untyped-call]
        return inputs * (1 + torch.rand(()) / 100), price


class JitteredHouses(Houses):
    """The same, with areas that are drawn as they are read."""

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        return Jittered(*super().train_examples(data=data, part=part, num_parts=num_parts).tensors)


HOUSES = f"{__file__}:Houses"
