r"""Made-up examples, as many on each device as a long round needs, for trying out a fleet.

An example is thirty-two readings of four sensors. A small random network, which nobody is told,
decides the class from all of them; each device draws its own 2,000 examples by its number, around a
place of its own. A fifth of their labels are drawn at random, so that a step is only as good as the
number of examples behind it; those of the test are right. The model reads with wide shared weights:
it has 7,690 parameters only, and keeps 66 kB an example in memory while it works, so that small
devices are bound by memory and not by their links. In rounds of 2,000 examples it takes some thirty
to 85 % of the test examples. Try it::

    headwater-simulate --task examples/synthetic.py:Synthetic \
        --fleet examples/fleets/sixteenfold.toml
"""

from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

NUM_READINGS, NUM_SENSORS, NUM_HIDDEN, NUM_CLASSES = 32, 4, 512, 10
EXAMPLES_PER_DEVICE = 2000
TEST_EXAMPLES = 1000
SEED = 11
# Of a device's own place from the middle, in standard deviations of its examples.
DISTANCE = 0.5
# Of the network that decides the class, and the examples that centre its scores.
TRUE_HIDDEN, NUM_CENTRING = 16, 4096


class Readings(nn.Module):
    """The same layer for every reading, its mean over the readings, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.of_reading = nn.Linear(NUM_SENSORS, NUM_HIDDEN)
        self.of_mean = nn.Linear(NUM_HIDDEN, NUM_CLASSES)

    def forward(self, readings: Tensor) -> Tensor:
        hidden = functional.relu(self.of_reading(readings)).mean(dim=1)
        logits: Tensor = self.of_mean(hidden)
        return logits


class Synthetic:
    """Thirty-two readings of four sensors in, one of ten classes out."""

    random_labels = 0.2

    def new_model(self) -> nn.Module:
        return Readings()

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        if data is not None:
            raise ValueError("the examples are made up: leave --data out, or name another --task")
        random = np.random.default_rng([SEED, 1, part])
        place = DISTANCE * random.standard_normal(NUM_SENSORS)
        readings, labels = _examples(
            random, np.broadcast_to(place, (EXAMPLES_PER_DEVICE, NUM_SENSORS))
        )
        is_random = random.random(len(labels)) < self.random_labels
        labels = np.where(is_random, random.integers(NUM_CLASSES, size=len(labels)), labels)
        return _dataset(readings, labels)

    def test_examples(self) -> TensorDataset:
        random = np.random.default_rng([SEED, 2])
        places = DISTANCE * random.standard_normal((TEST_EXAMPLES, NUM_SENSORS))
        return _dataset(*_examples(random, places))

    def loss_sum(
        self, model: nn.Module, batch: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, int, dict[str, Tensor]]:
        readings, labels = batch
        logits = model(readings)
        loss = functional.cross_entropy(logits, labels, reduction="sum")
        return loss, len(labels), {"accuracy": (logits.argmax(1) == labels).sum()}


class RightLabels(Synthetic):
    """The same without random labels: a handful of examples makes a good step."""

    random_labels = 0.0


def _dataset(readings: np.ndarray, labels: np.ndarray) -> TensorDataset:
    return TensorDataset(torch.tensor(readings, dtype=torch.float32), torch.tensor(labels))


def _examples(random: np.random.Generator, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Draw an example around each place; return readings and labels."""
    readings = _readings(random, places)
    return readings, (_scores(readings) - _common_scores()).argmax(axis=1)


def _readings(random: np.random.Generator, places: np.ndarray) -> np.ndarray:
    own = places + random.standard_normal(places.shape)
    return own[:, None] + random.standard_normal((len(own), NUM_READINGS, NUM_SENSORS))


@cache
def _common_scores() -> np.ndarray:
    """Return what each class scores in the mean: without it taken off, one would always win."""
    random = np.random.default_rng([SEED, 3])
    places = DISTANCE * random.standard_normal((NUM_CENTRING, NUM_SENSORS))
    return np.asarray(_scores(_readings(random, places)).mean(axis=0))


def _scores(readings: np.ndarray) -> np.ndarray:
    """Return the true network's score of each class."""
    random = np.random.default_rng([SEED, 0])
    to_hidden = random.standard_normal((NUM_SENSORS, TRUE_HIDDEN))
    offsets = random.standard_normal(TRUE_HIDDEN)
    hidden = np.maximum(readings @ to_hidden + offsets, 0).mean(axis=1)
    return np.asarray(hidden @ random.standard_normal((TRUE_HIDDEN, NUM_CLASSES)))
