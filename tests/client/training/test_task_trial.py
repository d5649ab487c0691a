"""Trial passes over a task's first examples."""

from __future__ import annotations

import pytest

from headwater.client.training.task_trial import check_runs
from headwater.common.errors import OutOfMemory, TaskFailed, travelling
from tests.tasks import RAISES_BACKWARD, RAISES_FORWARD, TwoLayers, examples
from tests.training_contexts import training_context


def test_the_exception_of_a_task_that_fails_on_all_examples_is_shown() -> None:
    data = examples(3, kinds=[RAISES_FORWARD] * 3)
    with pytest.raises(TaskFailed, match="all of 3 examples failed: ValueError: a value"):
        check_runs(training_context(TwoLayers(), data))


def test_failing_examples_are_skipped_if_another_succeeds() -> None:
    data = examples(3, kinds=[RAISES_FORWARD, RAISES_BACKWARD])
    context = training_context(TwoLayers(), data)
    check_runs(context)
    assert not context.accumulator.values_P.any()


def test_one_example_that_does_not_fit_is_out_of_memory() -> None:
    data = examples(3)
    with pytest.raises(OutOfMemory, match="pi: one example alone"):
        check_runs(training_context(TwoLayers(max_micro_batch=0), data))


def test_the_text_of_a_task_s_exception_stays_on_the_device() -> None:
    data = examples(1, kinds=[RAISES_FORWARD])
    with pytest.raises(TaskFailed) as caught:
        check_runs(training_context(TwoLayers(), data))
    assert "a value" in str(caught.value)
    assert "a value" not in "".join(travelling(caught.value))
