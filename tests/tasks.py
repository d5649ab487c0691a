"""Small tasks whose sums are exact in float32: whole numbers in, whole numbers out.

Every product and partial sum is a whole number far below 2^24, so no order of adding can round, and
a test may ask for equality of bits where it means equality of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import TensorDataset

# What an example does, in its last column.
FINE, NAN_LOSS, NAN_GRADIENT, RAISES_BACKWARD, RAISES_FORWARD, HUGE_GRADIENT = range(6)

NUM_INPUTS, NUM_HIDDEN = 3, 2


class _Trip(torch.autograd.Function):
    """Passes values through; the backward pass calls ``on_backward`` first."""

    @staticmethod
    def forward(ctx: Any, hidden_BH: Tensor, on_backward: Callable[[], None]) -> Tensor:
        ctx.on_backward = on_backward
        return hidden_BH.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.on_backward()
        return grads[0], None


class TwoLayers:
    """Half the squared error of a linear net with a hidden layer; examples may misbehave.

    The backward pass meets ``_Trip`` behind the output layer and before the input layer, so an
    exception there comes when half of the gradients have been added.
    """

    def __init__(self, *, max_micro_batch: int | None = None) -> None:
        self.max_micro_batch = max_micro_batch
        self.seen: list[int] = []

    def new_model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(NUM_INPUTS, NUM_HIDDEN), nn.Linear(NUM_HIDDEN, 1))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randint(-2, 3, parameter.shape))
        return model

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        return examples(24, seed=part)

    def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        inputs_BI, targets_B, kinds_B = batch
        assert isinstance(model, nn.Sequential)
        self.seen.append(len(targets_B))
        if (kinds_B == RAISES_FORWARD).any():
            raise ValueError("a value that must stay on the device")

        def on_backward() -> None:
            if (kinds_B == RAISES_BACKWARD).any():
                raise ArithmeticError("half of the layers have been added")
            if self.max_micro_batch is not None and len(kinds_B) > self.max_micro_batch:
                raise RuntimeError(
                    "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: "
                    "can't allocate memory: you tried to allocate 1 bytes."
                )

        first, second = model[0], model[1]
        hidden_BH = _Trip.apply(first(inputs_BI), on_backward)  # type: ignore[no-untyped-call]
        residual_B = second(hidden_BH).squeeze(1) - targets_B
        loss = 0.5 * residual_B.square().sum()
        loss = loss + (residual_B[kinds_B == NAN_LOSS] * torch.nan).sum()
        # sqrt(0) is 0 and its derivative infinite: 0 x infinity makes the gradient a NaN.
        loss = loss + (residual_B[kinds_B == NAN_GRADIENT] * 0).sqrt().sum()
        # Worth nothing, and of slope 2e38: two of them overflow float32 in the backward pass.
        num_huge = int((kinds_B == HUGE_GRADIENT).sum())
        at = model.get_parameter("1.bias")
        loss = loss + ((at - at.detach()).expand(num_huge) * 2e38).sum()
        return loss, len(targets_B)


def examples(num_examples: int, *, seed: int = 0, kinds: Sequence[int] = ()) -> TensorDataset:
    """Return whole-numbered examples, of which the first ones are of the given kinds."""
    generator = np.random.default_rng(seed)
    inputs = generator.integers(-2, 3, size=(num_examples, NUM_INPUTS))
    targets = generator.integers(-3, 4, size=num_examples)
    column = np.zeros(num_examples, dtype=np.int64)
    column[: len(kinds)] = kinds
    return TensorDataset(
        torch.tensor(inputs, dtype=torch.float32),
        torch.tensor(targets, dtype=torch.float32),
        torch.from_numpy(column),
    )


def gradient_sum(
    values_P: Tensor, data: TensorDataset, positions: Sequence[int]
) -> NDArray[np.float64]:
    """Return the sum of the gradients of ``TwoLayers`` over ``positions``, worked out by hand."""
    flat = values_P.double().numpy()
    at = np.cumsum([NUM_HIDDEN * NUM_INPUTS, NUM_HIDDEN, NUM_HIDDEN])
    w1_HI, b1_H, w2_H, b2 = np.split(flat, at)
    w1_HI = w1_HI.reshape(NUM_HIDDEN, NUM_INPUTS)
    total_P = np.zeros_like(flat)
    for position in positions:
        x_I, y, _ = (tensor[position].double().numpy() for tensor in data.tensors)
        hidden_H = w1_HI @ x_I + b1_H
        residual = w2_H @ hidden_H + b2[0] - y
        to_hidden_H = residual * w2_H
        total_P += np.concatenate(
            [np.outer(to_hidden_H, x_I).ravel(), to_hidden_H, residual * hidden_H, [residual]]
        )
    return total_P


class Given(TwoLayers):
    """A task with a given loss function and, optionally, a given model."""

    def __init__(self, loss: Callable[..., Any], model: Callable[[], nn.Module] | None = None):
        super().__init__()
        self.loss, self.model = loss, model

    def new_model(self) -> nn.Module:
        return super().new_model() if self.model is None else self.model()

    def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> Any:
        return self.loss(model, batch)


def squares(model: nn.Module, batch: Sequence[Tensor]) -> Any:
    """Return the sum of squared errors and the number of examples."""
    return (model(batch[0]).squeeze(1) - batch[1]).square().sum(), len(batch[0])
