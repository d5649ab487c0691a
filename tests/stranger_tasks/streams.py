"""Examples that come as a stream, finite or without end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from tests.stranger_tasks.regression import Regression


class Points(IterableDataset[tuple[Tensor, Tensor]]):
    """Points of a plane; ``number`` of them, or without end."""

    def __init__(self, number: int | None) -> None:
        self.number = number

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for n in itertools.count() if self.number is None else range(self.number):
            inputs = torch.tensor([n % 2, n % 3, n % 5, n % 7, 1.0])
            yield inputs, inputs.sum()


class Finite(Regression):
    """A stream of thirty examples."""

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> Any:
        return Points(30)


class Endless(Regression):
    """A stream without end, from a generator function."""

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> Any:
        return iter(Points(None))


class Loader(Regression):
    """A DataLoader, which gives batches."""

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> Any:
        return DataLoader(Points(30), batch_size=5)


class Nothing(Regression):
    """Forgets to return its examples."""

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> Any:
        Points(30)
