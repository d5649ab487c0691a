"""What a task predicts, as rows: its columns, and what is refused."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from headwater.client.adaptation.predictions import (
    BATCH_SIZE,
    Predictor,
    Row,
    write_csv,
    write_json_lines,
)
from headwater.common.errors import TaskError

NUM = 2 * BATCH_SIZE + 5


def examples(number: int = NUM) -> TensorDataset:
    return TensorDataset(torch.arange(number, dtype=torch.float32)[:, None])


class Doubles:
    """Predicts twice the input."""

    def predict(self, model: nn.Module, batch: Any) -> Any:
        return 2 * batch[0][:, 0]


def rows(task: Any, number: int = NUM) -> tuple[list[Row], Predictor]:
    predictor = Predictor(task=task, model=nn.Identity())
    return list(predictor.rows(examples(number))), predictor


def test_there_is_a_row_for_each_example_in_their_order() -> None:
    found, _ = rows(Doubles())
    assert found == [{"example": at, "prediction": 2.0 * at} for at in range(NUM)]


def test_examples_that_have_names_are_told_by_them() -> None:
    named = examples(3)
    named.example_names = ["a.png", "b.png", "c.png"]  # type: ignore[attr-defined]
    task: Any = Doubles()
    found = Predictor(task=task, model=nn.Identity()).rows(named)
    assert [one["example"] for one in found] == ["a.png", "b.png", "c.png"]


def test_a_dict_names_columns_of_any_values() -> None:
    class Named:
        def predict(self, model: nn.Module, batch: Any) -> Any:
            number = len(batch[0])
            return {"name": ["a"] * number, "both": torch.zeros(number, 2)}

    found, _ = rows(Named(), 1)
    assert found == [{"example": 0, "name": "a", "both": [0.0, 0.0]}]


def test_the_predictions_of_a_test_on_devices_serve_too() -> None:
    class Classes:
        def predictions(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
            chances = torch.tensor([[0.25, 0.75], [0.5, 0.5]])[: len(batch[0])]
            return chances, torch.tensor([0, 1])[: len(batch[0])]

    found, _ = rows(Classes(), 2)
    assert found == [
        {"example": 0, "prediction": 1, "probability": 0.75, "label": 0},
        {"example": 1, "prediction": 0, "probability": 0.5, "label": 1},
    ]


def test_probabilities_in_the_shape_of_the_labels_are_of_class_one() -> None:
    class Two:
        def predictions(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
            return torch.tensor([0.25]), torch.tensor([1])

    assert rows(Two(), 1)[0] == [{"example": 0, "prediction": 0, "probability": 0.75, "label": 1}]


def test_examples_on_which_the_task_raises_are_left_out_and_counted() -> None:
    class Raises(Doubles):
        def predict(self, model: nn.Module, batch: Any) -> Any:
            if (batch[0] == 7).any():
                raise ValueError("seven")
            return super().predict(model, batch)

    found, predictor = rows(Raises())
    assert [row["example"] for row in found] == [at for at in range(NUM) if at != 7]
    assert [*predictor.faults] == [7]


def test_a_task_that_says_nothing_is_refused_with_what_to_add() -> None:
    with pytest.raises(TaskError, match="does not say what it predicts") as caught:
        Predictor(task=object(), model=nn.Identity())  # type: ignore[arg-type]
    assert "predict(model, batch)" in caught.value.remedy


@pytest.mark.parametrize(
    "found", [torch.ones(()), torch.ones(1), {}, None, {"example": torch.ones(3)}, "abc"], ids=str
)
def test_what_is_no_column_is_refused(found: Any) -> None:
    class Wrong:
        def predict(self, model: nn.Module, batch: Any) -> Any:
            return found

    with pytest.raises(TaskError, match="a value for each of the 3 examples"):
        rows(Wrong(), 3)


def test_other_columns_in_a_later_batch_are_refused() -> None:
    class Changes:
        def predict(self, model: nn.Module, batch: Any) -> Any:
            return {f"of{len(batch[0])}": batch[0][:, 0]}

    with pytest.raises(TaskError, match="for the examples before"):
        rows(Changes())


def test_csv_and_json_lines_hold_the_same() -> None:
    data = [{"example": 0, "name": "a,b", "both": [1.0, float("nan")], "loss": float("inf")}]
    table, lines = io.StringIO(), io.StringIO()
    assert write_csv(table, iter(data)) == write_json_lines(lines, iter(data)) == 1
    assert table.getvalue() == 'example,name,both,loss\n0,"a,b","[1.0, null]",inf\n'
    assert json.loads(lines.getvalue()) == {
        "example": 0,
        "name": "a,b",
        "both": [1.0, None],
        "loss": None,
    }
