"""A task with low-rank adapters on a frozen layer, tied embeddings, buffers and a bfloat16 layer.

The frozen part depends on the random state, so that a server and a device with other seeds build
different ones. It is larger than the model that still travels in one frame with its plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

TASK = f"{Path(__file__)}:Adapted"
NUM_TOKENS, WIDTH, HIDDEN, RANK = 11, 8, 2048, 2


class LowRank(nn.Module):
    """A frozen linear layer plus B A x, of rank ``RANK`` (Hu et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(RANK, WIDTH) / 4)
        self.b = nn.Parameter(torch.zeros(WIDTH, RANK))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.base(inputs) + inputs @ self.a.T @ self.b.T
        return outputs


class AdaptedNet(nn.Module):
    """Predicts a token from the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_TOKENS, WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN).requires_grad_(False)
        self.down = nn.Linear(HIDDEN, WIDTH, dtype=torch.bfloat16).requires_grad_(False)
        self.body = LowRank()
        self.head = nn.Linear(WIDTH, NUM_TOKENS)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.rand(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.down(torch.tanh(self.up(hidden)).bfloat16()).float()
        logits: Tensor = self.head(torch.tanh(self.body(hidden) + self.get_buffer("shift")))
        return logits


class Adapted:
    """The sum of the cross-entropies of the next tokens."""

    def new_model(self) -> nn.Module:
        return AdaptedNet()

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        random = torch.Generator().manual_seed(part)
        tokens = torch.randint(NUM_TOKENS, (24,), generator=random)
        return TensorDataset(tokens, (3 * tokens + 1) % NUM_TOKENS)

    def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        tokens, following = batch
        return cross_entropy(model(tokens), following, reduction="sum"), len(tokens)
