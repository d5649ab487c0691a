"""One round on a device: the vector is the exact sum over what the report counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from client.accumulator import Accumulator
from client.local_training import train
from client.memory import ProcessMemory
from client.micro_batches import Place, Window, cut, window
from client.window_sum import check_works
from client.workplace import Workplace
from common.errors import (
    BuffersChanged,
    EmptyUpdate,
    NonFiniteUpdate,
    OutOfMemory,
    TaskError,
    TaskFailed,
    travelling,
)
from common.parameters import build_model
from common.task import Task
from common.update import Plan, Update
from tests.tasks import (
    HUGE_GRADIENT,
    NAN_GRADIENT,
    NAN_LOSS,
    RAISES_BACKWARD,
    RAISES_FORWARD,
    TwoLayers,
    examples,
    gradient_sum,
)


class FakeClock:
    """A micro-batch of n examples takes n seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def seconds(self) -> float:
        return self.now

    def worked(self, num_examples: int) -> None:
        self.now += num_examples


def workplace(
    task: Task, data: TensorDataset, *, stop: Callable[[], bool] = lambda: False
) -> Workplace:
    image = build_model(task, seed=3)
    return Workplace(
        task=task,
        image=image,
        accumulator=Accumulator(image),
        examples=data,
        name="pi",
        clock=FakeClock(),
        memory=ProcessMemory(),
        stop=stop,
    )


def plan(quota: int, micro_batch_size: int, **changes: Any) -> Plan:
    return Plan(
        round=1,
        run_seed=0,
        model_version=0,
        quota=quota,
        micro_batch_size=micro_batch_size,
        **changes,
    )


def whole(data: TensorDataset, quota: int) -> Window:
    """Return a window in the order of the data set, so that a test knows who comes when."""
    return Window(positions=tuple(range(len(data)))[:quota], epoch=0, offset=0, ends_epoch=False)


def sums(place: Workplace, positions: Sequence[int]) -> Tensor:
    assert isinstance(place.examples, TensorDataset)
    expected = gradient_sum(place.image.values_P, place.examples, positions)
    return torch.from_numpy(expected).float()


def trained(place: Workplace, asked: Plan) -> Update:
    assert isinstance(place.examples, TensorDataset)
    return train(asked, whole(place.examples, asked.quota), place)


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


