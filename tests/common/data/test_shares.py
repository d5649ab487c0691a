"""A device's share is a view of the whole: the right rows, opened once, taken at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from headwater.common.data.batches import SubsetView, batch_of
from headwater.common.data.partition_spec import Rule
from headwater.common.data.shares import ClientDatasets
from headwater.common.errors import EmptyDataset, MissingColumn, NoSuchPartition
from headwater.common.task import Examples
from tests.tasks import TwoLayers, examples

IID = Rule(kind="iid", seed=1)


class Counted(TwoLayers):
    """Counts how often its data are opened, and as which part."""

    def __init__(self, num_examples: int = 24) -> None:
        super().__init__()
        self.num_examples = num_examples
        self.opened: list[tuple[Path | None, int, int]] = []

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        self.opened.append((data, part, num_parts))
        return examples(self.num_examples, seed=part)


class OneByOne(Dataset[Any]):
    """Not a ``TensorDataset``: examples are fetched by a Python number each."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, position: int) -> int:
        assert type(position) is int
        return 100 + position


class Fetching(OneByOne):
    def __getitems__(self, positions: list[int]) -> list[int]:
        assert all(type(position) is int for position in positions)
        return [200 + position for position in positions]


def test_the_whole_is_opened_once_for_all_devices() -> None:
    task = Counted()
    shares = ClientDatasets(task)
    for part in range(5):
        shares.of(IID, data=Path("rows"), part=part, num_parts=5)
    assert task.opened == [(Path("rows"), 0, 1)]


def test_the_shares_of_all_devices_are_the_whole() -> None:
    task = Counted()
    shares = ClientDatasets(task)
    held = [shares.of(IID, data=None, part=part, num_parts=5) for part in range(5)]
    rows = [tuple(map(float, (*inputs, target))) for share in held for inputs, target, _ in
            (share[position] for position in range(len(share)))]  # fmt: skip
    whole = task.train_examples(data=None, part=0, num_parts=1)
    expected = [
        tuple(map(float, (*whole[position][0], whole[position][1])))
        for position in range(len(whole))
    ]
    assert sorted(rows) == sorted(expected)


def test_without_a_rule_the_task_splits_its_own() -> None:
    task = Counted()
    found = ClientDatasets(task).of(None, data=None, part=3, num_parts=5)
    assert isinstance(found, TensorDataset)
    assert task.opened == [(None, 3, 5)]


def test_what_is_wrong_is_named() -> None:
    for part in (-1, 2):
        with pytest.raises(NoSuchPartition, match="parts count from 0"):
            ClientDatasets(Counted()).of(IID, data=None, part=part, num_parts=2)
    with pytest.raises(NoSuchPartition, match=r"24 examples .* 25 devices"):
        ClientDatasets(Counted()).of(IID, data=None, part=0, num_parts=25)
    with pytest.raises(MissingColumn, match="no column 'author'"):
        ClientDatasets(Counted()).of(
            Rule(kind="column", column="author"), data=None, part=0, num_parts=2
        )
    with pytest.raises(EmptyDataset):
        ClientDatasets(Counted(0)).of(IID, data=None, part=0, num_parts=1)


@pytest.mark.parametrize("whole", [OneByOne(), Fetching(), list(range(24))])
def test_rows_are_fetched_as_the_whole_fetches(whole: Examples) -> None:
    rows = SubsetView(whole, np.array([5, 3, 23]))
    expected = [whole[5], whole[23]]
    if isinstance(whole, Fetching):
        expected = [205, 223]
    assert batch_of(TwoLayers(), rows, [0, 2]).tolist() == expected
    assert batch_of(TwoLayers(), Subset(rows, [2, 0]), [1, 0]).tolist() == expected  # type: ignore[arg-type]
    assert [rows[0], rows[2]] == [whole[5], whole[23]]
    assert len(rows) == 3


def test_rows_of_a_tensor_data_set_are_taken_at_once() -> None:
    class NotOneByOne(TensorDataset):
        def __getitem__(self, position: Any) -> Any:
            raise AssertionError("an example was fetched alone")

    whole = NotOneByOne(torch.arange(24), torch.arange(24) * 10)
    rows = SubsetView(SubsetView(whole, np.arange(23, -1, -1)), np.array([4, 2, 0]))
    first, second = batch_of(TwoLayers(), rows, (2, 1))
    assert first.tolist() == [23, 21]
    assert second.tolist() == [230, 210]


def test_a_collate_of_the_task_gets_the_rows() -> None:
    class Collating(TwoLayers):
        def collate(self, examples: list[Any]) -> list[Any]:
            return examples

    rows = SubsetView(OneByOne(), np.array([7, 1]))
    assert batch_of(Collating(), rows, range(2)) == [107, 101]


def test_a_share_is_a_view_of_what_was_dealt_out() -> None:
    shares = ClientDatasets(Counted())
    first, again = (shares.of(IID, data=None, part=1, num_parts=3) for _ in range(2))
    assert isinstance(first, SubsetView)
    assert isinstance(again, SubsetView)
    assert np.shares_memory(first.positions, again.positions)
