"""A task's penalty on the parameters: a term of the mean loss that is no sum over examples.

A penalty in ``loss_sum`` would be added once for each micro-batch, so that the step depended on how
the examples are cut. A task returns it from ``penalty(model)`` instead, and its gradient is added
once to a mean gradient: to that of an exact round by the server, to that of each local step by the
device, which in both cases adds that of the parameters that stay on it. The objective is the mean
loss plus the penalty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

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
    gradients = _gradients(_penalty(task, image), image.trainable())
    used = []
    for at, (gradient, (start, end)) in enumerate(zip(gradients, image.layout.spans, strict=True)):
        if gradient is not None:
            mean_P[start:end].add_(gradient.reshape(-1))
            used.append(at)
    return tuple(used)


def own_penalty(task: Task, image: ModelImage) -> Tensor:
    """Return the penalty's gradient at the parameters that stay on the device [L].

    Raises:
        TaskFailed, TaskError: see ``add_penalty``.
    """
    gradients = _gradients(_penalty(task, image), image.local())
    found = [
        torch.zeros_like(parameter) if gradient is None else gradient
        for gradient, parameter in zip(gradients, image.local(), strict=True)
    ]
    return torch.cat([gradient.reshape(-1) for gradient in found])


def check_penalty(task: Task, image: ModelImage) -> None:
    """Check that the task's penalty works, and parts into a shared one and each device's own.

    Raises:
        TaskFailed: the penalty raised an exception.
        TaskError: it is no finite scalar that follows from the parameters; or what it asks of the
            shared parameters depends on those that stay on devices, which the server does not know.
    """
    if not has_penalty(task):
        return
    value, own = _penalty(task, image), image.local()
    shared = _gradients(value, image.trainable(), create_graph=bool(own))
    of_shared = [one.sum() for one in shared if one is not None and one.requires_grad]
    if not own or not of_shared:
        return
    mixed = _gradients(torch.stack(of_shared).sum(), own)
    if any(one is not None and bool(one.any()) for one in mixed):
        raise TaskError(
            "the gradient of penalty(model) at the shared parameters depends on those that stay on "
            "the device, and the server, which adds it, does not know them",
            remedy="let the penalty be a sum of one term of the shared parameters and one of those "
            "of --local-parameters",
        )


def _penalty(task: Task, image: ModelImage) -> Tensor:
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
    return cast(Tensor, value)


def _gradients(
    value: Tensor, parameters: Sequence[nn.Parameter], *, create_graph: bool = False
) -> Sequence[Tensor | None]:
    return torch.autograd.grad(value, parameters, allow_unused=True, create_graph=create_graph)
