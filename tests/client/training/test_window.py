"""A window's vector is the exact sum over the examples that its report counts, despite bad ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from headwater.client.training.gradient_pass import MicroBatchResult
from headwater.client.training.sampler import ExampleOrder, Ints, split
from headwater.client.training.window_sum import WindowSum
from headwater.common.errors import EmptyUpdate, TaskError
from headwater.common.messages import Step
from tests.tasks import (
    HUGE_GRADIENT,
    NAN_GRADIENT,
    NAN_LOSS,
    RAISES_BACKWARD,
    RAISES_FORWARD,
    TwoLayers,
    examples,
)
from tests.training_contexts import plan, sum_gradients, sums, trained, training_context, whole


@given(st.integers(1, 24), st.integers(1, 30))
def test_the_update_is_the_exact_sum_for_every_micro_batch_size(quota: int, size: int) -> None:
    context = training_context(TwoLayers(), examples(24))
    update = trained(context, plan(quota, size))
    assert torch.equal(update.values_P, sums(context, range(quota)))
    assert update.report.weight == update.report.num_examples == quota
    assert len(update.report.steps) == -(-quota // size)


@given(
    st.lists(
        st.sampled_from([0, 0, NAN_LOSS, NAN_GRADIENT, RAISES_BACKWARD, RAISES_FORWARD]),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 13),
)
def test_faulty_examples_leave_the_exact_sum_of_the_others(kinds: list[int], size: int) -> None:
    data = examples(len(kinds) + 1, kinds=kinds)
    context = training_context(TwoLayers(), data)
    update = trained(context, plan(len(data), size))
    good = [p for p, kind in enumerate([*kinds, 0]) if kind == 0]
    assert torch.equal(update.values_P, sums(context, good))
    assert update.report.weight == update.report.num_examples == len(good)
    assert update.report.num_refused == len(data) - len(good)
    assert sum(step.weight for step in update.report.steps) == len(good)


@pytest.mark.parametrize("kind", [NAN_LOSS, NAN_GRADIENT, RAISES_BACKWARD, RAISES_FORWARD])
def test_one_faulty_example_in_the_middle_is_the_only_one_left_out(kind: int) -> None:
    context = training_context(TwoLayers(), examples(10, kinds=[0, 0, 0, 0, 0, kind]))
    update = trained(context, plan(10, 4))
    assert torch.equal(update.values_P, sums(context, [p for p in range(10) if p != 5]))
    assert (update.report.num_examples, update.report.num_refused) == (9, 1)


@pytest.mark.parametrize("kind", [NAN_LOSS, NAN_GRADIENT, RAISES_BACKWARD, RAISES_FORWARD])
def test_an_update_without_a_good_example_is_refused_as_empty(kind: int) -> None:
    context = training_context(TwoLayers(), examples(5, kinds=[kind] * 5))
    with pytest.raises(EmptyUpdate, match="none of 5 examples"):
        trained(context, plan(5, 2))


def test_of_examples_that_overflow_jointly_the_first_are_summed() -> None:
    # Each adds 2e38 to one coordinate; float32 ends at 3.4e38.
    context = training_context(TwoLayers(), examples(4, kinds=[HUGE_GRADIENT, HUGE_GRADIENT]))
    update = trained(context, plan(4, 1))
    assert bool(torch.isfinite(update.values_P).all())
    assert (update.report.num_examples, update.report.num_refused) == (3, 1)
    assert torch.equal(update.values_P[:-1], sums(context, [0, 2, 3])[:-1])


def test_examples_that_overflow_in_one_micro_batch_are_refused_together() -> None:
    context = training_context(TwoLayers(), examples(4, kinds=[HUGE_GRADIENT, HUGE_GRADIENT]))
    update = trained(context, plan(4, 2))
    assert update.report.num_refused == 2
    assert torch.equal(update.values_P, sums(context, [2, 3]))


class RaisesAlone(TwoLayers):
    """A loss that raises on a single example, as a stray squeeze() does."""

    def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        if len(batch[0]) == 1:
            raise IndexError("dimension out of range")
        return super().loss_sum(model, batch)


def test_a_task_that_raises_during_the_search_for_a_nan_loses_no_other_micro_batch() -> None:
    context = training_context(RaisesAlone(), examples(8, kinds=[NAN_LOSS]))
    update = trained(context, plan(8, 4))
    assert set(split(range(8), 4)[1]) <= set(range(8))
    assert update.report.num_examples + update.report.num_refused == 8
    # Of the first micro-batch only {2, 3} can be tried apart; 0 and 1 fail alone.
    assert torch.equal(update.values_P, sums(context, range(2, 8)))


class FiniteWithoutGradients(TwoLayers):
    """A loss that is finite only without gradients."""

    def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        loss, weight = super().loss_sum(model, batch)
        return (loss * torch.nan if torch.is_grad_enabled() else loss), weight


def test_a_micro_batch_without_a_single_bad_example_is_refused_whole() -> None:
    context = training_context(FiniteWithoutGradients(), examples(4))
    with pytest.raises(EmptyUpdate):
        trained(context, plan(4, 2))


def test_an_example_refused_after_the_stop_makes_the_sampler_skip_no_unused_one() -> None:
    task, data = TwoLayers(), examples(6, kinds=[0, 0, 0, RAISES_BACKWARD])
    # The second micro-batch invalidates the vector: the window restarts, until the deadline.
    context, chosen = training_context(task, data), plan(6, 2, deadline_seconds=4.0)
    first = replace(whole(data, 6), order=InOrder(0, "pi", 6))
    local_sum = sum_gradients(chosen, first, context)
    assert local_sum.total.reason == "deadline"
    num_done = local_sum.total.num_examples
    assert torch.equal(local_sum.values_P, sums(context, range(num_done)))
    after = first.after_use_of(local_sum.used)
    unused = [p for p in range(num_done, 6) if p != 3]
    assert sorted([*after.skipped, *range(after.offset, 6)]) == unused


class InOrder(ExampleOrder):
    """The order of the data set."""

    def of(self, epoch: int) -> Ints:
        return np.arange(self.num_examples)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_loss_sum_that_zeroes_the_gradients_is_a_task_error(set_to_none: bool) -> None:
    class Zeroing(TwoLayers):
        def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
            model.zero_grad(set_to_none=set_to_none)
            return super().loss_sum(model, batch)

    with pytest.raises(TaskError, match="gradients"):
        trained(training_context(Zeroing(), examples(8)), plan(8, 4))


def test_a_metric_that_is_not_finite_is_a_task_error_that_names_it() -> None:
    class NanMetric(TwoLayers):
        def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> Any:
            return *super().loss_sum(model, batch), {"recall": math.nan}

    with pytest.raises(TaskError, match="recall"):
        trained(training_context(NanMetric(), examples(4)), plan(4, 2))


def test_metrics_are_summed_over_the_used_examples() -> None:
    class Counted(TwoLayers):
        def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> Any:
            return *super().loss_sum(model, batch), {"seen": len(batch[0])}

    context = training_context(Counted(), examples(9, kinds=[0, NAN_LOSS, 0, RAISES_BACKWARD]))
    assert trained(context, plan(9, 4)).report.metric_sums == {"seen": 7.0}


def test_steps_of_single_examples_are_told_as_one_from_the_third_on() -> None:
    """A report has no room for a step of each; what they say together stays."""
    total = WindowSum(micro_batch_size=4, are_apart=True)
    figures = [
        (2, 0.5, 1.0, 70, 3.0),
        (1, 2.0, 2.0, 90, 4.0),
        (3, 1.0, 4.0, 80, 5.0),
        (0, 0.0, 8.0, 60, 6.0),
    ]
    for at, (weight, loss, seconds, peak, size) in enumerate(figures):
        step = Step(
            num_examples=1, weight=weight, loss=loss, seconds=seconds, peak_bytes=peak, size=size
        )
        total.add((at,), MicroBatchResult(loss_sum=loss * weight, metric_sums={}, step=step))
    first, last = total.steps
    assert (first.weight, first.peak_bytes, first.size) == (2, 70, 3.0)
    assert (last.num_examples, last.weight, last.seconds, last.peak_bytes, last.size) == (
        3,
        4,
        14.0,
        90,
        15.0,
    )
    assert last.loss == (1 * 2.0 + 3 * 1.0) / 4
    assert (total.loss_sum, total.weight) == (6.0, 6)
