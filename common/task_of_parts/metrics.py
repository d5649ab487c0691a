"""Metrics by name, as sums that add up over devices."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from headwater.common.errors import TaskError
from headwater.common.task_of_parts.losses import SummedLoss
from headwater.common.task_of_parts.summed_metrics import (
    R2,
    MeanPerWeight,
    OfTorchmetrics,
    SummedMetric,
    is_of_torchmetrics,
)

MetricOf = Callable[[Any, Any], Any]
"""The sum of a metric over outputs and targets; the run divides it by the loss's weight."""
Asked = Any
"""A name, a metric of torchmetrics, several of these, or functions and metrics by name; None."""


def metrics_of(asked: Asked, loss: SummedLoss) -> dict[str, SummedMetric]:
    """Return metrics by their names, or a user's own; None: what fits the loss.

    Raises:
        TaskError: there is none of a name, or it does not add up with the weight of the loss.
    """
    if asked is None:
        return dict([*_fitting(loss).items()][:1])
    if isinstance(asked, Mapping) or hasattr(asked, "items"):  # as torchmetrics.MetricCollection
        return {str(name): _metric(str(name), one) for name, one in asked.items()}
    if callable(asked) and not is_of_torchmetrics(asked):
        raise TaskError(
            "metrics is a function, which has no name",
            remedy="metrics={'mine': FUNCTION}, which returns the sum over a batch",
        )
    found: dict[str, SummedMetric] = {}
    for one in [asked] if isinstance(asked, str) or is_of_torchmetrics(asked) else asked:
        if is_of_torchmetrics(one):
            name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(one).__name__).lower()
            found[name] = _metric(name, one)
        else:
            found[one] = _named(one, loss)
    return found


def _metric(name: str, given: Any) -> SummedMetric:
    return OfTorchmetrics(name, given) if is_of_torchmetrics(given) else MeanPerWeight(name, given)


def _named(name: Any, loss: SummedLoss) -> SummedMetric:
    fitting = _fitting(loss)
    if name not in fitting:
        raise TaskError(
            f"there is no metric {name} with this loss; there is {', '.join(fitting)}",
            remedy=f"use {', '.join(fitting)}; or give a function of outputs and targets whose sum "
            "over the batch is divided by the loss's weight: metrics={'mine': lambda outputs, "
            "targets: ...}; or a metric of torchmetrics",
        )
    return fitting[name]


def _fitting(loss: SummedLoss) -> dict[str, SummedMetric]:
    if not loss.is_of_classes:
        means = {"mae": _absolute, "mse": _squared}
        return {name: MeanPerWeight(name, of) for name, of in means.items()} | {"r2": R2("r2")}

    def counted(targets: Tensor, is_right: Tensor) -> Tensor:
        if targets.is_floating_point():
            return is_right.sum()
        is_counted = torch.ne(targets, -1 if loss.ignore_index is None else loss.ignore_index)
        is_right = is_right & is_counted
        if loss.class_weights is None:
            return is_right.sum()
        weights = loss.class_weights[targets.where(is_counted, targets.new_zeros(())).long()]
        return (is_right * weights).sum()

    def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
        wanted = targets.argmax(1) if targets.is_floating_point() else targets
        return counted(targets, outputs.argmax(1) == wanted)

    # The run divides by the loss's weight: with class weights a hit counts as its class does.
    name = "accuracy" if loss.class_weights is None else "weighted_accuracy"
    return {name: MeanPerWeight(name, accuracy)}


def _absolute(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs().sum() * (len(outputs) / max(outputs.numel(), 1))


def _squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum() * (len(outputs) / max(outputs.numel(), 1))
