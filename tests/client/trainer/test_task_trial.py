"""Trial passes over a task's first examples."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from headwater.client.memory.peak_model import ProcessMemory
from headwater.client.trainer import task_trial
from headwater.client.trainer.task_trial import (
    CheckReport,
    PassedExample,
    check_task,
    first_examples,
)
from headwater.client.trainer.trainer import Trainer
from headwater.client.training.context import TrainingContext
from headwater.client.training.gradient_pass import forward
from headwater.common.additivity.sums import Sums
from headwater.common.errors import (
    BuffersChanged,
    NoFiniteExample,
    OutOfMemory,
    TaskFailed,
    TaskNotAdditive,
    travelling,
)
from tests.tasks import NAN_LOSS, RAISES_BACKWARD, RAISES_FORWARD, TwoLayers, examples
from tests.training_contexts import plan, sum_gradients, training_context, whole


def test_the_exception_of_a_task_that_fails_on_all_examples_is_shown() -> None:
    data = examples(3, kinds=[RAISES_FORWARD] * 3)
    with pytest.raises(TaskFailed, match="all of 3 examples failed: ValueError: a value"):
        check_task(training_context(TwoLayers(), data))


def test_failing_examples_are_skipped_if_another_succeeds() -> None:
    data = examples(3, kinds=[RAISES_FORWARD, RAISES_BACKWARD])
    context = training_context(TwoLayers(), data)
    check_task(context)
    assert not context.accumulator.values_P.any()


def test_one_example_that_does_not_fit_is_out_of_memory() -> None:
    data = examples(3)
    with pytest.raises(OutOfMemory, match="pi: one example alone"):
        check_task(training_context(TwoLayers(max_micro_batch=0), data))


def test_the_text_of_a_task_s_exception_stays_on_the_device() -> None:
    data = examples(1, kinds=[RAISES_FORWARD])
    with pytest.raises(TaskFailed) as caught:
        check_task(training_context(TwoLayers(), data))
    assert "a value" in str(caught.value)
    assert "a value" not in "".join(travelling(caught.value))


GAPS, PICTURES = "tests/stranger_tasks/csv_with_gaps.py", "tests/stranger_tasks/pictures.py"


def checked(spec: str) -> CheckReport:
    trainer = Trainer(spec, batch_norm="group", check_task=False)
    return trainer.check(trainer.task.train_examples(data=None, part=0, num_parts=1), "pi")


def test_the_report_counts_the_unusable_rows_of_all_data_with_positions_and_reasons() -> None:
    left_out = checked(f"{GAPS}:Gaps").left_out
    assert left_out is not None
    assert left_out.splitlines() == [
        "5 of 40 examples cannot be trained on and will be left out",
        "  4: its input has a NaN (position 0, 10, 20, 30)",
        "  1: its target has a NaN (position 5)",
    ]


def test_data_without_a_finite_example_is_an_error_by_name() -> None:
    with pytest.raises(NoFiniteExample, match="none of 40 examples has a finite loss") as caught:
        checked(f"{GAPS}:Empty")
    assert "36: its target has a NaN (position 1, 2, 3, 4, 5, ...)" in caught.value.message


def test_a_row_that_raises_is_reported_with_the_user_s_own_line() -> None:
    left_out = checked(f"{GAPS}:Words").left_out
    assert left_out is not None
    assert "1: it raised ValueError (position 7)" in left_out
    assert "cells = [float(cell)" in left_out


def test_a_task_whose_first_examples_have_no_weight_is_noted() -> None:
    class Ignored(TwoLayers):
        def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
            return 0 * super().loss_sum(model, batch)[0], 0

    for task, is_noted in ((Ignored(), True), (TwoLayers(), False)):
        notes = check_task(training_context(task, examples(8))).notes
        assert any("has a weight" in note for note in notes) == is_noted


def test_a_mean_metric_is_named_with_its_remedy_though_it_is_zero_for_a_few_examples() -> None:
    with pytest.raises(TaskNotAdditive, match=r"the metric accuracy of .*: probably a mean") as one:
        checked(f"{PICTURES}:MeanAccuracy")
    assert "return the metric's sum" in one.value.remedy


def test_random_augmentation_is_a_note_of_the_report() -> None:
    assert any("differs each time" in note for note in checked(f"{PICTURES}:Augmented").notes)


def test_good_examples_behind_sixteen_bad_ones_are_compared() -> None:
    class Mean(TwoLayers):
        def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
            loss, weight = super().loss_sum(model, batch)
            return loss / weight, weight

    context = training_context(Mean(), examples(24, kinds=[NAN_LOSS] * 20))
    with pytest.raises(TaskNotAdditive, match="probably a mean"):
        check_task(context)


def test_without_room_for_two_examples_their_gradients_are_not_compared_as_a_note_says() -> None:
    memory = ProcessMemory(lambda: 1)
    report = check_task(training_context(TwoLayers(), examples(8), memory=memory))
    assert any("predicted not to fit in memory" in note for note in report.notes)


def test_a_slow_model_passes_once_backward_and_three_examples_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed: list[tuple[bool, int]] = []

    class Noted(TwoLayers):
        def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
            passed.append((torch.is_grad_enabled(), len(batch[0])))
            return super().loss_sum(model, batch)

    monkeypatch.setattr(task_trial, "MAX_SECONDS", 0.0)
    report = check_task(training_context(Noted(), examples(8)))
    assert passed == [(True, 1), (False, 1), (False, 2)]
    assert report.num_seen == 2
    assert any("were not compared" in note for note in report.notes)


def slow_pass(context: TrainingContext, position: int) -> PassedExample:
    loss, weight, metrics = forward(task_trial.PLAN, first_examples(context), (position,), context)
    sums = Sums(loss.item(), weight, metrics)
    return PassedExample(position=position, sums=sums, seconds=task_trial.MAX_SECONDS + 1.0)


def test_an_example_of_a_slow_model_that_passed_does_not_pass_again() -> None:
    passed: list[tuple[bool, int]] = []

    class Noted(TwoLayers):
        def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
            passed.append((torch.is_grad_enabled(), len(batch[0])))
            return super().loss_sum(model, batch)

    context = training_context(Noted(), examples(8))
    before = slow_pass(context, 5)
    passed.clear()
    report = check_task(context, passed=before)
    assert passed == [(False, 1), (False, 2)]
    assert report.num_seen == 2
    assert any("were not compared" in note for note in report.notes)


@pytest.mark.parametrize("has_dropout", [False, True])
def test_an_example_that_differs_each_time_passes_again(has_dropout: bool) -> None:
    class Noise(Dataset[tuple[Tensor, ...]]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, position: int) -> tuple[Tensor, ...]:
            inputs, target, kind = data[position]
            return (inputs if has_dropout else torch.randn(inputs.shape)), target, kind

    class Dropping(TwoLayers):
        def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
            drops = has_dropout and model.training
            inputs = torch.nn.functional.dropout(batch[0], 0.5, training=drops)
            return super().loss_sum(model, [inputs, *batch[1:]])

    data = examples(8)
    context = training_context(Dropping(), Noise())  # type: ignore[arg-type]
    report = check_task(context, passed=slow_pass(context, 0))
    assert not any("draws random numbers" in note for note in report.notes)


def test_a_buffer_that_a_forward_pass_changes_is_found_without_a_backward_pass() -> None:
    class Counting(TwoLayers):
        def new_model(self) -> nn.Module:
            model = super().new_model()
            model.register_buffer("calls", torch.zeros(1))
            return model

        def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
            model.get_buffer("calls").add_(1)
            return super().loss_sum(model, batch)

    context = training_context(Counting(), examples(8))
    with pytest.raises(BuffersChanged, match="changed the buffer calls"):
        check_task(context, passed=slow_pass(context, 0))


def test_a_mean_of_a_slow_model_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mean(TwoLayers):
        def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
            loss, weight = super().loss_sum(model, batch)
            return loss / weight, weight

    context = training_context(Mean(), examples(8))
    with pytest.raises(TaskNotAdditive, match="probably a mean"):
        check_task(context, passed=slow_pass(context, 3))
    monkeypatch.setattr(task_trial, "MAX_SECONDS", 0.0)
    with pytest.raises(TaskNotAdditive, match="probably a mean"):
        check_task(context)


def test_augmentation_from_torch_s_generator_is_the_same_when_a_window_is_summed_again() -> None:
    class Noise(Dataset[tuple[Tensor, ...]]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, position: int) -> tuple[Tensor, ...]:
            inputs, target, kind = data[position]
            return inputs + torch.randn(inputs.shape), target, kind

    data = examples(8)
    context = training_context(TwoLayers(), Noise())  # type: ignore[arg-type]
    vectors = [
        sum_gradients(plan(8, 4), whole(data, 8), context).values_P.clone() for _ in range(2)
    ]
    assert vectors[0].any()
    assert torch.equal(*vectors)
