"""Pictures with random crops, flips and noise, for a small convolutional net with BatchNorm."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

NUM_LABELS = 3


class Crops(Dataset[tuple[Tensor, int]]):
    """Random crops of 6 x 6 from pictures of 8 x 8, with the generators that people use."""

    def __init__(self, part: int) -> None:
        generator = torch.Generator().manual_seed(part)
        self.pictures = torch.rand(24, 1, 8, 8, generator=generator)
        self.num_fetched = 0

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, position: int) -> tuple[Tensor, int]:
        self.num_fetched += 1
        top, left = random.randrange(3), np.random.randint(3)
        crop = self.pictures[position, :, top : top + 6, left : left + 6]
        if torch.rand(()) < 0.5:
            crop = crop.flip(2)
        return crop + 0.1 * torch.randn(crop.shape), position % NUM_LABELS


class Augmented:
    """A correct task with random augmentation."""

    def new_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64, NUM_LABELS),
        )

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> Crops:
        return Crops(part)

    def loss_sum(
        self, model: nn.Module, batch: Sequence[Tensor]
    ) -> tuple[Tensor, int, dict[str, Tensor]]:
        pictures, labels = batch
        scores = model(pictures)
        correct = (scores.argmax(1) == labels).sum()
        loss = functional.cross_entropy(scores, labels, reduction="sum")
        return loss, len(labels), {"accuracy": correct}


class MeanAccuracy(Augmented):
    """Returns the accuracy of the batch instead of the number of correct answers."""

    def loss_sum(
        self, model: nn.Module, batch: Sequence[Tensor]
    ) -> tuple[Tensor, int, dict[str, Tensor]]:
        loss, weight, metrics = super().loss_sum(model, batch)
        return loss, weight, {"accuracy": metrics["accuracy"] / weight}


class MaskedPixels(Augmented):
    """Its collate hides random pixels, as for masked language models."""

    def collate(self, examples: Sequence[tuple[Tensor, int]]) -> list[Tensor]:
        pictures = torch.stack([picture for picture, _ in examples])
        hidden = torch.rand(pictures.shape) < 0.2
        return [pictures.masked_fill(hidden, 0), torch.tensor([label for _, label in examples])]
