"""A client's update of one round: its report, its scaling, and local steps."""

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
from torch.utils.data import TensorDataset

from headwater.client.features import train_round
from headwater.client.training.context import TrainingContext
from headwater.client.training.sampler import SamplerPosition, split, window
from headwater.common.errors import BuffersChanged, NonFiniteUpdate, TaskError
from tests.tasks import HUGE_GRADIENT, TwoLayers, examples, gradient_sum
from tests.training_contexts import plan, sums, trained, training_context


def test_a_window_at_the_end_of_an_epoch_has_its_whole_quota() -> None:
    data = examples(10)
    context = training_context(TwoLayers(), data)
    late = window(SamplerPosition(offset=8), quota=4, run_seed=0, name="pi", num_examples=10)
    update = train_round(plan(4, 4), late, context)
    assert (update.report.reason, update.report.num_examples) == ("quota", 4)


def test_bfloat16_arithmetic_is_summed_in_float32() -> None:
    # One gradient of 1 on top of 2^9: bfloat16 has 8 bits and would drop it.
    data = TensorDataset(torch.full((513, 1), 1.0))

    class Slope(TwoLayers):
        def new_model(self) -> nn.Module:
            return nn.Linear(1, 1, bias=False)

        def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
            out = model(batch[0])
            assert out.dtype == torch.bfloat16
            return out.float().sum(), len(batch[0])

    context = training_context(Slope(), data)
    update = trained(context, plan(513, 1, precision="bfloat16"))
    assert update.values_P.dtype == torch.float32
    assert update.values_P.tolist() == [513.0]


class WithDropout(TwoLayers):
    def new_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        return model(batch[0]).square().sum(), len(batch[0])


def test_each_micro_batch_epoch_and_client_draws_dropout_of_its_own() -> None:
    alike = TensorDataset(torch.ones(8, 3))
    sums_of_two: list[tuple[float, ...]] = []
    for name in ("pi", "nas"):
        context = replace(training_context(WithDropout(), alike), name=name)
        for place in (SamplerPosition(epoch=e, offset=o) for e in range(2) for o in (0, 2, 4)):
            two = window(place, quota=2, run_seed=0, name=name, num_examples=8)
            update = train_round(plan(2, 2), two, context)
            sums_of_two.append(tuple(update.values_P.tolist()))
    assert len({*sums_of_two}) == 12


def test_a_device_trains_in_training_mode_though_its_model_was_tested() -> None:
    context = training_context(WithDropout(), examples(8))
    first = trained(context, plan(8, 4)).values_P.clone()
    context.image.model.eval()
    assert torch.equal(trained(context, plan(8, 4)).values_P, first)


def test_a_repeated_window_draws_the_same_dropout() -> None:
    context = training_context(WithDropout(), examples(9))
    first = trained(context, plan(9, 4)).values_P.clone()
    torch.rand(7)
    assert torch.equal(trained(context, plan(9, 4)).values_P, first)


class Counting(nn.Module):
    """Counts its forward passes in a buffer, in the way that ``how`` says."""

    num_seen: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("num_seen", torch.zeros(1))
        self.how = how

    def forward(self, inputs_BI: Tensor) -> Tensor:
        if self.how == "in place":
            self.num_seen += 1
        elif self.how == "replaced":
            self.num_seen = self.num_seen + 1
        out: Tensor = self.linear(inputs_BI)
        return out


def test_a_parameter_changed_by_a_forward_pass_is_named() -> None:
    class Bounded(WithDropout):
        def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
            with torch.no_grad():
                next(model.parameters()).clamp_(-0.1, 0.1)
            return super().loss_sum(model, batch)

    with pytest.raises(BuffersChanged, match=r"changed the parameter 0\.weight"):
        trained(training_context(Bounded(), examples(4)), plan(4, 2))


@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_a_buffer_changed_by_training_is_named(how: str) -> None:
    class WithCount(WithDropout):
        def new_model(self) -> nn.Module:
            return Counting(how)

    with pytest.raises(BuffersChanged, match="num_seen"):
        trained(training_context(WithCount(), examples(4)), plan(4, 2))


def plain_sgd(context: TrainingContext, cuts: Sequence[Sequence[int]], rate: float) -> Tensor:
    """Take one step per cut on the mean of its gradients, in float64."""
    assert isinstance(context.examples, TensorDataset)
    values_P = context.image.values_P.double()
    for positions in cuts:
        total = gradient_sum(values_P, context.examples, positions)
        values_P = values_P - rate * torch.from_numpy(total) / len(positions)
    return values_P


