"""Devices with unlike quadratic losses, of which everything is known in closed form."""

from __future__ import annotations

from collections.abc import Collection, Sequence
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


class Heads(nn.Module):
    """Two numbers, of which each example uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))


class UnlikeHeads(Quadratics):
    """As ``Quadratics``, but device i trains one head alone: the even or the odd one, as i is."""

    def new_model(self) -> nn.Module:
        return Heads()

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        one = torch.tensor([float(part % 2), OPTIMA[part % 3]])
        return TensorDataset(one.repeat(8, 1))

    def loss_sum(
        self, model: nn.Module, batch: tuple[Tensor]
    ) -> tuple[Tensor, int, dict[str, Tensor]]:
        assert isinstance(model, Heads)
        parities, optima = batch[0].T
        head = model.odd if parities[0] else model.even
        return (0.5 * (head - optima) ** 2).sum(), len(optima), {}


def scaffold_of_heads(cohorts: Sequence[Collection[int]], rate: float, steps: int) -> list[float]:
    """Return both heads by algorithm 1: a head that a device does not use has a gradient of 0."""
    server, known = [0.0, 0.0], dict[int, list[float]]()
    for cohort in cohorts:
        mean = [sum(one[at] for one in known.values()) / max(len(known), 1) for at in (0, 1)]
        ends = []
        for device in cohort:
            own = known.get(device, mean)
            place, seen = list(server), [0.0, 0.0]
            for _ in range(steps):
                for at in (0, 1):
                    gradient = (place[at] - OPTIMA[device % 3]) * (device % 2 == at)
                    seen[at] += gradient / steps
                    place[at] -= rate * (gradient + mean[at] - own[at])
            ends.append((place, device, seen))
        server = [sum(place[at] for place, _, _ in ends) / len(ends) for at in (0, 1)]
        known |= {device: seen for _, device, seen in ends}
    return server


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
