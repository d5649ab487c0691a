"""An optimizer of torch that steps many devices' parameters at once, each row as if it were alone.

An optimizer that computes each parameter's step from that parameter's own gradients, as SGD, Adam
and most others do, steps the rows of a matrix [R, P] as it would step each of them. Muon steps
matrices: it is given each tensor of all rows [R, ...], and told so. Adafactor does neither, which a
trial finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwater.common.local_training.local_optimizer import local_optimizer
from headwater.common.local_training.local_terms import LocalTerms
from headwater.common.optimizers.named_optimizer import in_groups, optimizer_class
from headwater.common.optimizers.torch_compiler_stub import without_dynamo

# Of the trial: an operator may round otherwise at another place of a vector.
TOLERANCE = 1e-5
NUM_ROWS, NUM_STEPS = 3, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class RowTensors:
    """The tensors of a row of parameters: those of a model, and where each lies in the row."""

    model: nn.Module
    parameters: Sequence[nn.Parameter]
    spans: Sequence[tuple[int, int]]

    def of_rows(self, terms: LocalTerms, values_RP: Tensor) -> tuple[list[Any], list[Part]]:
        """Return what an optimizer of these terms is made of, and the parts of the rows."""
        groups = in_groups(optimizer_class(terms.optimizer), self.parameters, self.model)
        if not isinstance(groups[0], dict):
            whole = nn.Parameter(values_RP)
            return [whole], [(whole, slice(None))]
        parts: dict[int, Part] = {}
        for one, (low, high) in zip(self.parameters, self.spans, strict=True):
            rows = values_RP[:, low:high].view(len(values_RP), *one.shape)
            parts[id(one)] = nn.Parameter(rows), slice(low, high)
        for group in groups:
            group["params"] = [parts[id(one)][0] for one in group["params"]]
            group["num_stacked"] = 1
        return groups, [*parts.values()]


Part = tuple[nn.Parameter, slice]
"""A parameter of the optimizer, and its columns of the rows."""


class StackedOptimizer:
    """Steps the first rows of parameters along the same rows of gradients, in place."""

    def __init__(
        self,
        terms: LocalTerms,
        values_RP: Tensor,
        gradients_RP: Tensor,
        tensors: RowTensors,
        *,
        rate: float,
    ) -> None:
        """``terms`` and ``rate`` are those of each device's local steps."""
        self._values_RP, self._gradients_RP = values_RP, gradients_RP
        made_of, self._parts = tensors.of_rows(terms, values_RP)
        self._optimizer = local_optimizer(terms, made_of, rate=rate)

    def step(self, num_rows: int) -> None:
        """Step the first rows; those beyond have taken their last step, and stay as they are."""
        for parameter, columns in self._parts:
            shape = (num_rows, *parameter.shape[1:])
            if num_rows < len(parameter):
                before, parameter.grad = parameter.shape, None
                parameter.data = self._values_RP[:num_rows, columns].view(shape)
                entries = self._optimizer.state[parameter]
                for key, value in entries.items():
                    if isinstance(value, Tensor) and value.shape == before:
                        entries[key] = value[:num_rows]
            parameter.grad = self._gradients_RP[:num_rows, columns].view(shape)
        with without_dynamo():
            self._optimizer.step()


def steps_each_row_alone(terms: LocalTerms, *, rate: float) -> bool:
    """Return whether the optimizer steps rows together as it steps each as tensors of its own."""
    random = torch.Generator().manual_seed(0)
    tensors = _tensors_of(nn.Linear(4, 3))
    num_values = tensors.spans[-1][1]
    together = torch.randn(NUM_ROWS, num_values, generator=random)
    gradients = torch.randn(NUM_STEPS, NUM_ROWS, num_values, generator=random)
    gradient = torch.zeros_like(together)
    models = [nn.Linear(4, 3) for _ in range(NUM_ROWS)]
    for model, row in zip(models, together, strict=True):
        nn.utils.vector_to_parameters(row.clone(), model.parameters())
    stacked = StackedOptimizer(terms, together, gradient, tensors, rate=rate)
    optimizers = [local_optimizer(terms, one.parameters(), rate=rate, model=one) for one in models]
    for of_rows in gradients:
        gradient.copy_(of_rows)
        stacked.step(NUM_ROWS)
        with without_dynamo():
            for model, own, optimizer in zip(models, of_rows, optimizers, strict=True):
                for parameter, (low, high) in zip(model.parameters(), tensors.spans, strict=True):
                    parameter.grad = own[low:high].view_as(parameter).clone()
                optimizer.step()
    expected = torch.stack([nn.utils.parameters_to_vector(one.parameters()) for one in models])
    return torch.allclose(together, expected.detach(), rtol=TOLERANCE, atol=TOLERANCE * rate)


def _tensors_of(model: nn.Module) -> RowTensors:
    parameters, spans, start = [*model.parameters()], [], 0
    for one in parameters:
        spans.append((start, start + one.numel()))
        start += one.numel()
    return RowTensors(model=model, parameters=parameters, spans=spans)


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
