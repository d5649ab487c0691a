"""Metrics that several sums make, such as R2: what each batch adds, and the value of all of it.

Each batch adds its sums, devices and server add them up, and the value is computed once, from the
sums over all examples. A mean of the batches' R2 would be another number.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from headwater.common.errors import TaskError


class SummedMetric(Protocol):
    """A metric whose value follows from sums over all examples."""

    def sums(self, outputs: Any, targets: Any) -> Mapping[str, Any]:
        """Return what a batch adds, by name; one number each."""
        ...

    def value(self, sums: Mapping[str, float], weight: float) -> float:
        """Return the metric of all examples, whose loss was summed over ``weight``.

        NaN where it has none, or where a sum is missing.
        """
        ...


class MeanPerWeight:
    """A sum that is divided by the weight of the loss: the usual metric."""

    def __init__(self, name: str, of: Callable[[Any, Any], Any]) -> None:
        self._name, self._of = name, of

    def sums(self, outputs: Any, targets: Any) -> Mapping[str, Any]:
        return {self._name: self._of(outputs, targets)}

    def value(self, sums: Mapping[str, float], weight: float) -> float:
        return sums[self._name] / weight if weight and self._name in sums else math.nan


class R2:
    """The coefficient of determination, 1 - squared errors / squared distances to the mean.

    Of several outputs it is the mean of each one's, as scikit-learn has it by default. The targets'
    squares are summed in float64: where they lie far from zero, as years do, the subtraction of
    their mean's square costs digits (of targets at 2,000 with a deviation of 1, seven of sixteen).
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def sums(self, outputs: Tensor, targets: Tensor) -> Mapping[str, Any]:
        errors_BK, targets_BK = (
            one.reshape(len(one), -1).double() for one in (outputs - targets, targets)
        )
        found: dict[str, Any] = {f"{self._name}.count": float(len(targets_BK))}
        for at in range(targets_BK.shape[1]):
            found[f"{self._name}.errors.{at}"] = errors_BK[:, at].square().sum()
            found[f"{self._name}.targets.{at}"] = targets_BK[:, at].sum()
            found[f"{self._name}.squares.{at}"] = targets_BK[:, at].square().sum()
        return found

    def value(self, sums: Mapping[str, float], weight: float) -> float:
        count = sums.get(f"{self._name}.count", 0.0)
        found: list[float] = []
        while f"{self._name}.errors.{len(found)}" in sums and count:
            errors, targets, squares = (
                sums.get(f"{self._name}.{kind}.{len(found)}", math.nan)
                for kind in ("errors", "targets", "squares")
            )
            spread = squares - targets * targets / count
            found.append(1 - errors / spread if spread > 0 else math.nan)
        return math.fsum(found) / len(found) if found else math.nan


class OfTorchmetrics:
    """A metric of torchmetrics whose states are sums."""

    def __init__(self, name: str, metric: Any) -> None:
        """Take a metric; it is copied, so that the caller's own stays as it is.

        Raises:
            TaskError: it has no states, as metrics made of others; or one is no sum from zero: its
                metric does not add up over devices.
        """
        self._name, self._metric = name, copy.deepcopy(metric)
        self._metric.reset()
        if not metric._defaults:
            raise TaskError(
                f"the metric {name} ({type(metric).__name__}) keeps no sums of its own: it is made "
                "of other metrics",
                remedy="give those, each under its name, and compute from their values",
            )
        self._zeros: dict[str, Tensor] = {}
        for state, zero in metric._defaults.items():
            _check_state(name, metric, state, zero)
            self._zeros[state] = torch.as_tensor(zero).double()

    def sums(self, outputs: Any, targets: Any) -> Mapping[str, Any]:
        self._metric.reset()
        self._metric.update(outputs, targets)
        found: dict[str, Any] = {}
        for state in self._zeros:
            values = torch.as_tensor(getattr(self._metric, state)).double().reshape(-1)
            found |= dict(zip(self._names(state), values.tolist(), strict=True))
        self._metric.reset()
        return found

    def value(self, sums: Mapping[str, float], weight: float) -> float:
        names = [name for state in self._zeros for name in self._names(state)]
        if not sums.keys() >= {*names} or not weight:
            return math.nan
        self._metric.reset()
        for state, zero in self._zeros.items():
            values = torch.tensor([sums[name] for name in self._names(state)], dtype=torch.float64)
            setattr(self._metric, state, values.reshape(zero.shape))
        self._metric._update_count = 1  # else compute() warns that nothing was seen
        found = self._metric.compute()
        self._metric.reset()
        if not isinstance(found, Tensor) or found.numel() != 1:
            raise TaskError(
                f"the metric {self._name} gives {_shape(found)}, and a round's row has one number",
                remedy="give it average='macro' or 'micro', or a metric for each",
            )
        return float(found)

    def _names(self, state: str) -> list[str]:
        zero = self._zeros[state]
        if not zero.dim():
            return [f"{self._name}.{state}"]
        return [f"{self._name}.{state}.{at}" for at in range(zero.numel())]


def is_of_torchmetrics(metric: Any) -> bool:
    """Whether an object is a metric of torchmetrics, or has its protocol."""
    own = ("update", "compute", "reset", "_defaults", "_reductions")
    return not isinstance(metric, type) and all(hasattr(metric, name) for name in own)


def _check_state(name: str, metric: Any, state: str, zero: Any) -> None:
    reduction = metric._reductions.get(state)
    is_sum = getattr(reduction, "__name__", reduction) in ("dim_zero_sum", "sum")
    if isinstance(zero, Tensor) and is_sum and not zero.count_nonzero():
        return
    if isinstance(zero, Tensor) and is_sum:
        why = "begins at another value than zero, which each batch would add"
    elif isinstance(zero, list):
        why = "keeps every example's values, and no device sends these"
    else:
        why = f"is reduced by {getattr(reduction, '__name__', reduction)} and not by a sum"
    raise TaskError(
        f"the metric {name} ({type(metric).__name__}) does not add up over devices: its state "
        f"{state} {why}",
        remedy="take one whose states all have dist_reduce_fx='sum' (curves: with thresholds=10), "
        "or give a function that returns a sum over the batch: metrics={'mine': lambda outputs, "
        "targets: ...}",
    )


def _shape(found: Any) -> str:
    return (
        f"{found.numel():,} numbers" if isinstance(found, Tensor) else f"a {type(found).__name__}"
    )
