"""Trying a task on real examples, one by one, before anything is summed."""

from __future__ import annotations

import pytest

from headwater.client.training.gradient_pass import check_works
from headwater.common.errors import OutOfMemory, TaskFailed, travelling
from tests.tasks import RAISES_BACKWARD, RAISES_FORWARD, TwoLayers, examples
from tests.workplaces import plan, whole, workplace


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
