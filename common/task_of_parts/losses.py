"""Torch's losses as sums: what a loss adds up, and the weight that its mean divides by.

A loss of torch's gives the mean of a batch. Devices have unlike numbers of examples, so what they
send is the sum and what it was summed over: then the mean over all devices is that of one batch of
all their examples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from headwater.common.errors import TaskError

Weight = int | Tensor
LossOf = Callable[[Any, Any], tuple[Tensor, Weight]]
"""The summed loss of outputs and targets, and its weight."""

WEIGHT_UNIT = 2.0**-16
"""In which class weights are counted; each batch's is rounded to it."""

# Their mean is over all elements of the output, whatever their weights and thresholds are.
OF_ELEMENTS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.MSELoss: functional.mse_loss,
    nn.L1Loss: functional.l1_loss,
    nn.SmoothL1Loss: functional.smooth_l1_loss,
    nn.HuberLoss: functional.huber_loss,
    nn.BCELoss: functional.binary_cross_entropy,
    nn.BCEWithLogitsLoss: functional.binary_cross_entropy_with_logits,
    nn.PoissonNLLLoss: functional.poisson_nll_loss,
    nn.SoftMarginLoss: functional.soft_margin_loss,
    nn.KLDivLoss: functional.kl_div,
}
# Their mean is over the targets that are not ignored, each with the weight of its class.
OF_CLASSES: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.CrossEntropyLoss: functional.cross_entropy,
    nn.NLLLoss: functional.nll_loss,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SummedLoss:
    """A loss as a sum."""

    of: LossOf
    is_of_classes: bool
    ignore_index: int | None = None
    class_weights: Tensor | None = None

    def max_weight(self, target: Any) -> float:
        """Return the most that an example with such a target weighs."""
        if not self.is_of_classes:
            return 1
        found = torch.as_tensor(target) if isinstance(target, np.ndarray) else target
        number = found.numel() if isinstance(found, Tensor) else 1
        if _is_share(found) and found.ndim:  # of each class, in the first dimension
            number //= max(len(found), 1)
        return number if self.class_weights is None else number * float(self.class_weights.max())


def summed_loss(loss: Any) -> SummedLoss:
    """Return a loss of torch's, a module, a function or its name, as a sum.

    ``reduction="mean"`` and ``"sum"`` are the same here: every sum is divided by its weight once.

    Raises:
        TaskError: it is none whose mean is known.
    """
    module: Any = loss if isinstance(loss, nn.Module) else _of_function(loss)
    kind = type(module)
    if kind in OF_ELEMENTS:
        summed = _with_reduction(module, "sum")

        def of_elements(outputs: Any, targets: Any) -> tuple[Tensor, Weight]:
            if outputs.shape != targets.shape:  # torch would stretch one of them
                raise TaskError(
                    f"the outputs have the shape {tuple(outputs.shape)}, and the targets "
                    f"{tuple(targets.shape)}",
                    remedy="give both one shape: .unsqueeze(1) on the targets, or .squeeze(1) at "
                    "the end of the model",
                )
            total, number = summed(outputs, targets), len(outputs)
            per_batch = kind is nn.KLDivLoss and module.reduction == "batchmean"
            return total / (1 if per_batch else outputs.numel() / max(number, 1)), number

        return SummedLoss(of=of_elements, is_of_classes=False)
    if kind in OF_CLASSES:
        return _of_classes(module)
    raise TaskError(
        f"the loss {_name(loss)} is none that Headwater knows the mean of: torch's "
        f"{', '.join(one.__name__ for one in (*OF_CLASSES, *OF_ELEMENTS))}, or their functions",
        remedy=_nearest(loss)
        or "write a class with new_model, train_examples and loss_sum, which returns the sum "
        "and what it was summed over (docs/task.md)",
    )


def _nearest(loss: Any) -> str | None:
    """Return which loss a text nearly names; None for anything else."""
    if not isinstance(loss, str):
        return None
    names = [function.__name__ for function in (OF_CLASSES | OF_ELEMENTS).values()]
    near = get_close_matches(loss, names, n=1, cutoff=0.4)
    return f"did you mean loss={near[0]!r}?" if near else f"one of: {', '.join(names)}"


def _of_classes(module: Any) -> SummedLoss:
    summed, weights = _with_reduction(module, "sum"), getattr(module, "weight", None)
    ignored = int(module.ignore_index)

    def of_classes(outputs: Any, targets: Any) -> tuple[Tensor, Weight]:
        total = summed(outputs, targets)
        if _is_share(targets):  # a share of each class: the mean is over the targets
            return total, targets.numel() // targets.shape[1]
        is_counted = targets != ignored
        if weights is None:
            return total, is_counted.sum()
        of_targets = weights[torch.where(is_counted, targets, 0).long()]
        return total, (of_targets * is_counted).sum()

    return SummedLoss(
        of=of_classes, is_of_classes=True, ignore_index=ignored, class_weights=weights
    )


def _is_share(targets: Any) -> bool:
    """Whether targets give a share of each class, and not the number of one."""
    return isinstance(targets, Tensor) and targets.is_floating_point()


def _with_reduction(module: Any, reduction: str) -> Any:
    found = copy.deepcopy(module)
    found.reduction = reduction
    return found


def _of_function(loss: Any) -> nn.Module | None:
    """Return the module of a function of torch.nn.functional, of a class, or of a name of one.

    None if it is none of them.
    """
    for kind, function in (OF_ELEMENTS | OF_CLASSES).items():
        if isinstance(loss, str):
            if loss in (kind.__name__, function.__name__):
                return kind()
        elif loss is function or loss is kind:
            return kind()
    return None


def _name(loss: Any) -> str:
    return repr(loss) if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)