@pytest.mark.parametrize(("fits", "size"), [(1, 1), (2, 2), (3, 2), (4, 4), (7, 4)])
def test_micro_batches_halve_until_they_fit_and_the_sum_stays_exact(fits: int, size: int) -> None:
    place = workplace(TwoLayers(max_micro_batch=fits), examples(19))
    update = trained(place, plan(19, 8))
    assert torch.equal(update.values_P, sums(place, range(19)))
    assert update.report.micro_batch_size == size
    assert update.report.num_examples == 19
    assert len(update.report.steps) == -(-19 // size)


def test_memory_that_runs_out_only_late_in_the_window_loses_and_doubles_nothing() -> None:
    task = TwoLayers()
    place = workplace(task, examples(12))
    failed: list[int] = []

    def loss_sum(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        if len(task.seen) == 2 and not failed:
            failed.append(1)
            raise MemoryError
        return TwoLayers.loss_sum(task, model, batch)

    task.loss_sum = loss_sum  # type: ignore[method-assign]
    update = trained(place, plan(12, 4))
    assert failed == [1]
    assert torch.equal(update.values_P, sums(place, range(12)))
    assert update.report.micro_batch_size == 2


def test_memory_that_runs_out_in_the_search_for_a_culprit_halves_the_micro_batches() -> None:
    """The second backward pass of a full micro-batch is one too many."""
    task = TwoLayers()
    place = workplace(task, examples(8, kinds=[0, 0, 0, NAN_GRADIENT]))

    def loss_sum(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        if len(batch[0]) == 8 and 8 in task.seen:
            raise MemoryError
        return TwoLayers.loss_sum(task, model, batch)

    task.loss_sum = loss_sum  # type: ignore[method-assign]
    update = trained(place, plan(8, 8))
    assert torch.equal(update.values_P, sums(place, [p for p in range(8) if p != 3]))
    assert (update.report.micro_batch_size, update.report.num_refused) == (4, 1)


def test_one_example_that_does_not_fit_is_out_of_memory() -> None:
    place = workplace(TwoLayers(max_micro_batch=0), examples(8))
    with pytest.raises(OutOfMemory, match="pi, round 1: one example alone"):
        trained(place, plan(8, 8))


class RaisesAlone(TwoLayers):
    """A loss that raises on a single example, as a stray squeeze() does."""

    def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        if len(batch[0]) == 1:
            raise IndexError("dimension out of range")
        return super().loss_sum(model, batch)


def test_a_task_that_raises_during_the_search_for_a_nan_loses_no_other_micro_batch() -> None:
    place = workplace(RaisesAlone(), examples(8, kinds=[NAN_LOSS]))
    update = trained(place, plan(8, 4))
    assert set(cut(range(8), 4)[1]) <= set(range(8))
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


def test_at_the_deadline_the_micro_batches_that_fit_are_sent_exactly_weighted() -> None:
    place = workplace(TwoLayers(), examples(20))
    update = trained(place, plan(20, 4, deadline_seconds=13.0))
    assert update.report.reason == "deadline"
    assert len(update.report.steps) == 3  # 4 s each: the fourth would end at 16 s
    assert update.report.weight == 12
    assert torch.equal(update.values_P, sums(place, range(12)))


def test_a_deadline_that_just_fits_cuts_nothing_off() -> None:
    place = workplace(TwoLayers(), examples(20))
    update = trained(place, plan(20, 4, deadline_seconds=20.0))
    assert (update.report.reason, update.report.weight) == ("quota", 20)


def test_asked_to_stop_it_sends_what_it_has() -> None:
    task = TwoLayers()
    place = workplace(task, examples(20), stop=lambda: len(task.seen) >= 2)
    update = trained(place, plan(20, 4))
    assert (update.report.reason, update.report.weight) == ("asked to stop", 8)
    assert torch.equal(update.values_P, sums(place, range(8)))


def test_what_was_taken_and_refused_is_a_beginning_of_the_window_when_stopped() -> None:
    """An example refused behind the stop must not push the walk over one that nobody saw."""
    task = TwoLayers()
    # The second micro-batch spoils the vector; the window begins again and time is up after one.
    place = workplace(task, examples(6, kinds=[0, 0, 0, NAN_GRADIENT]))
    update = trained(place, plan(6, 2, deadline_seconds=4.0))
    assert update.report.reason == "deadline"
    assert torch.equal(update.values_P, sums(place, range(update.report.num_examples)))
    assert update.report.num_refused == 0


def test_a_window_at_the_end_of_an_epoch_says_so() -> None:
    data = examples(10)
    place = workplace(TwoLayers(), data)
    short = window(Place(offset=8), quota=4, run_seed=0, name="pi", num_examples=10)
    update = train(plan(4, 4), short, place)
    assert (update.report.reason, update.report.num_examples) == ("epoch end", 2)


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

    place = workplace(Slope(), data)
    update = trained(place, plan(513, 1, precision="bfloat16"))
    assert update.values_P.dtype == torch.float32
    assert update.values_P.tolist() == [513.0]


class WithDropout(TwoLayers):
    def new_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        return model(batch[0]).square().sum(), len(batch[0])


def test_dropout_layers_draw_the_same_when_the_window_is_done_again() -> None:
    place = workplace(WithDropout(), examples(9))
    first = trained(place, plan(9, 4)).values_P.clone()
    torch.rand(7)
    assert torch.equal(trained(place, plan(9, 4)).values_P, first)


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


@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_a_buffer_that_training_changes_is_named(how: str) -> None:
    class WithCount(WithDropout):
        def new_model(self) -> nn.Module:
            return Counting(how)

    with pytest.raises(BuffersChanged, match="num_seen"):
        trained(workplace(WithCount(), examples(4)), plan(4, 2))


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


def plain_sgd(place: Workplace, cuts: Sequence[Sequence[int]], rate: float) -> Tensor:
    """Take one step per cut on the mean of its gradients, in float64."""
    assert isinstance(place.examples, TensorDataset)
    values_P = place.image.values_P.double()
    for positions in cuts:
        total = gradient_sum(values_P, place.examples, positions)
        values_P = values_P - rate * torch.from_numpy(total) / len(positions)
    return values_P


@pytest.mark.parametrize("size", [1, 2, 4])
def test_local_steps_equal_a_plain_loop_of_sgd(size: int) -> None:
    place = workplace(TwoLayers(), examples(12))
    before_P = place.image.values_P.double().clone()
    after_P = plain_sgd(place, cut(range(12), 4), 2.0**-6)
    asked = plan(12, size, local_steps=3, local_learning_rate=2.0**-6)
    update = trained(place, asked)
    expected_P = 12 * (before_P - after_P)
    # Three float32 steps of a few dozen operations on values below 2^8, then times 12.
    bound = 12 * 3 * 64 * 2.0**8 * 2.0**-24
    assert float((update.values_P.double() - expected_P).abs().max()) <= bound
    assert (update.report.weight, update.report.num_examples) == (12, 12)


def test_local_steps_stop_at_the_deadline_also_with_one_micro_batch_a_step() -> None:
    place = workplace(TwoLayers(), examples(12))
    asked = plan(12, 4, local_steps=3, local_learning_rate=2.0**-6, deadline_seconds=9.0)
    update = trained(place, asked)
    assert (update.report.reason, update.report.weight) == ("deadline", 8)


def test_local_steps_that_fail_half_way_leave_the_model_as_it_was() -> None:
    task = TwoLayers()
    place = workplace(task, examples(12))
    before_P = place.image.values_P.clone()

    def loss_sum(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        if len(task.seen) == 2:
            raise TaskError("in the third step")
        return TwoLayers.loss_sum(task, model, batch)

    task.loss_sum = loss_sum  # type: ignore[method-assign]
    with pytest.raises(TaskError, match="third"):
        trained(place, plan(12, 4, local_steps=3, local_learning_rate=2.0**-6))
    assert torch.equal(place.image.values_P, before_P)


def test_local_steps_that_diverge_are_refused_with_a_remedy() -> None:
    place = workplace(TwoLayers(), examples(12))
    with pytest.raises(NonFiniteUpdate) as caught:
        trained(place, plan(12, 1, local_steps=12, local_learning_rate=3e38))
    assert "--local-learning-rate" in caught.value.remedy


def test_each_step_records_its_loss_norm_seconds_and_peak_memory() -> None:
    data = examples(10)
    place = workplace(TwoLayers(), data)
    report = trained(place, plan(10, 4)).report
    summed: list[int] = []
    losses = []
    for step, positions in zip(report.steps, cut(range(10), 4), strict=True):
        summed += positions
        losses.append(step.loss * step.weight)
        norm = float(np.linalg.norm(sums(place, summed).double().numpy()))
        assert (step.num_examples, step.weight) == (len(positions), len(positions))
        assert step.gradient_norm == pytest.approx(norm, rel=10 * 2.0**-23)
        assert step.seconds == len(positions)
        assert step.peak_bytes > 2**20
    assert math.isclose(math.fsum(losses), report.loss_sum, rel_tol=1e-12)
    assert report.seconds == 10


def test_check_works_shows_the_exception_of_a_task_that_fails_on_all() -> None:
    data = examples(3, kinds=[RAISES_FORWARD] * 3)
    with pytest.raises(TaskFailed, match="all of 3 examples failed: ValueError: a value"):
        check_works(plan(3, 1), whole(data, 3), workplace(TwoLayers(), data))


def test_check_works_passes_over_examples_that_fail_where_others_work() -> None:
    data = examples(3, kinds=[RAISES_FORWARD, RAISES_BACKWARD])
    place = workplace(TwoLayers(), data)
    check_works(plan(3, 1), whole(data, 3), place)
    assert not place.accumulator.values_P.any()


def test_check_works_says_when_one_example_does_not_fit() -> None:
    data = examples(3)
    with pytest.raises(OutOfMemory, match="pi: one example alone"):
        check_works(plan(3, 1), whole(data, 3), workplace(TwoLayers(max_micro_batch=0), data))


def test_what_the_exception_of_a_task_says_stays_on_the_device() -> None:
    data = examples(1, kinds=[RAISES_FORWARD])
    with pytest.raises(TaskFailed) as caught:
        check_works(plan(1, 1), whole(data, 1), workplace(TwoLayers(), data))
    assert "a value" in str(caught.value)
    assert "a value" not in "".join(travelling(caught.value))
