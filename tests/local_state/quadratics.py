"""Devices with unlike quadratic losses, of which everything is known in closed form."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

CURVATURES, OPTIMA, COUNTS = (1.0, 4.0, 0.25), (-1.0, 2.0, 6.0), (8, 16, 24)


class Point(nn.Module):
    """One number, which is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.zeros(1))


class Quadratics:
    """Device i has ``COUNTS[i]`` examples of the loss a/2 (x - b)^2, all alike."""

    def new_model(self) -> nn.Module:
        return Point()

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        one = torch.tensor([CURVATURES[part], OPTIMA[part]])
        return TensorDataset(one.repeat(COUNTS[part], 1))

    def test_examples(self) -> TensorDataset:
        return self.train_examples(data=None, part=0, num_parts=1)

    def loss_sum(
        self, model: nn.Module, batch: tuple[Tensor]
    ) -> tuple[Tensor, int, dict[str, Tensor]]:
        assert isinstance(model, Point)
        curvatures, optima = batch[0].T
        return (curvatures / 2 * (model.at - optima) ** 2).sum(), len(optima), {}


def optimum() -> float:
    """Return where the sum of all examples' losses is least."""
    parts = [(n * a, b) for n, a, b in zip(COUNTS, CURVATURES, OPTIMA, strict=True)]
    return sum(w * b for w, b in parts) / sum(w for w, _ in parts)


def fixed_point_of_fedavg(rate: float, steps: tuple[int, ...]) -> float:
    """Return where rounds of plain local steps end.

    Device i goes 1 - (1 - rate a)^steps of its way, and the mean of the moves is zero there.
    """
    parts = [
        (n * (1 - (1 - rate * a) ** h), b)
        for n, a, b, h in zip(COUNTS, CURVATURES, OPTIMA, steps, strict=True)
    ]
    return sum(w * b for w, b in parts) / sum(w for w, _ in parts)
