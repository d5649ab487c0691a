"""Compares two models on the same examples: the difference of their means, and its standard error.

The two losses of an example are compared with each other, so that what makes an example hard for
both adds nothing to the error (a paired test). The mean is a sum over a weight, as everywhere: the
standard error is that of a ratio (Cochran 1977, "Sampling Techniques", section 2.11), and the 95 %
interval has Student's quantile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import nn

from headwater.common.data.batches import batch_of
from headwater.common.errors import NoFiniteExample
from headwater.common.task import Examples, Metrics, Task, loss_sum_alone, shown_metrics
from headwater.common.user_code.failures import running

Floats = NDArray[np.float64]

MAX_UNITS = 2048
"""Above so many examples, several that follow one another are one unit of the comparison."""
MIN_UNITS = 5
"""Below, any difference counts as within chance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitSums:
    """A model's sums on each of N units of examples."""

    losses_N: Floats
    weights_N: Floats
    metrics: list[Metrics]
    num_examples_N: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Two models on the same examples; the difference is above 0 where the second is better."""

    loss: float
    other_loss: float
    metrics: Metrics
    other_metrics: Metrics
    num_examples: int
    num_left_out: int
    difference: float
    """The loss of the first, less that of the second."""
    standard_error: float
    margin: float
    """Half of the 95 % interval of the difference."""

    @property
    def is_within_chance(self) -> bool:
        """Whether the 95 % interval has 0 in it."""
        return not abs(self.difference) > self.margin


def tested_sums(
    task: Task, model: nn.Module, examples: Examples, positions: Sequence[int]
) -> UnitSums:
    """Return a model's sums on each unit of the examples, in evaluation mode.

    Raises:
        TaskFailed, TaskError: the task raised, or breaks a rule.
    """
    model.eval()
    size = math.ceil(len(positions) / MAX_UNITS)
    units = [positions[start : start + size] for start in range(0, len(positions), size)]
    losses, weights, metrics = [], [], []
    with running("the test on held-out examples"):
        for unit in units:
            loss, weight, found = loss_sum_alone(task, model, batch_of(task, examples, unit))
            losses.append(loss.item())
            weights.append(weight)
            metrics.append(found)
    return UnitSums(
        losses_N=np.array(losses, dtype=np.float64),
        weights_N=np.array(weights, dtype=np.float64),
        metrics=metrics,
        num_examples_N=np.array([len(unit) for unit in units], dtype=np.int64),
    )


def compare(task: Task, first: UnitSums, second: UnitSums) -> Comparison:
    """Compare two models; a unit whose loss is not finite under one of them is left out for both.

    Raises:
        NoFiniteExample: no unit is left, or what is left has no weight.
        TaskFailed, TaskError: the task makes no metrics of the sums.
    """
    is_usable_N = np.isfinite(first.losses_N) & np.isfinite(second.losses_N)
    weights_N = first.weights_N[is_usable_N]
    weight = float(weights_N.sum())
    if not weight:
        raise NoFiniteExample("no held-out example has a finite loss under both models")
    gains_N = (first.losses_N - second.losses_N)[is_usable_N]
    difference, number = gains_N.sum() / weight, len(gains_N)
    error = math.inf
    if number > 1:
        rest_N = gains_N - difference * weights_N
        error = math.sqrt(number / (number - 1) * float(rest_N @ rest_N)) / weight
    return Comparison(
        loss=float(first.losses_N[is_usable_N].sum() / weight),
        other_loss=float(second.losses_N[is_usable_N].sum() / weight),
        metrics=_shown(task, first.metrics, is_usable_N, weight),
        other_metrics=_shown(task, second.metrics, is_usable_N, weight),
        num_examples=int(first.num_examples_N[is_usable_N].sum()),
        num_left_out=int(first.num_examples_N[~is_usable_N].sum()),
        difference=float(difference),
        standard_error=error,
        margin=error * t_quantile(number - 1) if number >= MIN_UNITS else math.inf,
    )


def t_quantile(freedom: int) -> float:
    """Return Student's 97.5 % quantile, to 0.3 % from 4 degrees of freedom on.

    Abramowitz and Stegun 1964, 26.7.5.
    """
    z = 1.959964
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, start=1))


def _shown(
    task: Task, metrics: Sequence[Metrics], is_usable_N: NDArray[np.bool_], weight: float
) -> Metrics:
    used = [one for one, is_usable in zip(metrics, is_usable_N, strict=True) if is_usable]
    names = sorted({name for one in used for name in one})
    sums = {name: math.fsum(one.get(name, 0.0) for one in used) for name in names}
    return Metrics(shown_metrics(task, sums, weight))
