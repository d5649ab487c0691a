"""An optimizer of torch that steps many devices' parameters at once, each row as if it were alone.

An optimizer that computes each parameter's step from that parameter's own gradients, as SGD, Adam
and most others do, steps the rows of a matrix [R, P] as it would step each of them. Adafactor and
Muon do not, which a trial finds.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headwater.common.local_training.local_optimizer import local_optimizer
from headwater.common.local_training.local_terms import LocalTerms
from headwater.common.optimizers.torch_compiler_stub import without_dynamo

# Of the trial: an operator may round otherwise at another place of a vector.
TOLERANCE = 1e-5
NUM_ROWS, SHAPE, NUM_STEPS = 3, (3, 4), 4


class StackedOptimizer:
    """Steps the first rows of parameters along the same rows of gradients, in place."""

    def __init__(
        self, terms: LocalTerms, values_RP: Tensor, gradients_RP: Tensor, *, rate: float
    ) -> None:
        """``terms`` and ``rate`` are those of each device's local steps."""
        self._values_RP, self._gradients_RP = values_RP, gradients_RP
        self._parameter = nn.Parameter(values_RP)
        self._optimizer = local_optimizer(terms, [self._parameter], rate=rate)

    def step(self, num_rows: int) -> None:
        """Step the first rows; those beyond have taken their last step, and stay as they are."""
        parameter = self._parameter
        if num_rows < len(parameter):
            before, parameter.grad = parameter.shape, None
            parameter.data = self._values_RP[:num_rows]
            entries = self._optimizer.state[parameter]
            for key, value in entries.items():
                if isinstance(value, Tensor) and value.shape == before:
                    entries[key] = value[:num_rows]
        parameter.grad = self._gradients_RP[:num_rows]
        with without_dynamo():
            self._optimizer.step()


def steps_each_row_alone(terms: LocalTerms, *, rate: float) -> bool:
    """Return whether the optimizer steps rows together as it steps each as a tensor of its own."""
    random = torch.Generator().manual_seed(0)
    start = torch.randn(NUM_ROWS, *SHAPE, generator=random)
    gradients = torch.randn(NUM_STEPS, NUM_ROWS, *SHAPE, generator=random)
    together = start.flatten(1).clone()
    gradient = torch.zeros_like(together)
    stacked = StackedOptimizer(terms, together, gradient, rate=rate)
    alone = [nn.Parameter(one.clone()) for one in start]
    optimizers = [local_optimizer(terms, [parameter], rate=rate) for parameter in alone]
    for of_rows in gradients:
        gradient.copy_(of_rows.flatten(1))
        stacked.step(NUM_ROWS)
        with without_dynamo():
            for parameter, own, optimizer in zip(alone, of_rows, optimizers, strict=True):
                parameter.grad = own.clone()
                optimizer.step()
    expected = torch.stack([parameter.detach().flatten() for parameter in alone])
    return torch.allclose(together, expected, rtol=TOLERANCE, atol=TOLERANCE * rate)


def moves_without_gradient(terms: LocalTerms, *, rate: float) -> bool:
    """Return whether a gradient of zero moves a parameter, now or later, that None would leave.

    Weight decay does, and so do momentum and Adam's memory.
    """
    found = []
    for second in (torch.zeros(2), None):
        parameter = nn.Parameter(torch.ones(2))
        optimizer = local_optimizer(terms, [parameter], rate=rate)
        with without_dynamo():
            for gradient in (torch.ones(2), second, torch.ones(2)):
                parameter.grad = gradient
                optimizer.step()
        found.append(parameter.detach())
    return not torch.equal(*found)
