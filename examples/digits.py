"""Handwritten digits, split over the devices as unevenly as real owners would.

The 1,797 images in digits.json are dealt out by a Dirichlet(0.3) draw for each digit: most
devices see a few digits only, and hardly any two have equally many. Try it::

    headwater-simulate --task examples/digits.py:Digits
"""

import json
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from headwater.common.user_code.bundled_examples import HOME

TEST_FRACTION = 0.2
CONCENTRATION = 0.3
SPLIT_SEED = 7


class Digits:
    """An 8x8 image in, one of ten digits out."""

    def new_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        if data is not None:
            raise ValueError("the digits come with this file: leave --data out, or name a --task")
        images, labels = self._train
        rows = self._parts(num_parts)[part]
        return TensorDataset(images[rows], labels[rows])

    def test_examples(self) -> TensorDataset:
        return TensorDataset(*self._test)

    def loss_sum(
        self, model: nn.Module, batch: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, int, dict[str, Tensor]]:
        images, labels = batch
        logits = model(images)
        loss = functional.cross_entropy(logits, labels, reduction="sum")
        return loss, len(labels), {"accuracy": (logits.argmax(1) == labels).sum()}

    def predict(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        probability, digit = model(batch[0]).softmax(1).max(1)
        return {"digit": digit, "probability": probability}

    @cached_property
    def _all(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return images scaled to 0..1, labels, and a seeded shuffle of their positions."""
        images, labels = _load_digits()
        shuffle = np.random.default_rng(SPLIT_SEED).permutation(len(labels))
        return (
            torch.tensor(images / 16, dtype=torch.float32),
            torch.tensor(labels, dtype=torch.int64),
            torch.from_numpy(shuffle),
        )

    @property
    def _train(self) -> tuple[Tensor, Tensor]:
        images, labels, shuffle = self._all
        rows = shuffle[int(len(labels) * TEST_FRACTION) :]
        return images[rows], labels[rows]

    @property
    def _test(self) -> tuple[Tensor, Tensor]:
        images, labels, shuffle = self._all
        rows = shuffle[: int(len(labels) * TEST_FRACTION)]
        return images[rows], labels[rows]

    def _parts(self, num_parts: int) -> list[Tensor]:
        """Deal each digit's images out by its own Dirichlet draw; nobody is left without any."""
        if num_parts not in self._dealt:
            labels = self._train[1].numpy()
            if num_parts > len(labels):
                raise ValueError(f"{len(labels):,} digits are for at most as many devices")
            random = np.random.default_rng([SPLIT_SEED, num_parts])
            rows: list[list[int]] = [[] for _ in range(num_parts)]
            for digit in range(10):
                shares = random.dirichlet([CONCENTRATION] * num_parts)
                owners = random.choice(num_parts, size=int((labels == digit).sum()), p=shares)
                for row, owner in zip(np.flatnonzero(labels == digit), owners, strict=True):
                    rows[owner].append(int(row))
            for poor in (part for part in rows if not part):
                poor.append(max(rows, key=len).pop())
            self._dealt[num_parts] = [torch.tensor(sorted(part)) for part in rows]
        return self._dealt[num_parts]

    @cached_property
    def _dealt(self) -> dict[int, list[Tensor]]:
        return {}


def _load_digits() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Read digits.json: each row has 64 signs, 0 to g for 0 to 16, and the digit."""
    rows = json.loads((HOME / "examples" / "digits.json").read_text(encoding="utf-8"))["rows"]
    images = [[int(sign, 17) for sign in row[:64]] for row in rows]
    return np.array(images, dtype=np.float64), np.array([int(row[65:]) for row in rows])
