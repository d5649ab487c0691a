"""Two steps for the server: a rule, which is a function, and Lion, which is an optimizer class.

Try it: headwater-simulate --lr 0.003 --optimizer examples/extensions/server_rules.py:signum
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def signum(mean_P: Tensor, state: dict[str, Any], *, beta: float = 0.9) -> Tensor:
    """Step by the sign of the averaged mean gradient (Bernstein et al. 2018, algorithm 2)."""
    momentum_P = state.setdefault("momentum_P", torch.zeros_like(mean_P))
    momentum_P.mul_(beta).add_(mean_P, alpha=1 - beta)
    return torch.sign(momentum_P)


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, algorithm 2."""

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            rate, (beta_1, beta_2) = group["lr"], group["betas"]
            for parameter in group["params"]:
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                parameter.mul_(1 - rate * group["weight_decay"])
                step = (momentum * beta_1).add_(parameter.grad, alpha=1 - beta_1).sign_()
                parameter.sub_(step, alpha=rate)
                momentum.mul_(beta_2).add_(parameter.grad, alpha=1 - beta_2)
