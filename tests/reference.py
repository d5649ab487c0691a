"""A whole round in plain lines: one model, one big batch, one division, one step, in float64.

The fast code is checked against this. It knows no micro-batches, no devices and no flat vectors.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headwater.common.task import Examples, Task, loss_sum

Picked = Sequence[tuple[Examples, Sequence[int]]]
"""The examples of a round: for each client its data set and the positions that it trains on."""


def mean_gradient(task: Task, model: nn.Module, picked: Picked) -> Tensor:
    """Return the mean gradient [P] in float64 over all picked examples, as one big batch."""
    model = copy.deepcopy(model).double().train()
    model.zero_grad(set_to_none=True)
    loss, weight, _ = loss_sum(task, model, big_batch(task, picked))
    (loss / weight).backward()  # type: ignore[no-untyped-call]
    return torch.cat([_gradient(p).reshape(-1) for p in model.parameters() if p.requires_grad])


def trajectory(
    task: Task, model: nn.Module, rounds: Iterable[Picked], optimizer: str, **arguments: Any
) -> list[Tensor]:
    """Return the parameters [P] in float64 at the start and after each round."""
    model = copy.deepcopy(model).double()
    stepper = getattr(torch.optim, optimizer)(model.parameters(), **arguments)
    points = [_flat(model)]
    for picked in rounds:
        stepper.zero_grad()
        loss, weight, _ = loss_sum(task, model.train(), big_batch(task, picked))
        (loss / weight).backward()  # type: ignore[no-untyped-call]
        stepper.step()
        points.append(_flat(model))
    return points


def big_batch(task: Task, picked: Picked) -> Any:
    """Collate all picked examples into one batch."""
    rows = [examples[position] for examples, positions in picked for position in positions]
    collate = getattr(task, "collate", torch.utils.data.default_collate)
    return collate(rows)


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _flat(model: nn.Module) -> Tensor:
    return torch.cat(
        [p.detach().reshape(-1).clone() for p in model.parameters() if p.requires_grad]
    )
