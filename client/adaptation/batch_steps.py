"""Takes steps of an optimizer along the mean gradients of batches, in parts that fit in memory.

A batch that does not fit goes through the model in parts: sums add up, and are divided once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from headwater.client.training.sampler import split
from headwater.common.additivity.penalty import has_penalty
from headwater.common.data.batches import SubsetView, batch_of
from headwater.common.data.evaluation import evaluate_sums
from headwater.common.errors import OutOfMemory
from headwater.common.task import Examples, Task, loss_sum
from headwater.common.user_code.failures import is_allocation_failure, running

Result = TypeVar("Result")


class BatchSteps:
    """A task's model, examples and optimizer; ``batch_size`` falls where it does not fit."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        examples: Examples,
        optimizer: torch.optim.Optimizer,
        batch_size: int,
    ) -> None:
        self._task, self._model, self._examples = task, model, examples
        self._optimizer = optimizer
        self._size = batch_size

    def take(self, positions: Sequence[int]) -> bool:
        """Take a step along the mean gradient; return False if the loss is not finite.

        Raises:
            OutOfMemory: one example alone does not fit.
        """
        self._model.train()
        weight = self._in_parts(lambda: self._sum_gradients(positions))
        if weight:
            for group in self._optimizer.param_groups:
                for one in group["params"]:
                    if one.grad is not None:
                        one.grad /= weight
            self._add_penalty()
            self._optimizer.step()
        return weight is not None

    def mean_loss(self, positions: Sequence[int]) -> float:
        """Return the mean loss in evaluation mode; infinity if it is not finite."""
        chosen = SubsetView(self._examples, np.array(positions, dtype=np.int64))
        with running("the test that ends the training"):
            found = self._in_parts(
                lambda: evaluate_sums(self._task, self._model, chosen, self._size)
            )
        if found.faults or not found.weight:
            return math.inf
        return found.loss_sum / found.weight

    def _in_parts(self, compute: Callable[[], Result]) -> Result:
        """Return what ``compute`` returns, in smaller parts from the first that does not fit on."""
        while True:
            try:
                return compute()
            except Exception as error:
                if not is_allocation_failure(error.__cause__ or error):
                    raise
                if self._size == 1:
                    raise OutOfMemory(
                        "a training step on one example does not fit in the memory of the device"
                    ) from error
            self._size = math.ceil(self._size / 2)

    def _sum_gradients(self, positions: Sequence[int]) -> int | None:
        """Sum the gradients of a batch; return its weight, or None if its loss is not finite."""
        self._optimizer.zero_grad()
        weight = 0
        with running("the fine-tuning"):
            for part in split(positions, self._size):
                batch = batch_of(self._task, self._examples, part)
                loss, part_weight, _ = loss_sum(self._task, self._model, batch)
                if not math.isfinite(loss.item()):
                    return None
                loss.backward()  # type: ignore[no-untyped-call] # torch's own
                weight += part_weight
        return weight

    def _add_penalty(self) -> None:
        if has_penalty(self._task):
            with running("penalty"):
                term = self._task.penalty(self._model)  # type: ignore[attr-defined]
                if term.requires_grad:  # not of parameters that stay as they are
                    term.backward()
