"""Compares the sums of a batch with those of its examples alone, and names the likely mistake."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from headwater.common.errors import TaskNotAdditive
from headwater.common.task import Metrics
from headwater.common.user_code.failures import user_line

# float32 rounding of a few examples is below 1e-5 relative; the mistakes that the check looks for
# (a mean, batch statistics, counted padding) are off by a tenth and more.
TOLERANCE = 2.0**-10
STANDARD_ERRORS = 6.0  # of the means of random draws

UNIT = (
    "; return a float weight as it is, with weight_unit = 0.5 in the task if all are multiples of "
    "0.5, or weight_unit = 2**-16 (docs/task.md)"
)
SUM_REMEDY = (
    "return the metric's sum over the examples, such as the number of correct answers; the server "
    "divides it by the weight"
)


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a loss is no sum, and what to do about it."""

    text: str
    remedy: str | None = None


MEAN = Cause("probably a mean is returned, not a sum")
PADDING = Cause(
    "padding enters the loss: an example has another loss beside a longer one than alone",
    "leave padding out of the loss: ignore_index, or a mask of the real tokens",
)
PENALTY = Cause(
    "a term is added once a call, such as a penalty on the parameters, and would count once for "
    "each micro-batch",
    "return the penalty from a method penalty(model) of the task: it counts once a round, beside "
    "the mean loss (docs/task.md)",
)
MIXED = Cause(
    "examples enter each other's loss: pairs of examples (a contrastive or a load-balancing term), "
    "or a layer mixes the examples of a batch (statistics over dimension 0)",
    "make each example's loss its own; a term that needs the whole batch cannot be summed over "
    "devices",
)


@dataclass(frozen=True, slots=True)
class Sums:
    """What ``loss_sum`` returned for a batch."""

    loss: float
    weight: int
    metrics: Metrics


def compare(
    together: Sums,
    alone: Sequence[Sums],
    *,
    size: int,
    how: str = "one by one",
    tolerance: float = TOLERANCE,
    is_rounded: bool = False,
    cause: Callable[[], Cause] | None = None,
) -> None:
    """Compare a batch of ``size`` examples with its parts; ``how`` says how it was split.

    ``tolerance`` is relative to the sum of the parts' magnitudes. A weight that ``is_rounded`` is
    off by half at the most. ``cause`` looks for the reason where a loss is no sum and no mean.

    Raises:
        TaskNotAdditive: with the two numbers that should be equal and the likely cause.
    """
    weight = sum(part.weight for part in alone)
    gap = abs(together.weight - weight)
    if gap > ((len(alone) + 1) / 2 if is_rounded else 0):
        is_small = gap <= len(alone)
        raise TaskNotAdditive(
            f"{size} examples together weigh {together.weight}, {how} {weight}: "
            "probably padding is counted in the weight"
            + (", or each call rounds it, as int() does" if is_small else ""),
            remedy=f"count only real tokens or examples in the weight{UNIT if is_small else ''}",
        )
    loss = math.fsum(part.loss for part in alone)
    if not _is_close(together.loss, [part.loss for part in alone], tolerance):
        found = MEAN
        if not _is_mean(together.loss, [part.loss for part in alone], alone):
            found = MIXED if cause is None else cause()
        digits = 6 if tolerance == TOLERANCE else 9
        raise TaskNotAdditive(
            f"the loss of {size} examples together is {together.loss:.{digits}g}, the sum {how} "
            f"{loss:.{digits}g}: {found.text}",
            remedy=found.remedy,
        )
    for name in sorted({*together.metrics, *(name for part in alone for name in part.metrics)}):
        values = [part.metrics.get(name, 0.0) for part in alone]
        value, total = together.metrics.get(name, 0.0), math.fsum(values)
        if not _is_close(value, values, tolerance):
            is_mean = _is_mean(value, values, alone)
            why = "probably a mean is returned, not a sum" if is_mean else "it is no sum"
            raise TaskNotAdditive(
                f"the metric {name} of {size} examples together is {value:.6g}, the sum {how} "
                f"{total:.6g}: {why}",
                remedy=SUM_REMEDY,
            )


