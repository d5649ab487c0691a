"""Small real models for the laws: an MLP, a CNN with GroupNorm, a transformer on ragged text.

Each follows its parameters' dtype, so that the reference can run it in float64. None has a kink as
ReLU and max pooling do: where a value is within float32's rounding of it, float32 and float64 take
different sides, and the two gradients differ by far more than rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

NUM_EXAMPLES = 40
CLASSES = 5
VOCABULARY = 11
LONGEST = 9


def _random(part: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + part)


@dataclass(frozen=True)
class Mlp:
    """Vectors of 6 in, one of 5 classes out."""

    num_examples: int = NUM_EXAMPLES

    def new_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, CLASSES))

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        random = _random(part)
        return TensorDataset(
            torch.randn(self.num_examples, 6, generator=random),
            torch.randint(CLASSES, (self.num_examples,), generator=random),
        )

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        inputs, labels = batch
        logits = model(inputs.to(next(model.parameters()).dtype))
        return functional.cross_entropy(logits, labels, reduction="sum"), len(labels)


@dataclass(frozen=True)
class Cnn(Mlp):
    """Images of 8x8 in, one of 5 classes out."""

    def new_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
            nn.GELU(),
            nn.AvgPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.GroupNorm(4, 8),
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(8 * 16, CLASSES),
        )

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        random = _random(part)
        return TensorDataset(
            torch.randn(self.num_examples, 1, 8, 8, generator=random),
            torch.randint(CLASSES, (self.num_examples,), generator=random),
        )


class _Texts(Dataset[Tensor]):
    def __init__(self, texts: list[Tensor]) -> None:
        self._texts = texts

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, position: int) -> Tensor:
        return self._texts[position]


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.block = nn.TransformerEncoderLayer(
            16, nhead=2, dim_feedforward=32, dropout=0.0, activation="gelu", batch_first=True
        )
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        length = tokens_BT.shape[1]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        logits: Tensor = self.head(self.block(self.embedding(tokens_BT), src_mask=future))
        return logits


@dataclass(frozen=True)
class Ragged:
    """Texts of 2 to 9 tokens; the weight is the number of tokens that are predicted."""

    num_examples: int = NUM_EXAMPLES
    max_weight_per_example: int = LONGEST - 1

    def new_model(self) -> nn.Module:
        return _Transformer()

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> _Texts:
        random = _random(part)
        lengths = torch.randint(2, LONGEST + 1, (self.num_examples,), generator=random)
        return _Texts([torch.randint(1, VOCABULARY, (int(n),), generator=random) for n in lengths])

    def collate(self, examples: list[Tensor]) -> Tensor:
        return nn.utils.rnn.pad_sequence(examples, batch_first=True)

    def loss_sum(self, model: nn.Module, tokens_BT: Tensor) -> tuple[Tensor, int]:
        targets_BT = tokens_BT[:, 1:]
        logits_BTV = model(tokens_BT[:, :-1])
        loss = functional.cross_entropy(
            logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=0, reduction="sum"
        )
        return loss, int((targets_BT != 0).sum())


ARCHITECTURES: dict[str, Any] = {"mlp": Mlp(), "cnn": Cnn(), "transformer": Ragged()}
