"""A window's vector is the exact sum over what its report counts, whatever examples are faulty."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from headwater.client.training.micro_batches import split
from headwater.common.errors import EmptyUpdate, TaskError
from tests.tasks import (
    HUGE_GRADIENT,
    NAN_GRADIENT,
    NAN_LOSS,
    RAISES_BACKWARD,
    RAISES_FORWARD,
    TwoLayers,
    examples,
)
from tests.training_contexts import plan, sums, trained, workplace


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 24), st.integers(1, 30))
def test_the_update_is_the_exact_sum_however_the_window_is_cut(quota: int, size: int) -> None:
    place = workplace(TwoLayers(), examples(24))
    update = trained(place, plan(quota, size))
    assert torch.equal(update.values_P, sums(place, range(quota)))
    assert update.report.weight == update.report.num_examples == quota
    assert len(update.report.steps) == -(-quota // size)


@settings(deadline=None, max_examples=60)
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
    place = workplace(TwoLayers(), data)
    update = trained(place, plan(len(data), size))
    good = [p for p, kind in enumerate([*kinds, 0]) if kind == 0]
    assert torch.equal(update.values_P, sums(place, good))
    assert update.report.weight == update.report.num_examples == len(good)
    assert update.report.num_refused == len(data) - len(good)
    assert sum(step.weight for step in update.report.steps) == len(good)


@pytest.mark.parametrize("kind", [NAN_LOSS, NAN_GRADIENT, RAISES_BACKWARD, RAISES_FORWARD])
def test_one_faulty_example_in_the_middle_is_the_only_one_left_out(kind: int) -> None:
    place = workplace(TwoLayers(), examples(10, kinds=[0, 0, 0, 0, 0, kind]))
    update = trained(place, plan(10, 4))
    assert torch.equal(update.values_P, sums(place, [p for p in range(10) if p != 5]))
    assert (update.report.num_examples, update.report.num_refused) == (9, 1)


@pytest.mark.parametrize("kind", [NAN_LOSS, NAN_GRADIENT, RAISES_BACKWARD, RAISES_FORWARD])
def test_an_update_without_a_good_example_is_refused_as_empty(kind: int) -> None:
    place = workplace(TwoLayers(), examples(5, kinds=[kind] * 5))
    with pytest.raises(EmptyUpdate, match="none of 5 examples"):
        trained(place, plan(5, 2))


def test_examples_that_overflow_jointly_are_summed_as_far_as_they_fit() -> None:
    # Each adds 2e38 to one coordinate; float32 ends at 3.4e38.
    place = workplace(TwoLayers(), examples(4, kinds=[HUGE_GRADIENT, HUGE_GRADIENT]))
    update = trained(place, plan(4, 1))
    assert bool(torch.isfinite(update.values_P).all())
    assert (update.report.num_examples, update.report.num_refused) == (3, 1)
    assert torch.equal(update.values_P[:-1], sums(place, [0, 2, 3])[:-1])


def test_examples_that_overflow_in_one_micro_batch_are_refused_together() -> None:
    place = workplace(TwoLayers(), examples(4, kinds=[HUGE_GRADIENT, HUGE_GRADIENT]))
    update = trained(place, plan(4, 2))
    assert update.report.num_refused == 2
    assert torch.equal(update.values_P, sums(place, [2, 3]))


class RaisesAlone(TwoLayers):
    """A loss that raises on a single example, as a stray squeeze() does."""

    def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        if len(batch[0]) == 1:
            raise IndexError("dimension out of range")
        return super().loss_sum(model, batch)


def test_a_task_that_raises_during_the_search_for_a_nan_loses_no_other_micro_batch() -> None:
    place = workplace(RaisesAlone(), examples(8, kinds=[NAN_LOSS]))
    update = trained(place, plan(8, 4))
    assert set(split(range(8), 4)[1]) <= set(range(8))
    assert update.report.num_examples + update.report.num_refused == 8
    # Of the first micro-batch only {2, 3} can be tried apart; 0 and 1 fail alone.
    assert torch.equal(update.values_P, sums(place, range(2, 8)))


class FiniteWithoutGradients(TwoLayers):
    """A loss that is finite only where no gradient is asked for."""

    def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        loss, weight = super().loss_sum(model, batch)
        return (loss * torch.nan if torch.is_grad_enabled() else loss), weight


def test_a_micro_batch_in_which_no_culprit_is_found_is_refused_whole() -> None:
    place = workplace(FiniteWithoutGradients(), examples(4))
    with pytest.raises(EmptyUpdate):
        trained(place, plan(4, 2))


def test_what_was_taken_and_refused_is_a_beginning_of_the_window_when_stopped() -> None:
    """An example refused behind the stop must not push the walk over one that nobody saw."""
    task = TwoLayers()
    # The second micro-batch spoils the vector; the window begins again and time is up after one.
    place = workplace(task, examples(6, kinds=[0, 0, 0, NAN_GRADIENT]))
    update = trained(place, plan(6, 2, deadline_seconds=4.0))
    assert update.report.reason == "deadline"
    assert torch.equal(update.values_P, sums(place, range(update.report.num_examples)))
    assert update.report.num_refused == 0


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_loss_sum_that_empties_the_gradients_is_a_task_error(set_to_none: bool) -> None:
    class Zeroing(TwoLayers):
        def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
            model.zero_grad(set_to_none=set_to_none)
            return super().loss_sum(model, batch)

    with pytest.raises(TaskError, match="gradients"):
        trained(workplace(Zeroing(), examples(8)), plan(8, 4))


def test_a_metric_that_is_not_finite_is_a_task_error_that_names_it() -> None:
    class NanMetric(TwoLayers):
        def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> Any:
            return *super().loss_sum(model, batch), {"recall": math.nan}

    with pytest.raises(TaskError, match="recall"):
        trained(workplace(NanMetric(), examples(4)), plan(4, 2))


def test_metrics_are_summed_over_the_examples_that_count() -> None:
    class Counted(TwoLayers):
        def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> Any:
            return *super().loss_sum(model, batch), {"seen": len(batch[0])}

    place = workplace(Counted(), examples(9, kinds=[0, NAN_LOSS, 0, RAISES_BACKWARD]))
    assert trained(place, plan(9, 4)).report.metric_sums == {"seen": 7.0}
