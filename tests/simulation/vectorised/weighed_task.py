"""A task whose examples weigh 1 to 3 each, and all differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

NUM_EXAMPLES = 12


class Weighed:
    """Vectors in, one of five classes out; an example's weight is its own, from 1 to 3."""

    max_weight_per_example = 3

    def new_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        random = torch.Generator().manual_seed(part)
        inputs = torch.randn(NUM_EXAMPLES, 6, generator=random)
        labels = torch.randint(5, (NUM_EXAMPLES,), generator=random)
        return TensorDataset(inputs, labels, torch.randint(1, 4, (NUM_EXAMPLES,), generator=random))

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        inputs, labels, weights = batch
        logits = model(inputs)
        losses = functional.cross_entropy(logits, labels, reduction="none")
        right = (logits.argmax(1) == labels).sum()
        return (losses * weights).sum(), weights.sum(), {"accuracy": right}
