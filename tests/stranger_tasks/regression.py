"""A regression, right and in the ways in which it goes wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset


class Regression:
    """A line through points; correct."""

    def new_model(self) -> nn.Module:
        return nn.Linear(5, 1)

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        inputs = torch.rand(30, 5, generator=torch.Generator().manual_seed(part))
        return TensorDataset(inputs, inputs.sum(1))

    def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        inputs, targets = batch
        return (model(inputs).squeeze(1) - targets).square().sum(), len(targets)


class WrongBroadcast(Regression):
    """Subtracts targets of shape (n) from predictions of shape (n, 1)."""

    def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        inputs, targets = batch
        errors = model(inputs) - targets
        return errors.square().sum(), len(targets)


class WrongBroadcastInTorch(Regression):
    """The same within torch, which warns of it."""

    def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        inputs, targets = batch
        return functional.mse_loss(model(inputs), targets, reduction="sum"), len(targets)


class WrongBroadcastOfMean(Regression):
    """The same with torch's default, which is a mean."""

    def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        inputs, targets = batch
        return nn.MSELoss()(model(inputs), targets) * len(targets), len(targets)


class MaskAsLongAsTheBatch(Regression):
    """A mean whose model adds a mask of two positions, as long as a batch of two by chance."""

    def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        inputs, targets = batch
        mask = torch.zeros(len(targets), 1, 1, 2) + torch.zeros(1, 1, 2, 1)
        errors = model(inputs).squeeze(1) - targets + mask.sum((1, 2, 3))
        return errors.square().mean(), len(targets)


class CallsBackward(Regression):
    """Takes the gradients itself, and keeps the graph, so that they are taken twice."""

    keep = True

    def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        loss, weight = super().loss_sum(model, batch)
        if torch.is_grad_enabled():
            loss.backward(retain_graph=self.keep)  # type: ignore[no-untyped-call]
        return loss, weight


class CallsBackwardOnce(CallsBackward):
    """The same without ``retain_graph``, as in a training loop."""

    keep = False


class Diffusion(Regression):
    """Draws its noise in the loss, in training and in evaluation alike; ``mean`` is a mistake."""

    mean = False

    def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        inputs, targets = batch
        noisy = inputs + torch.randn_like(inputs)
        loss = (model(noisy).squeeze(1) - targets).square().sum()
        return loss / len(targets) if self.mean else loss, len(targets)


class MeanDiffusion(Diffusion):
    """Returns the mean of a random loss."""

    mean = True


class Ragged(Regression):
    """Examples of unequal length, and no collate."""

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> list[Tensor]:  # type: ignore[override]
        return [torch.ones(3 + position % 2) for position in range(8)]

    def loss_sum(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:  # type: ignore[override]
        return model(batch[:, :1].expand(-1, 5)).square().sum(), len(batch)


class Nested(Ragged):
    """The same, which a collate puts into one nested tensor."""

    def collate(self, examples: list[Tensor]) -> Tensor:
        nested: Tensor = torch.nested.nested_tensor(examples)
        return nested

    def loss_sum(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:  # type: ignore[override]
        first = torch.stack([one[:1].expand(5) for one in batch.unbind()])
        return model(first).square().sum(), len(first)
