"""Where a column is looked for, and what is wrong with one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from headwater.common.data.columns import column_of
from headwater.common.errors import MissingColumn
from headwater.common.task import Examples
from tests.tasks import TwoLayers, examples

LABELS = [3, 1, 3, 7]


class WithColumns(TwoLayers):
    def __init__(self, told: Any) -> None:
        super().__init__()
        self.told = told

    def columns(self, examples: Examples) -> Any:
        return self.told(examples) if callable(self.told) else self.told


class Pictures(Dataset[int]):
    """A data set like torchvision's: its labels are known without opening an example."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __len__(self) -> int:
        return len(LABELS)

    def __getitem__(self, position: int) -> int:
        raise AssertionError("an example was opened")


class Frame(Pictures):
    """A data set like Hugging Face's."""

    column_names = ("label", "author")

    def __getitem__(self, key: Any) -> Any:
        return {"label": LABELS, "author": ["b", "a", "b", "ü"]}[key]


TENSORS = TensorDataset(torch.zeros(4, 2), torch.tensor(LABELS))
ONE_MORE = TensorDataset(torch.zeros(5), torch.tensor([9, *LABELS]))
FOUND: dict[str, tuple[Any, str]] = {
    "second tensor": (TENSORS, "label"),
    "subset": (Subset(ONE_MORE, range(1, 5)), "label"),
    "joined": (ConcatDataset([Subset(TENSORS, range(2)), Subset(TENSORS, range(2, 4))]), "label"),
    "targets": (Pictures(targets=LABELS), "label"),
    "targets in a column": (Pictures(targets=np.array(LABELS)[:, None]), "label"),
    "labels": (Pictures(labels=torch.tensor(LABELS)), "label"),
    "attribute": (Pictures(author=["b", "a", "b", "c"]), "author"),
    "texts as objects": (
        Pictures(targets=np.array(["b", "a", "b", "c"], dtype=object)),
        "label",
    ),
    "truth values": (Pictures(is_new=torch.tensor(LABELS) == 3), "is_new"),
    "names of columns": (Frame(), "author"),
}  # fmt: skip


@pytest.mark.parametrize("case", FOUND)
def test_the_column_of_a_common_data_set_is_found(case: str) -> None:
    data, name = FOUND[case]
    column = column_of(TwoLayers(), data, name)
    codes = column.codes_E.tolist()
    assert codes[0] == codes[2]
    assert len(codes) == 4
    assert len(column.values_V[column.codes_E]) == 4
    assert column.num_values == len(set(codes)) >= 2


def test_values_are_numbered_in_sorted_order() -> None:
    column = column_of(TwoLayers(), TENSORS, "label")
    assert column.codes_E.tolist() == [1, 0, 1, 2]
    assert column.values_V.tolist() == [1, 3, 7]


def test_a_column_of_the_task_takes_precedence() -> None:
    task = WithColumns(lambda examples: {"label": ["x"] * len(examples)})
    assert column_of(task, TENSORS, "label").values_V.tolist() == ["x"]


def test_a_column_that_the_task_lacks_is_taken_from_the_data_set() -> None:
    task = WithColumns({"author": ["a"] * 4})
    assert column_of(task, TENSORS, "label").num_values == 3


def fails(examples: Examples) -> Any:
    raise KeyError("author")


MISSING: dict[str, tuple[Any, Any, str, str]] = {
    "nowhere": (TwoLayers(), examples(4), "author", "have no column 'author'"),
    "real numbers beside": (TwoLayers(), examples(4), "label", "have no column 'label'"),
    "others are told": (
        WithColumns({"label": LABELS, "region": LABELS}),
        TENSORS,
        "author",
        "no column 'author'; there are label, region",
    ),
    "a method": (TwoLayers(), Pictures(targets=len), "label", "have no column"),
    "too few": (WithColumns({"label": LABELS[:3]}), TENSORS, "label", "each of 4 .* found 3"),
    "two each": (WithColumns({"label": [[1, 2]] * 4}), TENSORS, "label", "found 4 x 2"),
    "one": (WithColumns({"label": np.array(3)}), TENSORS, "label", "found one value"),
    "real numbers": (WithColumns({"label": [0.5] * 4}), TENSORS, "label", "found float64"),
    "no values": (WithColumns({"label": [None] * 4}), TENSORS, "label", "found object: None"),
    "no dict": (WithColumns([LABELS]), TENSORS, "label", "must return a dict .* found list"),
    "an exception": (WithColumns(fails), TENSORS, "label", "columns: KeyError: 'author'"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISSING)
def test_a_missing_or_malformed_column_is_named(case: str) -> None:
    task, data, name, words = MISSING[case]
    with pytest.raises(MissingColumn, match=words) as caught:
        column_of(task, data, name)
    assert "columns(examples)" in caught.value.remedy
