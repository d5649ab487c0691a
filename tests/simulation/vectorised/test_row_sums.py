"""A batch without vmap gives the sums and gradients of single examples, or is left to vmap."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from headwater.client.training.accumulator import Accumulator
from headwater.common.data.batches import UnsupportedBatch
from headwater.common.model.parameters import build_model
from headwater.simulation.vectorised.example_rows import ExampleRows
from headwater.simulation.vectorised.per_example import PerExampleModel
from headwater.simulation.vectorised.row_sums import RowSums

NUM_EXAMPLES, NUM_CLASSES = 7, 4
LossSum = Callable[[nn.Module, Tensor, Tensor], Any]


def classes(model: nn.Module, inputs: Tensor, labels: Tensor) -> Any:
    logits = model(inputs)
    loss = functional.cross_entropy(logits, labels, reduction="sum")
    return loss, len(labels), {"right": (logits.argmax(1) == labels).sum()}


def squares(model: nn.Module, inputs: Tensor, labels: Tensor) -> Any:
    expected = functional.one_hot(labels, NUM_CLASSES).float()
    return functional.mse_loss(model(inputs), expected, reduction="sum"), len(labels)


def own_formula(model: nn.Module, inputs: Tensor, labels: Tensor) -> Any:
    return -model(inputs).log_softmax(1).gather(1, labels[:, None]).sum(), len(labels)


def weights_of_data(model: nn.Module, inputs: Tensor, labels: Tensor) -> Any:
    is_counted = (labels > 0).float()
    each = functional.cross_entropy(model(inputs), labels, reduction="none") * is_counted
    return each.sum(), is_counted.sum()


def twice_the_sum(model: nn.Module, inputs: Tensor, labels: Tensor) -> Any:
    return 2 * functional.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)


def doubled_in_place(model: nn.Module, inputs: Tensor, labels: Tensor) -> Any:
    loss = functional.cross_entropy(model(inputs), labels, reduction="sum")
    return loss.mul_(2), len(labels)


def class_3_first(model: nn.Module, inputs: Tensor, labels: Tensor) -> Any:
    order = (labels == 3).int().argsort(descending=True, stable=True)
    return classes(model, inputs[order], labels[order])


def inputs_in_place(model: nn.Module, inputs: Tensor, labels: Tensor) -> Any:
    return classes(model, inputs.sub_(0.5), labels)


class Given:
    """A linear model, and a loss that a test gives."""

    def __init__(self, loss_sum: LossSum) -> None:
        self._loss_sum = loss_sum

    def new_model(self) -> nn.Module:
        return nn.Linear(3, NUM_CLASSES)

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        random = torch.Generator().manual_seed(3)
        labels = torch.arange(NUM_EXAMPLES) % NUM_CLASSES
        return TensorDataset(torch.randn(NUM_EXAMPLES, 3, generator=random), labels)

    def loss_sum(self, model: nn.Module, batch: Any) -> Any:
        return self._loss_sum(model, *batch)


class Passes:
    """A task's passes over all of its examples."""

    def __init__(self, loss_sum: LossSum) -> None:
        task = Given(loss_sum)
        image = build_model(task, seed=1)
        self.rows = ExampleRows(task)
        self.rows.add(0, task.train_examples(data=None, part=0, num_parts=1))
        self.image = image
        self.model = PerExampleModel(task, image, self.rows)
        self._accumulator = Accumulator(image)

    def add(self, factors: Any = None) -> tuple[Any, Tensor]:
        self._accumulator.zero()
        sums = self.model.add(np.arange(NUM_EXAMPLES), factors, "float32")
        return sums, self._accumulator.values_P.clone()

    def compare(self) -> None:
        self.model.compare_batches(np.arange(NUM_EXAMPLES), self.add()[0])


@pytest.mark.parametrize("factors", [None, np.arange(NUM_EXAMPLES) + 0.5])
@pytest.mark.parametrize("loss_sum", [classes, squares, own_formula, weights_of_data])
def test_a_batch_gives_the_sums_and_the_gradient_of_single_examples(
    loss_sum: LossSum, factors: Any
) -> None:
    passes = Passes(loss_sum)
    expected, gradient_P = passes.add(factors)
    passes.compare()
    assert passes.model.takes_batches == (loss_sum is not own_formula)  # it negates the sum
    found, found_P = passes.add(factors)
    np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-5)
    assert found.weight.tolist() == expected.weight.tolist()
    assert {name: values.tolist() for name, values in found.metrics.items()} == {
        name: values.tolist() for name, values in expected.metrics.items()
    }
    torch.testing.assert_close(found_P, gradient_P)