@pytest.mark.parametrize("size", [1, 2, 4])
def test_local_steps_equal_a_plain_sgd_loop(size: int) -> None:
    context = training_context(TwoLayers(), examples(12))
    before_P = context.image.values_P.double().clone()
    after_P = plain_sgd(context, split(range(12), 4), 2.0**-6)
    chosen = plan(12, size, local_steps=3, local_learning_rate=2.0**-6)
    update = trained(context, chosen)
    expected_P = 12 * (before_P - after_P)
    # Three float32 steps of a few dozen operations on values below 2^8, then times 12.
    bound = 12 * 3 * 64 * 2.0**8 * 2.0**-24
    assert float((update.values_P.double() - expected_P).abs().max()) <= bound
    assert (update.report.weight, update.report.num_examples) == (12, 12)


def test_local_steps_of_one_micro_batch_stop_at_the_deadline() -> None:
    context = training_context(TwoLayers(), examples(12))
    chosen = plan(12, 4, local_steps=3, local_learning_rate=2.0**-6, deadline_seconds=9.0)
    update = trained(context, chosen)
    assert (update.report.reason, update.report.weight) == ("deadline", 8)


def test_local_steps_that_fail_restore_the_model() -> None:
    task = TwoLayers()
    context = training_context(task, examples(12))
    before_P = context.image.values_P.clone()

    def loss_sum(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        if len(task.seen) == 2:
            raise TaskError("in the third step")
        return TwoLayers.loss_sum(task, model, batch)

    task.loss_sum = loss_sum  # type: ignore[method-assign]
    with pytest.raises(TaskError, match="third"):
        trained(context, plan(12, 4, local_steps=3, local_learning_rate=2.0**-6))
    assert torch.equal(context.image.values_P, before_P)


def test_local_steps_that_diverge_are_refused_with_a_remedy() -> None:
    context = training_context(TwoLayers(), examples(12))
    with pytest.raises(NonFiniteUpdate) as caught:
        trained(context, plan(12, 1, local_steps=12, local_learning_rate=3e38))
    assert "--local-learning-rate" in caught.value.remedy


def test_each_step_records_its_loss_norm_seconds_and_peak_memory() -> None:
    data = examples(10)
    context = training_context(TwoLayers(), data)
    report = trained(context, plan(10, 4)).report
    summed: list[int] = []
    losses = []
    for step, positions in zip(report.steps, split(range(10), 4), strict=True):
        summed += positions
        losses.append(step.loss * step.weight)
        norm = float(np.linalg.norm(sums(context, summed).double().numpy()))
        assert (step.num_examples, step.weight) == (len(positions), len(positions))
        is_measured = len(summed) in (4, 10)  # after the first step and the last
        expected = pytest.approx(norm, rel=10 * 2.0**-23) if is_measured else None
        assert step.gradient_norm == expected
        assert step.seconds == len(positions)
        assert step.peak_bytes > 2**20
    assert math.isclose(math.fsum(losses), report.loss_sum, rel_tol=1e-12)
    assert report.seconds == 10


@given(st.integers(1, 12), st.integers(1, 2**40), st.integers(1, 3))
def test_scaling_to_another_weight_rounds_once(quota: int, weigh_as: int, local_steps: int) -> None:
    context = training_context(TwoLayers(), examples(12))
    chosen = plan(quota, 1, local_steps=local_steps, local_learning_rate=2.0**-6)
    plain = trained(context, chosen)
    wide_P, report = plain.values_P.double().clone(), plain.report
    scaled = trained(context, chosen.model_copy(update={"weigh_as": weigh_as}))
    exact_P = wide_P * weigh_as / report.weight
    # Half a unit in the last place of float32, and two roundings of float64 on either side.
    bound_P = exact_P.abs() * (2.0**-24 + 4 * 2.0**-53)
    assert bool(((scaled.values_P.double() - exact_P).abs() <= bound_P).all())
    assert scaled.report.weight == weigh_as
    assert scaled.report.num_examples == report.num_examples == quota
    assert math.isclose(
        scaled.report.loss_sum, report.loss_sum * weigh_as / report.weight, rel_tol=1e-15
    )
    assert [step.weight for step in scaled.report.steps] == [1] * quota


def test_scaling_to_the_same_weight_changes_no_bit() -> None:
    context = training_context(WithDropout(), examples(9))
    values_P = trained(context, plan(9, 4)).values_P.clone()
    assert torch.equal(trained(context, plan(9, 4, weigh_as=9)).values_P, values_P)


def test_metrics_are_scaled_with_the_sum() -> None:
    class Counted(TwoLayers):
        def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> Any:
            return *super().loss_sum(model, batch), {"seen": len(batch[0])}

    context = training_context(Counted(), examples(9))
    assert trained(context, plan(6, 4, weigh_as=24)).report.metric_sums == {"seen": 24.0}


def test_a_sum_that_overflows_when_scaled_is_refused() -> None:
    # One coordinate is 2e38; float32 ends at 3.4e38.
    context = training_context(TwoLayers(), examples(4, kinds=[HUGE_GRADIENT]))
    with pytest.raises(NonFiniteUpdate, match="overflows float32 when scaled to weight 8"):
        trained(context, plan(4, 4, weigh_as=8))
