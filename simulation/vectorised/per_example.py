"""Runs a task's loss on the examples of many devices in one pass, with ``torch.func``.

A task's loss is a sum over examples (``common.additivity`` checks it), so ``vmap`` can run
``loss_sum`` on batches of one example each, all in the same operators. The gradient of their sum is
one backward pass; a device's own gradient is the gradient of the sum over its examples.

Where only the sum of the gradients is needed, ``loss_sum`` gets one batch of all examples, if that
gives what ``vmap`` gives: ``RowSums`` reads what each example adds where the task sums over them.
That takes a tenth less time for a small perceptron, whose layers ``vmap`` takes apart.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vmap

from headwater.common.data.batches import UnsupportedBatch
from headwater.common.model.parameters import ModelImage
from headwater.common.task import Task
from headwater.simulation.vectorised.example_rows import ExampleRows, Rows
from headwater.simulation.vectorised.gradient_norms import SquaredNorms
from headwater.simulation.vectorised.linear_layers import (
    LinearLayers,
    add_to_gradient,
    find_linear_layers,
)
from headwater.simulation.vectorised.round_columns import Bools, Floats
from headwater.simulation.vectorised.row_sums import RowSums
from headwater.simulation.vectorised.task_sums import (
    ExampleSums,
    LossSum,
    autocast,
    call_with,
    computing_in,
    example_sums,
    numbers,
    unsupported_errors,
)

log = logging.getLogger(__name__)

# Of the comparison of a batch with single examples; both are relative.
TOLERANCE, MIN_DIFFERENCE = 1e-5, 1e-3


class PerExampleModel:
    """A task's model, run on single examples of many devices side by side.

    All methods raise ``UnsupportedBatch`` if ``torch.func`` cannot run the task or its model.
    """

    def __init__(self, task: Task, image: ModelImage, examples: ExampleRows) -> None:
        self._image = image
        self._examples = examples
        self._task = task
        self._loss_sum = LossSum(task, image.model)
        self._weight_each = 0.0
        self.takes_batches = False
        """Whether ``add`` runs the task on a batch of all examples, see ``compare_batches``."""

    def compare_batches(self, rows: Rows, expected: ExampleSums) -> None:
        """Let ``add`` run batches from now on, if one of these examples gives the expected sums.

        The examples' losses must differ, to tell whether each is that of its own example.
        """
        losses, self._weight_each = expected.loss, float(expected.weight[0])
        if len(rows) < 2 or np.ptp(losses) <= MIN_DIFFERENCE * np.abs(losses).max():
            return
        tensors = self._examples.take(rows)
        try:
            with torch.no_grad():
                _, found = self._of_batch(tensors, None, "float32")
        except UnsupportedBatch as reason:
            log.info("examples are passed by vmap: %s", reason)
            return
        self.takes_batches = _are_close(found, expected)

    def add(self, rows: Rows, factors: Floats | None, precision: str) -> ExampleSums:
        """Add the gradient of the summed loss of N examples to the parameters' own.

        ``factors`` [N] scale each example's gradient.
        """
        self._image.model.train()
        if self.takes_batches:
            tensors = self._examples.take(rows)
            try:
                total, sums = self._of_batch(tensors, factors, precision)
            except UnsupportedBatch as reason:  # on other examples than the first
                log.info("examples are passed by vmap: %s", reason)
                self.takes_batches = False
            else:
                total.backward()  # type: ignore[no-untyped-call]
                return sums
        with unsupported_errors():
            with computing_in(precision):
                loss, weight, metrics = vmap(self._one)(*self._examples.take(rows))
            _sum(loss, factors).backward()  # type: ignore[no-untyped-call]
        return example_sums(loss, weight, metrics)

    def _of_batch(
        self, tensors: Sequence[Tensor], factors: Floats | None, precision: str
    ) -> tuple[Tensor, ExampleSums]:
        """Return the loss of a batch of N examples, and what each of them adds."""
        num_rows = len(tensors[0])
        sums = RowSums(num_rows)
        batch = self._examples.batch(tensors)
        with unsupported_errors(), autocast(precision), sums:
            loss, weight, *others = self._task.loss_sum(self._image.model, batch)
        metrics = others[0] if others else {}
        if isinstance(weight, Tensor):
            weights = numbers(sums.of(weight))
        elif weight == self._weight_each * num_rows:
            weights = np.full(num_rows, self._weight_each)
        else:
            raise UnsupportedBatch(f"the weight of {num_rows} examples is {weight}")
        of_rows = sums.of(loss)
        return loss if factors is None else _sum(of_rows, factors), ExampleSums(
            loss=numbers(of_rows),
            weight=weights,
            metrics={str(name): numbers(sums.of(value)) for name, value in metrics.items()},
        )

    def linear_layers(self, rows: Rows) -> LinearLayers | None:
        """Return the layers that run on some examples, if ``add_with_norms`` can use them."""
        self._image.model.train()
        tensors = self._examples.take(rows)
        with unsupported_errors(), computing_in("float32"), torch.no_grad():
            return find_linear_layers(self._loss_sum, lambda: vmap(self._one)(*tensors))

    def add_with_norms(
        self,
        rows: Rows,
        factors: Floats | None,
        layers: LinearLayers,
        norms: SquaredNorms,
    ) -> ExampleSums:
        """Do what ``add`` does, in float32, and add the squares of the gradients to ``norms``."""
        self._image.model.train()
        num_examples = len(rows)
        copies = {
            name: parameter.detach().expand(num_examples, *parameter.shape).requires_grad_()
            for name, parameter in layers.others.items()
        }
        probes = {
            name: torch.zeros(()).expand(num_examples, *shape).requires_grad_()
            for name, shape in layers.output_shapes.items()
        }

        def one(
            copies: Mapping[str, Tensor], probes: Mapping[str, Tensor], *example: Tensor
        ) -> Any:
            inputs: dict[str, Tensor] = {}
            with layers.recording(probes, inputs):
                return *self._one(*example, replaced={**layers.detached, **copies}), inputs

        with unsupported_errors(), computing_in("float32"):
            loss, weight, metrics, inputs = vmap(one)(copies, probes, *self._examples.take(rows))

        def add_layer(name: str, gradients: Tensor) -> None:
            layers.add(name, inputs.pop(name).detach(), gradients, norms)

        def drop(probe: Tensor) -> None:
            probe.grad = None  # frees each gradient as the pass goes on

        for name, probe in probes.items():
            # Before it is accumulated, the gradient has the memory layout of the pass.
            probe.register_hook(partial(add_layer, name))  # type: ignore[no-untyped-call]
            probe.register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]
        _sum(loss, factors).backward()  # type: ignore[no-untyped-call]
        for name, copy in copies.items():
            if copy.grad is not None:
                add_to_gradient(layers.others[name], copy.grad.sum(0))
                norms.add_gradients(copy.grad.reshape(num_examples, -1))
        return example_sums(loss, weight, metrics)

    def gradients(
        self, rows_RM: Rows, mask_RM: Bools, precision: str
    ) -> tuple[Tensor, ExampleSums]:
        """Return R gradients [R, P], each summed over M examples, and each example's sums [R, M].

        An example that ``mask_RM`` excludes adds nothing to the gradient.
        """
        self._image.model.train()
        trained = {
            name: parameter.detach()
            for name, parameter in self._loss_sum.named_parameters()
            if parameter.requires_grad
        }

        def row_loss(trained: Mapping[str, Tensor], mask_M: Tensor, *tensors: Tensor) -> Any:
            def one(*example: Tensor) -> Any:
                return self._one(*example, replaced=trained)

            loss, weight, metrics = vmap(one)(*tensors)
            return (loss * mask_M).sum(), (loss.detach(), weight, metrics)

        tensors = self._examples.take(rows_RM)
        of_rows = vmap(grad(row_loss, has_aux=True), in_dims=(None, 0, *(0 for _ in tensors)))
        with unsupported_errors(), computing_in(precision):
            gradients, (loss, weight, metrics) = of_rows(
                trained, torch.from_numpy(mask_RM).float(), *tensors
            )
        flat = [gradients[name].reshape(len(rows_RM), -1) for name in trained]
        return torch.cat(flat, dim=1), example_sums(loss, weight, metrics)

    def weights(self, rows: Rows, precision: str) -> Floats:
        """Return the weight of each example [N]."""
        with unsupported_errors(), computing_in(precision), torch.no_grad():
            _, weight, _ = vmap(self._one)(*self._examples.take(rows))
        weights: Floats = weight.numpy()
        return weights

    def _one(self, *example: Tensor, replaced: Mapping[str, Tensor] | None = None) -> Any:
        batch = self._examples.batch([tensor.unsqueeze(0) for tensor in example])
        if not replaced:
            return self._loss_sum(batch)
        return call_with(self._loss_sum, replaced, batch)


def _sum(loss: Tensor, factors: Floats | None) -> Tensor:
    return (loss if factors is None else loss * torch.from_numpy(factors).float()).sum()


def _are_close(found: ExampleSums, expected: ExampleSums) -> bool:
    """Return whether two ways to compute the same examples agree on each."""
    if found.metrics.keys() != expected.metrics.keys():
        return False
    pairs = [(found.loss, expected.loss), (found.weight, expected.weight)]
    pairs += [(found.metrics[name], values) for name, values in expected.metrics.items()]
    return all(np.allclose(one, other, rtol=TOLERANCE, atol=1e-6) for one, other in pairs)
