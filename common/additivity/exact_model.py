"""A float64 copy of a model, in which sums are compared more sharply than float32 allows.

A term that is a thousandth of the loss, such as a contrastive or a load-balancing one, is below
what float32's rounding explains. A model that is large or cannot compute in float64, or whose task
cannot, is compared in float32.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headwater.common.additivity.sums import Sums
from headwater.common.task import Task, loss_sum_alone

MAX_PARAMETERS = 1 << 18  # 2 MiB of float64: a device short of memory keeps what a heap has had
# Parts of a model may compute in float32 all the same, as normalisations of language models do.
TOLERANCE = 2.0**-19


class ExactModel:
    """The copy of a model; ``sums`` runs the task on it."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        """Copy the model.

        Raises:
            Exception: it cannot be copied.
        """
        self._task = task
        self._model = copy.deepcopy(model).double()

    @staticmethod
    def of(task: Task, model: nn.Module, batch: Any) -> ExactModel | None:
        """Return a copy that works on this batch; None if the model is large or has none."""
        numbers = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
        if numbers > MAX_PARAMETERS:
            return None
        try:
            exact = ExactModel(task, model)
            return exact if exact.loss_of(batch).dtype is torch.float64 else None
        except Exception:  # whatever stands in the way: float32 is compared
            return None

    def loss_of(self, batch: Any) -> Tensor:
        """Return the loss of a batch.

        Raises:
            Exception: the task cannot compute in float64.
        """
        return loss_sum_alone(self._task, self._model, _wide(batch))[0]

    def sums(self, batch: Any) -> Sums:
        """Return the sums of a batch; a task may give a constant in float32 for some batches.

        Raises:
            Exception: the task cannot compute in float64.
        """
        loss, weight, metrics = loss_sum_alone(self._task, self._model, _wide(batch))
        return Sums(loss.item(), weight, metrics)


def _wide(value: Any) -> Any:
    """Return a batch with its float32 tensors as float64."""
    if isinstance(value, Tensor):
        return value.double() if value.dtype is torch.float32 else value
    if isinstance(value, Mapping) and type(value) is dict:
        return {key: _wide(item) for key, item in value.items()}
    if type(value) is list:
        return [_wide(item) for item in value]
    if type(value) is tuple:
        return tuple(_wide(item) for item in value)
    return value
