"""The check on tasks as users write them: it passes what is right, and names what is wrong."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from headwater.common.additivity.example_cache import same
from headwater.common.additivity.single_examples import NUM_COMPARED
from headwater.common.errors import TaskError, TaskFailed, TaskNotAdditive
from headwater.common.model.parameters import build_model
from headwater.common.task import load_task
from tests.additivity import check_additive

PICTURES, REGRESSION = "tests/stranger_tasks/pictures.py", "tests/stranger_tasks/regression.py"


def checked(spec: str) -> tuple[str, ...]:
    task = load_task(spec)
    model = build_model(task, seed=0, batch_norm="group").model
    return check_additive(task, model, task.train_examples(data=None, part=0, num_parts=1))


def test_random_augmentation_passes_and_is_named_as_information() -> None:
    (note,) = checked(f"{PICTURES}:Augmented")
    assert "example 0 differs each time it is read" in note


def test_a_collate_that_draws_random_numbers_passes_and_is_named() -> None:
    notes = checked(f"{PICTURES}:MaskedPixels")
    assert any("collate draws random numbers" in note for note in notes)


def test_a_data_set_that_answers_alike_gets_no_note() -> None:
    assert checked(f"{REGRESSION}:Regression") == ()


def _torch_warns() -> AbstractContextManager[Any]:
    return pytest.warns(UserWarning, match="target size")


@pytest.mark.parametrize(
    ("kind", "shapes"),
    [
        ("WrongBroadcast", "sub of the shapes (2, 1) and (2,) gives (2, 2)"),
        ("WrongBroadcastInTorch", "mse_loss of the shapes (2, 1) and (2,) gives (2, 2)"),
        ("WrongBroadcastOfMean", "mse_loss of the shapes (2, 1) and (2,) gives (2, 2)"),
    ],
)
def test_a_wrong_broadcast_is_named_with_shapes_line_and_remedy(kind: str, shapes: str) -> None:
    with (
        _torch_warns() if "mse" in shapes else nullcontext(),
        pytest.raises(TaskNotAdditive) as caught,
    ):
        checked(f"{REGRESSION}:{kind}")
    assert shapes in caught.value.message
    assert "every example is paired with every other" in caught.value.message
    assert 'regression.py", line' in caught.value.message
    assert "squeeze(1)" in caught.value.remedy


def test_an_axis_that_is_as_long_as_the_batch_by_chance_is_no_wrong_broadcast() -> None:
    with pytest.raises(TaskNotAdditive) as caught:
        checked(f"{REGRESSION}:MaskAsLongAsTheBatch")
    assert "every example is paired" not in caught.value.message


@pytest.mark.parametrize("kind", ["CallsBackward", "CallsBackwardOnce"])
def test_a_loss_that_takes_its_gradients_itself_is_named(kind: str) -> None:
    with pytest.raises(TaskError, match="called backward") as caught:
        checked(f"{REGRESSION}:{kind}")
    assert "leave backward()" in caught.value.remedy


def test_a_loss_that_draws_in_evaluation_mode_too_passes_with_a_note() -> None:
    (note,) = checked(f"{REGRESSION}:Diffusion")
    assert "the loss draws random numbers in evaluation mode too" in note


def test_a_mean_is_found_in_a_loss_that_draws_in_evaluation_mode_too() -> None:
    with pytest.raises(TaskNotAdditive, match="probably a mean is returned"):
        checked(f"{REGRESSION}:MeanDiffusion")


def test_examples_of_unequal_shapes_without_a_collate_are_named() -> None:
    with pytest.raises(TaskFailed, match="examples that work one by one fail in one batch") as one:
        checked(f"{REGRESSION}:Ragged")
    assert "collate" in one.value.remedy


def test_examples_in_one_nested_tensor_pass() -> None:
    assert checked(f"{REGRESSION}:Nested") == ()


def test_a_nan_is_the_same_as_a_nan_and_containers_are_compared_within() -> None:
    one = {"x": [torch.tensor([1.0, torch.nan]), float("nan")], "y": (None, "text")}
    other = {"x": [torch.tensor([1.0, torch.nan]), float("nan")], "y": (None, "text")}
    assert same(one, other)
    assert not same(one, {**other, "y": (None, "texts")})
    assert not same(torch.ones(2), torch.ones(3))


def test_each_example_is_read_once_and_one_again_to_see_whether_it_differs() -> None:
    task = load_task(f"{PICTURES}:Augmented")
    examples = task.train_examples(data=None, part=0, num_parts=1)
    model = build_model(task, seed=0, batch_norm="group").model
    check_additive(task, model, examples)
    assert getattr(examples, "num_fetched") == NUM_COMPARED + 1  # noqa: B009 - not of Examples
