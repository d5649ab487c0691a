r"""Handwritten digits of which some are on slow devices only, for looking at fairness.

The images of 0 to 6 are dealt out evenly over the first two thirds of the devices, those of 7, 8
and 9 over the last third, which the fleet's file makes sixteen times slower. Try it::

    headwater-simulate --task examples/slow_owners.py:SlowOwners \
        --fleet examples/fleets/slow_owners.toml --effective-batch-size 300 --weighting dataset
"""

from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

TEST_FRACTION = 0.2
SPLIT_SEED = 7
SLOW_CLASSES = (7, 8, 9)


class SlowOwners:
    """An 8x8 image in, one of ten digits out."""

    def new_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        if data is not None:
            raise ValueError(
                "the digits come with scikit-learn: leave --data out, or name a --task"
            )
        images, labels = self._all
        first_slow = 2 * num_parts // 3
        is_slow = part >= first_slow
        owns = torch.isin(labels, torch.tensor(SLOW_CLASSES)) == is_slow
        rows = owns[self._num_test :].nonzero().squeeze(1) + self._num_test
        owners = num_parts - first_slow if is_slow else first_slow
        rows = rows[part - first_slow if is_slow else part :: owners]
        return TensorDataset(images[rows], labels[rows])

    def test_examples(self) -> TensorDataset:
        images, labels = self._all
        return TensorDataset(images[: self._num_test], labels[: self._num_test])

    def loss_sum(
        self, model: nn.Module, batch: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, int, dict[str, Tensor]]:
        images, labels = batch
        logits = model(images)
        loss = functional.cross_entropy(logits, labels, reduction="sum")
        return loss, len(labels), {"accuracy": (logits.argmax(1) == labels).sum()}

    @cached_property
    def _all(self) -> tuple[Tensor, Tensor]:
        """Return images scaled to 0..1 and labels, shuffled; the first are the test examples."""
        images, labels = load_digits(return_X_y=True)
        shuffle = np.random.default_rng(SPLIT_SEED).permutation(len(labels))
        return (
            torch.tensor(images[shuffle] / 16, dtype=torch.float32),
            torch.tensor(labels[shuffle], dtype=torch.int64),
        )

    @property
    def _num_test(self) -> int:
        return int(len(self._all[1]) * TEST_FRACTION)
