"""A CSV file as people have them: empty cells, and one cell with a word in it."""

from __future__ import annotations

import csv
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

NUM_ROWS = 40


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """The rows of a CSV file: features, and the target in the last column."""

    def __init__(self, rows: list[list[str]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, position: int) -> tuple[Tensor, Tensor]:
        cells = [float(cell) if cell else float("nan") for cell in self.rows[position]]
        return torch.tensor(cells[:-1]), torch.tensor(cells[-1])


def made_up(part: int) -> list[list[str]]:
    """Return rows of which every tenth has no first feature, and one has no target."""
    rows = [[str((n * k + part) % 7) for k in (1, 2, 3, 4)] for n in range(NUM_ROWS)]
    for n in range(0, NUM_ROWS, 10):
        rows[n][0] = ""
    rows[5][3] = ""
    return rows


class Gaps:
    """A linear regression that does nothing about the gaps."""

    def new_model(self) -> nn.Module:
        return nn.Linear(3, 1)

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> Rows:
        if data is None:
            return Rows(made_up(part))
        with data.open() as file:
            return Rows(list(csv.reader(file)))

    def loss_sum(self, model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
        inputs, targets = batch
        return (model(inputs).squeeze(1) - targets).square().sum(), len(targets)


class Words(Gaps):
    """Its seventh row has a word in a cell of numbers."""

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> Rows:
        rows = made_up(part)
        rows[7][1] = "unknown"
        return Rows(rows)


class Empty(Gaps):
    """Its target column is empty."""

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> Rows:
        return Rows([[*row[:3], ""] for row in made_up(part)])
