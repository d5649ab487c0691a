"""A model is evaluated on every example that can be; the rest are counted, each with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwater.common.data.batches import batch_of
from headwater.common.data.evaluation import evaluate_sums
from headwater.common.task import loss_sum
from tests.tasks import FINE, NAN_LOSS, RAISES_FORWARD, TwoLayers, examples


def test_evaluation_sums_equal_those_of_one_large_batch() -> None:
    task, data = TwoLayers(), examples(10)
    torch.manual_seed(1)
    model = task.new_model()
    whole = loss_sum(task, model, batch_of(task, data, range(10)))
    total = evaluate_sums(task, model, data, 3)
    assert (total.loss_sum, total.weight, total.metric_sums) == (whole[0].item(), 10, {})
    assert not total.faults


@pytest.mark.parametrize("size", [1, 4, 100])
def test_the_sums_are_those_of_the_examples_that_are_not_left_out(size: int) -> None:
    kinds = [NAN_LOSS, FINE, RAISES_FORWARD, FINE, NAN_LOSS]
    task, data = TwoLayers(), examples(12, kinds=kinds)
    model = task.new_model()
    good = [1, 3, *range(5, 12)]
    expected, weight, _ = loss_sum(task, model, batch_of(task, data, good))
    total = evaluate_sums(task, model, data, size)
    assert (total.loss_sum, total.weight) == (expected.item(), weight)
    assert sorted(total.faults) == [0, 2, 4]
    assert total.faults[2].kind == "it raised ValueError"
    assert "its loss is NaN or infinite" in total.faults[0].kind


def test_a_loss_that_takes_gradients_of_its_inputs_is_evaluated() -> None:
    class Forces(TwoLayers):
        def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> Any:
            inputs_BI = batch[0].clone().requires_grad_()
            (slopes_BI,) = torch.autograd.grad(model(inputs_BI).sum(), inputs_BI, create_graph=True)
            return slopes_BI.square().sum(), len(inputs_BI)

    task, data = Forces(), examples(10)
    model = task.new_model()
    expected, weight, _ = loss_sum(task, model, batch_of(task, data, range(10)))
    total = evaluate_sums(task, model, data, 100)
    assert (total.loss_sum, total.weight, total.faults) == (expected.item(), weight, {})


def test_without_any_finite_example_the_weight_is_zero() -> None:
    task, data = TwoLayers(), examples(3, kinds=[NAN_LOSS] * 3)
    total = evaluate_sums(task, task.new_model(), data, 2)
    assert (total.loss_sum, total.weight, len(total.faults)) == (0.0, 0, 3)


def test_if_every_example_raises_the_task_s_own_exception_is_raised() -> None:
    task, data = TwoLayers(), examples(3, kinds=[RAISES_FORWARD] * 3)
    with pytest.raises(ValueError, match="must stay on the device"):
        evaluate_sums(task, task.new_model(), data, 2)


def test_what_a_test_draws_is_the_same_each_time_and_the_caller_s_generator_stays() -> None:
    class Noisy(TwoLayers):
        def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
            noise = torch.randn(len(batch[0]), 3)
            return (model(batch[0]) * noise).sum(), len(batch[0])

    task, data = Noisy(), examples(10)
    model = task.new_model()
    before = torch.get_rng_state()
    found = []
    for seed in (1, 1, 2):
        found.append(evaluate_sums(task, model, data, 4, seed=seed).loss_sum)
        assert torch.equal(torch.get_rng_state(), before)
        before = torch.manual_seed(len(found)).get_state()
    assert found[0] == found[1] != found[2]