def compare_gradients(*, gap: float, total: float, length: float, size: int) -> None:
    """Compare the gradient of a batch with the sum of its examples' gradients.

    ``gap`` is the norm of their difference, ``total`` that of the sum, and ``length`` at least the
    sum of the norms of the single gradients, which may cancel.

    Raises:
        TaskNotAdditive: they differ.
    """
    if not gap <= TOLERANCE * (length or 1.0):
        raise TaskNotAdditive(
            f"the gradient of {size} examples together and the sum of their gradients one by one, "
            f"of length {total:.6g}, are {gap:.3g} apart: probably a layer mixes the examples of a "
            "batch, or a mean over tokens was multiplied by a number of examples"
        )


def compare_draws(together: Sequence[float], alone: Sequence[float], *, size: int) -> None:
    """Compare random draws of a batch's loss with draws of the sum of its examples' losses.

    Raises:
        TaskNotAdditive: the means are those of a mean, and not those of a sum.
    """
    whole, total = (float(np.mean(draws)) for draws in (together, alone))
    variances = [float(np.var(draws)) / len(draws) for draws in (together, alone)]
    bound = STANDARD_ERRORS * math.sqrt(sum(variances))
    is_sum = abs(whole - total) <= bound
    is_mean = abs(whole * size - total) <= max(size * bound, 0.01 * abs(total))
    if is_mean and not is_sum:
        raise TaskNotAdditive(
            f"the loss of {size} examples together is {whole:.6g}, the sum one by one {total:.6g} "
            f"(means of {len(together)} random draws): probably a mean is returned, not a sum"
        )


def _is_close(together: float, alone: Sequence[float], tolerance: float) -> bool:
    scale = math.fsum(map(abs, alone)) or 1.0
    return abs(together - math.fsum(alone)) <= tolerance * scale


def _is_mean(together: float, values: Sequence[float], parts: Sequence[Sums]) -> bool:
    """Return whether a value is the mean of its parts' values: plain, or by their weights."""
    weights = [part.weight for part in parts]
    by_weight = math.fsum(one * weight for one, weight in zip(values, weights, strict=True))
    return math.isclose(together * len(parts), math.fsum(values), rel_tol=0.01) or (
        sum(weights) > 0 and math.isclose(together * sum(weights), by_weight, rel_tol=1e-3)
    )


class BroadcastWatch(TorchFunctionMode):
    """Finds an operation that pairs every example with every other: (n, 1) against (n).

    ``found`` describes the first one while the mode is active; None if there was none.
    """

    def __init__(self, num_examples: int) -> None:
        super().__init__()
        self.found: str | None = None
        self._num_examples = num_examples

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function, and look at the shapes of its tensors."""
        values = [*args, *(kwargs or {}).values()]
        tensors = (value for value in values if isinstance(value, Tensor))
        shapes = [tuple(one.shape) for one in tensors if not one.is_nested]
        if self.found is None and len(shapes) == 2 and self._is_outer(*shapes):
            one, other = shapes
            name = func.__name__.strip("_")
            together = _broadcast(one, other)
            self.found = (
                f"{name} of the shapes {one} and {other} gives {together}: every example is paired "
                f"with every other\n{user_line() or ''}"
            ).rstrip()
        return func(*args, **(kwargs or {}))

    def _is_outer(self, one: tuple[int, ...], other: tuple[int, ...]) -> bool:
        """Return whether one axis of n comes from one tensor alone, and another from the other."""
        try:
            together = _broadcast(one, other)
        except RuntimeError:
            return False
        num_axes, n = len(together), self._num_examples
        left, right = ((1,) * (num_axes - len(shape)) + shape for shape in (one, other))
        axes = [axis for axis in range(num_axes) if together[axis] == n]
        only_left = [axis for axis in axes if right[axis] == 1]
        only_right = [axis for axis in axes if left[axis] == 1]
        return n > 1 and bool(only_left) and bool(only_right)


def _broadcast(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(one, other))  # type: ignore[no-untyped-call]
