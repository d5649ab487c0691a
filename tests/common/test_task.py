"""Loading a task, and the errors for tasks that break the interface."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from headwater.common.data.batches import batch_of
from headwater.common.errors import (
    EmptyDataset,
    MissingData,
    TaskError,
    UnknownTask,
)
from headwater.common.task import load_task, loss_sum, open_train_examples
from tests.tasks import Given, TwoLayers, examples, squares


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (lambda loss, n: loss, "must return"),
        (lambda loss, n: (loss,), "must return"),
        (lambda loss, n: [loss, n], "must return"),
        (lambda loss, n: (loss.expand(2), n), r"found shape \(2,\)"),
        (lambda loss, n: (loss.reshape(1), n), r"found shape \(1,\)"),
        (lambda loss, n: (loss.item(), n), "found float"),
        (lambda loss, n: (loss, n + 0.5), "whole number"),
        (lambda loss, n: (loss, -n), "whole number"),
        (lambda loss, n: (loss, None), "whole number"),
        (lambda loss, n: (loss, "3"), "whole number"),
        (lambda loss, n: (loss, float("nan")), "whole number"),
        (lambda loss, n: (loss, float("inf")), "whole number"),
        (lambda loss, n: (loss, torch.ones(2)), "whole number"),
        (lambda loss, n: (loss, n, [1.0]), "metric"),
        (lambda loss, n: (loss, n, {"a": torch.ones(2)}), "metric a"),
        (lambda loss, n: (loss, n, {"a": None}), "metric a"),
        (lambda loss, n: (loss, n, {"a": 1, "loss": loss}), "a metric is named loss"),
    ],
)
def test_a_malformed_loss_sum_is_a_task_error(
    answer: Callable[[Tensor, int], Any], match: str
) -> None:
    task = Given(lambda model, batch: answer(*squares(model, batch)))
    data = examples(2)
    with pytest.raises(TaskError, match=match):
        loss_sum(task, task.new_model(), batch_of(task, data, [0, 1]))


@pytest.mark.parametrize("weight", [2, 2.0, torch.tensor(2), torch.tensor([2])])
def test_an_integer_weight_is_accepted_in_any_type(weight: Any) -> None:
    task = Given(lambda model, batch: (squares(model, batch)[0], weight, {"a": torch.tensor(3)}))
    _, total, metrics = loss_sum(task, task.new_model(), batch_of(task, examples(2), [0, 1]))
    assert (total, metrics) == (2, {"a": 3.0})


GOOD_TASK = """
from tests.tasks import TwoLayers

class Good(TwoLayers):
    pass

class NeedsMore(TwoLayers):
    def __init__(self, required):
        pass

class Fails(TwoLayers):
    def __init__(self):
        raise OSError("no such device")

class Unfinished:
    def new_model(self): ...
"""


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    file = tmp_path / "my_task.py"
    file.write_text(GOOD_TASK)
    return file


def test_a_task_is_loaded_by_file_and_class(task_file: Path) -> None:
    assert type(load_task(f"{task_file}:Good")).__name__ == "Good"


@pytest.mark.parametrize("name", ["NeedsMore", "Fails"])
def test_a_class_that_cannot_be_constructed_is_a_task_error(task_file: Path, name: str) -> None:
    with pytest.raises(TaskError, match=name):
        load_task(f"{task_file}:{name}")


def test_missing_methods_are_named(task_file: Path) -> None:
    with pytest.raises(TaskError, match="no method train_examples, loss_sum"):
        load_task(f"{task_file}:Unfinished")


def test_a_file_that_is_not_python_is_an_unknown_task(tmp_path: Path) -> None:
    file = tmp_path / "task.txt"
    file.write_text(GOOD_TASK)
    with pytest.raises(UnknownTask, match="is not a Python file"):
        load_task(f"{file}:Good")


def test_a_device_without_examples_is_refused() -> None:
    class Empty(TwoLayers):
        def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
            return examples(0)

    with pytest.raises(EmptyDataset, match="as part 3 of 4"):
        open_train_examples(Empty(), data=None, part=3, num_parts=4)


def test_data_that_cannot_be_read_is_missing_data() -> None:
    class Absent(TwoLayers):
        def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
            raise FileNotFoundError(data)

    with pytest.raises(MissingData):
        open_train_examples(Absent(), data=Path("nowhere"), part=0, num_parts=1)