def test_only_the_forward_pass_runs_in_the_precision_of_a_plan() -> None:
    """The backward pass of an operation takes the precision in which that operation ran."""
    passes, states = Passes(own_formula), list[bool]()
    for parameter in passes.image.model.parameters():
        parameter.register_hook(lambda _: states.append(torch.is_autocast_enabled("cpu")))  # type: ignore[no-untyped-call]
    passes.model.add(np.arange(NUM_EXAMPLES), None, "bfloat16")
    assert states == [False, False]


@pytest.mark.parametrize("loss_sum", [twice_the_sum, doubled_in_place])
def test_sums_that_are_changed_afterwards_are_left_to_vmap(loss_sum: LossSum) -> None:
    passes = Passes(loss_sum)
    passes.compare()
    assert not passes.model.takes_batches


def test_a_task_that_changes_its_inputs_leaves_the_examples_as_they_are() -> None:
    passes = Passes(inputs_in_place)
    before = [tensor.clone() for tensor in passes.rows.take(np.arange(NUM_EXAMPLES))]
    passes.compare()
    assert passes.model.takes_batches
    passes.add()
    for tensor, old in zip(passes.rows.take(np.arange(NUM_EXAMPLES)), before, strict=True):
        assert torch.equal(tensor, old)


def test_examples_with_equal_losses_do_not_tell_which_loss_is_whose() -> None:
    passes = Passes(lambda model, inputs, labels: classes(model, inputs * 0, labels * 0))
    passes.compare()
    assert not passes.model.takes_batches


def test_a_batch_whose_weight_is_not_foreseen_is_left_to_vmap() -> None:
    def rounded_up(model: nn.Module, inputs: Tensor, labels: Tensor) -> Any:
        return classes(model, inputs, labels)[0], max(len(labels), 1) + len(labels) // 5

    passes = Passes(rounded_up)
    expected, _ = passes.add()
    passes.model.compare_batches(np.arange(3), passes.model.add(np.arange(3), None, "float32"))
    assert passes.model.takes_batches
    found, _ = passes.add()
    assert not passes.model.takes_batches
    assert found.weight.tolist() == expected.weight.tolist()


def test_a_sort_that_leaves_the_first_examples_in_their_order_swaps_no_later_ones() -> None:
    passes = Passes(class_3_first)
    expected, _ = passes.add()
    passes.model.compare_batches(np.arange(3), passes.model.add(np.arange(3), None, "float32"))
    found, _ = passes.add()
    np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-5)


def test_token_losses_are_summed_to_their_row() -> None:
    losses = torch.arange(6.0)
    with RowSums(2) as sums:
        total = functional.l1_loss(losses, torch.zeros(6), reduction="sum")
    assert sums.of(total).tolist() == [0.0 + 1 + 2, 3.0 + 4 + 5]
    with pytest.raises(UnsupportedBatch, match="not made by a known loss"):
        sums.of(total + 1)


@pytest.mark.parametrize("changed", ["the sum", "its parts"])
def test_a_sum_or_its_parts_that_change_in_place_are_not_read(changed: str) -> None:
    parts = torch.arange(2.0)
    with RowSums(2) as sums:
        total = parts.sum()
        (total if changed == "the sum" else parts).add_(0)
    with pytest.raises(UnsupportedBatch, match="not made by a known loss"):
        sums.of(total)


@pytest.mark.parametrize("some", [[2, 3, 4], [2, 4, 5]])
def test_rows_are_taken_as_copies_which_a_loss_may_change(some: list[int]) -> None:
    rows = Passes(classes).rows
    (inputs, _), (expected, _) = rows.take(np.array(some)), rows.take(np.array([some]))
    assert torch.equal(inputs, expected[0])
    inputs.zero_()
    assert torch.equal(rows.take(np.array(some))[0], expected[0])
