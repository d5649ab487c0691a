"""A task's model with other parameters for each device: their gradients in one pass.

Local steps move the devices' models apart. ``vmap`` runs the task on a batch of each of R devices,
each with its own row of parameters. The batches have one length; a row of a shorter one is padded,
and what padding adds is multiplied by zero. The loss of each example, which that needs, is read by
``RowSums``; where the task does not allow it, examples pass one by one, by a second ``vmap``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from headwater.common.model.parameters import ModelImage
from headwater.common.task import Task
from headwater.simulation.vectorised.example_rows import ExampleRows, Rows
from headwater.simulation.vectorised.round_columns import Bools
from headwater.simulation.vectorised.row_sums import RowSums
from headwater.simulation.vectorised.task_sums import (
    ExampleSums,
    LossSum,
    call_with,
    computing_in,
    example_sums,
    unsupported_errors,
)


class StackedModel:
    """A task's model, run on the batches of devices whose parameters differ.

    All methods raise ``UnsupportedBatch`` if ``torch.func`` cannot run the task or its model.
    """

    def __init__(
        self, task: Task, image: ModelImage, examples: ExampleRows, *, takes_batches: bool
    ) -> None:
        """``takes_batches`` is whether ``RowSums`` can read what each example adds."""
        self._image = image
        self._examples = examples
        self._of_batch = _RowLosses(task, image.model)
        self._of_one = LossSum(task, image.model)
        self.takes_batches = takes_batches
        named = dict(self._of_one.named_parameters())
        slots, spans = image.layout.trainable, image.layout.spans
        self._places = [
            (f"model.{slot.name}", slot.shape, span)
            for slot, span in zip(slots, spans, strict=True)
        ]
        assert all(name in named for name, _, _ in self._places)

    def add_gradients(
        self,
        values_RP: Tensor,
        gradients_RP: Tensor,
        rows_RM: Rows,
        mask_RM: Bools,
        precision: str,
    ) -> ExampleSums:
        """Add to each row of gradients that of its summed loss at its row of parameters.

        An example that ``mask_RM`` excludes adds nothing. Returns what each adds [R, M].
        """
        self._image.model.train()
        leaves = {
            name: values_RP[:, start:end].view(len(values_RP), *shape).requires_grad_()
            for name, shape, (start, end) in self._places
        }
        mask = torch.from_numpy(mask_RM)
        with unsupported_errors(), computing_in(precision):
            loss_RM, weight_RM, metrics = vmap(self._of_device)(
                leaves, *self._examples.take(rows_RM)
            )
            loss = torch.where(mask, loss_RM, 0.0).sum()
            gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        for (_, shape, (start, end)), added in zip(self._places, gradients, strict=True):
            if added is not None:
                gradients_RP[:, start:end].view(len(gradients_RP), *shape).add_(added)
        return example_sums(loss_RM, weight_RM, metrics)

    def _of_device(self, leaves: Mapping[str, Tensor], *tensors: Tensor) -> Any:
        if self.takes_batches:
            batch = self._examples.batch(tensors)
            return call_with(self._of_batch, leaves, batch, len(tensors[0]))

        def one(*example: Tensor) -> Any:
            batch = self._examples.batch([tensor.unsqueeze(0) for tensor in example])
            return call_with(self._of_one, leaves, batch)

        return vmap(one)(*tensors)


class _RowLosses(nn.Module):
    """``loss_sum`` of a batch as a forward pass that returns what each example adds."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self._task = task
        self.model = model

    def forward(self, batch: Any, num_rows: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return loss, weight and metrics of each of the batch's examples.

        Raises:
            UnsupportedBatch: the task sums in another way, or weighs its examples unlike.
        """
        with RowSums(num_rows) as sums:
            loss, weight, *others = self._task.loss_sum(self.model, batch)
        metrics = others[0] if others else {}
        if isinstance(weight, Tensor):
            weights = sums.of(weight)
        else:  # the comparison with single examples has found it to be the same for each
            weights = torch.full((num_rows,), weight / num_rows)
        return (
            sums.of(loss),
            weights.to(torch.float64),
            {
                str(name): sums.of(value).detach().to(torch.float64)
                for name, value in metrics.items()
            },
        )
