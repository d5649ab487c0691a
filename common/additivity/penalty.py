"""A task's penalty on the parameters: a term of the mean loss that is no sum over examples.

A penalty in ``loss_sum`` would be added once for each micro-batch, so that the step depended on how
the examples are cut. A task returns it from ``penalty(model)`` instead, and its gradient is added
once to a mean gradient: to that of an exact round by the server, to that of each local step by the
device. The objective is the mean loss plus the penalty.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headwater.common.errors import TaskError
from headwater.common.model.parameters import ModelImage
from headwater.common.task import Task
from headwater.common.user_code.failures import running


def has_penalty(task: Task) -> bool:
    """Return whether the task has a method ``penalty(model)``."""
    return callable(getattr(task, "penalty", None))


def add_penalty(task: Task, image: ModelImage, mean_P: Tensor) -> tuple[int, ...]:
    """Add the gradient of the task's penalty at the model's parameters to a mean gradient [P].

    Returns the places of the trained tensors that the penalty uses; none without a penalty.

    Raises:
        TaskFailed: the penalty raised an exception.
        TaskError: it is no finite scalar that follows from the parameters.
    """
    if not has_penalty(task):
        return ()
    with running("penalty"), torch.enable_grad():
        value = task.penalty(image.model)  # type: ignore[attr-defined]
    is_scalar = isinstance(value, Tensor) and value.ndim == 0 and value.requires_grad
    if not is_scalar or not math.isfinite(value.item()):
        found = value.item() if is_scalar else type(value).__name__
        raise TaskError(
            f"penalty(model) must return a finite scalar that is computed from the parameters, "
            f"found {found}",
            remedy="return a sum over parameters, as in 1e-4 * sum(p.square().sum() for p in "
            "model.parameters())",
        )
    gradients = torch.autograd.grad(value, image.trainable(), allow_unused=True)
    used = []
    for at, (gradient, (start, end)) in enumerate(zip(gradients, image.layout.spans, strict=True)):
        if gradient is not None:
            mean_P[start:end].add_(gradient.reshape(-1))
            used.append(at)
    return tuple(used)
