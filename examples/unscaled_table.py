"""A table whose columns have very unlike scales, and which nobody scaled: prices of houses.

Before training the devices add up what ``statistics`` returns of each example, within the bounds of
``measured``. The server divides once, and both sides get the result in ``use_statistics``: so each
column is scaled by the mean and the spread of all devices' rows, and no row leaves a device::

    headwater-simulate --task examples/unscaled_table.py:UnscaledTable --clients 10 --rounds 40 \
        --statistics --optimizer sgd --learning-rate 0.2

The bounds are what anybody knows of a house. They need not be tight: what lies beyond is cut to
them, and counted. Without ``--statistics`` the same run diverges.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import headwater

COLUMNS = ("area", "year", "distance", "rooms")
Batch = tuple[Tensor, Tensor]


class UnscaledTable:
    """The price of a house, by a line through its columns."""

    measured: ClassVar[dict[str, Any]] = {
        "inputs": headwater.Moments([0, 1800, 0, 0], [1000, 2100, 100_000, 30], size=4),
        "price": headwater.Moments(0, 5_000_000),
        "city": headwater.Counts(["inside", "outside"]),
    }
    found: headwater.Statistics | None = None  # as in the check of the task

    def new_model(self) -> nn.Module:
        return nn.Linear(len(COLUMNS), 1)

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        return houses(seed=part, num_houses=200)

    def test_examples(self) -> TensorDataset:
        return houses(seed=10_000, num_houses=500)

    def statistics(self, example: tuple[Tensor, Tensor]) -> Mapping[str, Any]:
        inputs, price = example
        city = "inside" if inputs[2] < 3000 else "outside"
        return {"inputs": inputs, "price": price, "city": city}

    def use_statistics(self, found: headwater.Statistics) -> None:
        self.found = found

    def loss_sum(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        inputs, prices = batch
        if self.found is not None:
            inputs = self.found["inputs"].scaled(inputs)
            prices = self.found["price"].scaled(prices)
        return functional.mse_loss(model(inputs)[:, 0], prices, reduction="sum"), len(prices)


def houses(*, seed: int, num_houses: int) -> TensorDataset:
    """Return made-up houses of one device; each has a city of its own, and its distances."""
    random = torch.Generator().manual_seed(seed)
    area = 60 + 100 * torch.rand(num_houses, generator=random)
    year = 1950 + 70 * torch.rand(num_houses, generator=random)
    distance = (2_000 + 3_000 * (seed % 10)) * torch.rand(num_houses, generator=random)
    rooms = (area / 30).round() + torch.randint(0, 3, (num_houses,), generator=random)
    price = 3_000 * area + 1_500 * (year - 1950) - 4 * distance + 20_000 * rooms
    price += 20_000 * torch.randn(num_houses, generator=random)
    return TensorDataset(torch.stack([area, year, distance, rooms], 1), price)
