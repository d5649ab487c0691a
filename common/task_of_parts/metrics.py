"""Metrics by name, as sums that add up over devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headwater.common.errors import TaskError
from headwater.common.task_of_parts.losses import SummedLoss

MetricOf = Callable[[Any, Any], Any]
"""The sum of a metric over outputs and targets; the run divides it by the loss's weight."""
Asked = str | Sequence[str] | Mapping[str, MetricOf] | None


def metrics_of(asked: Asked, loss: SummedLoss) -> dict[str, MetricOf]:
    """Return metrics by their names, or a user's own; None: what fits the loss.

    Raises:
        TaskError: there is none of a name, or it does not add up with the weight of the loss.
    """
    if isinstance(asked, Mapping):
        return dict(asked)
    fitting = _fitting(loss)
    names = [asked] if isinstance(asked, str) else asked
    if names is None:
        return dict([*fitting.items()][:1])
    for name in names:
        if name not in fitting:
            raise TaskError(
                f"there is no metric {name} with this loss; there is {', '.join(fitting)}",
                remedy="give a function of outputs and targets that returns the sum over the "
                "batch: metrics={'mine': lambda outputs, targets: ...}",
            )
    return {name: fitting[name] for name in names}


def _fitting(loss: SummedLoss) -> dict[str, MetricOf]:
    if not loss.is_of_classes:
        return {"mae": _absolute, "mse": _squared}

    def counted(targets: Tensor, is_right: Tensor) -> Tensor:
        if loss.class_weights is not None and not targets.is_floating_point():
            is_counted = torch.ne(targets, -1 if loss.ignore_index is None else loss.ignore_index)
            weights = loss.class_weights[targets.where(is_counted, targets.new_zeros(()))]
            return (is_right * is_counted * weights).sum()
        return is_right.sum()

    def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
        wanted = targets.argmax(1) if targets.is_floating_point() else targets
        return counted(targets, outputs.argmax(1) == wanted)

    # The run divides by the loss's weight: with class weights a hit counts as its class does.
    name = "accuracy" if loss.class_weights is None else "weighted_accuracy"
    return {name: accuracy}


def _absolute(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs().sum() * (len(outputs) / max(outputs.numel(), 1))


def _squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum() * (len(outputs) / max(outputs.numel(), 1))
