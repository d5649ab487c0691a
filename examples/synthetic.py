r"""Made-up examples, as many on each device as a long round needs, for trying out a fleet.

A hidden linear map decides the class; each device draws its own 2,000 examples by its number,
around a place of its own. One wide layer keeps some 66 kB an example in memory while it works, so
that small devices are bound by memory though the model has 221,194 parameters only. Try it::

    headwater-simulate --task examples/synthetic.py:Synthetic \
        --fleet examples/fleets/sixteenfold.toml
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

NUM_INPUTS, NUM_HIDDEN, NUM_CLASSES = 16, 8192, 10
EXAMPLES_PER_DEVICE = 2000
TEST_EXAMPLES = 1000
SEED = 11
# Of a device's own place from the middle, in standard deviations of its examples.
DISTANCE = 0.5


class Synthetic:
    """Sixteen numbers in, one of ten classes out."""

    def new_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(NUM_INPUTS, NUM_HIDDEN), nn.ReLU(), nn.Linear(NUM_HIDDEN, NUM_CLASSES)
        )

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        random = np.random.default_rng([SEED, 1, part])
        place = DISTANCE * random.standard_normal(NUM_INPUTS)
        return _examples(place + random.standard_normal((EXAMPLES_PER_DEVICE, NUM_INPUTS)))

    def test_examples(self) -> TensorDataset:
        random = np.random.default_rng([SEED, 2])
        places = DISTANCE * random.standard_normal((TEST_EXAMPLES, NUM_INPUTS))
        return _examples(places + random.standard_normal((TEST_EXAMPLES, NUM_INPUTS)))

    def loss_sum(
        self, model: nn.Module, batch: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, int, dict[str, Tensor]]:
        inputs, labels = batch
        logits = model(inputs)
        loss = functional.cross_entropy(logits, labels, reduction="sum")
        return loss, len(labels), {"accuracy": (logits.argmax(1) == labels).sum()}


def _examples(inputs: np.ndarray) -> TensorDataset:
    hidden_map = np.random.default_rng([SEED, 0]).standard_normal((NUM_INPUTS, NUM_CLASSES))
    labels = (inputs @ hidden_map).argmax(axis=1)
    return TensorDataset(torch.tensor(inputs, dtype=torch.float32), torch.tensor(labels))
