"""Muon: steps of matrices are made orthogonal, all other parameters step by AdamW.

A matrix moves by its momentum's nearest orthogonal matrix (Jordan et al. 2024), at the size of a
step of AdamW, so that one learning rate serves all parameters (Liu et al. 2025, "Muon is scalable
for LLM training", section 2.2). It is a class of its own because ``torch.optim.Muon`` refuses a
model that has more than matrices, came with torch 2.9, and iterates in bfloat16, which most CPUs
emulate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

# Of the iteration X <- a X + (b A + c A A) X with A = X X^T, as published.
A, B, C, ITERATIONS, EPSILON = 3.4445, -4.7750, 2.0315, 5, 1e-7
# The root mean square of AdamW's steps, in learning rates.
ADAMW_SIZE = 0.2
TABLES = (nn.Embedding, nn.EmbeddingBag)
IS_MATRIX = "is_matrix"


class Muon(torch.optim.AdamW):
    """AdamW, but for the matrices of parameter groups that say no other (``parameter_groups``).

    A tensor of more than two dimensions, as of a convolution, is a matrix of its first dimension's
    rows. With ``num_stacked`` 1 in a group the first dimension counts matrices.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
        nesterov: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        if not 0 <= momentum < 1:
            raise ValueError(f"Invalid momentum value: {momentum}")
        for group in self.param_groups:
            group.setdefault(IS_MATRIX, True)
            group.setdefault("num_stacked", 0)
            group |= {"momentum": momentum, "nesterov": nesterov}

    @staticmethod
    def parameter_groups(
        parameters: Iterable[nn.Parameter], model: nn.Module
    ) -> list[dict[str, Any]]:
        """Return a model's parameters in groups, those of embeddings apart.

        A gradient of an embedding has a row for each token of the batch, and zeros: its rows step
        each for itself, as by AdamW.
        """
        tables = {id(one.weight) for one in model.modules() if isinstance(one, TABLES)}
        apart: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for one in parameters:
            (apart if id(one) in tables else others).append(one)
        groups = [{"params": others, IS_MATRIX: True}, {"params": apart, IS_MATRIX: False}]
        return [group for group in groups if group["params"]]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override] # as AdamW's
        """Step every parameter that has a gradient; ``closure`` computes them, and the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        matrices = [
            (group, parameter, parameter.grad)
            for group in self.param_groups
            for parameter in group["params"]
            if group[IS_MATRIX]
            and parameter.dim() > 1 + group["num_stacked"]
            and parameter.grad is not None
        ]
        for group, parameter, gradient in matrices:
            self._step_matrix(group, parameter, gradient)
            parameter.grad = None  # AdamW leaves it as it is
        super().step()
        for _, parameter, gradient in matrices:
            parameter.grad = gradient
        return loss

    @torch.no_grad()
    def _step_matrix(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        state = self.state[parameter]
        if not state:  # AdamW looks for a step in every state
            state |= {"step": torch.zeros(()), "momentum_buffer": torch.zeros_like(parameter)}
        state["step"] += 1
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        chosen = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        direction = orthogonal(chosen.flatten(1 + group["num_stacked"]))
        size: float = ADAMW_SIZE * max(direction.shape[-2:]) ** 0.5
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(direction.view_as(parameter), alpha=-group["lr"] * size)


def orthogonal(matrix: Tensor) -> Tensor:
    """Return about the nearest orthogonal matrices [..., M, N]: singular values near 1."""
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    wide = matrix.mT if is_tall else matrix
    wide = wide / torch.linalg.matrix_norm(wide, keepdim=True).clamp(min=EPSILON)
    for _ in range(ITERATIONS):
        square = wide @ wide.mT
        wide = A * wide + (B * square + C * (square @ square)) @ wide
    result: Tensor = wide.mT if is_tall else wide
    return result
