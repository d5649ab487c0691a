"""Batches of subset views: the right examples, in one indexing operation where possible."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from headwater.common.data.batches import SubsetView, batch_of, dataset_tensors
from headwater.common.task import Examples
from tests.tasks import TwoLayers


class OneByOne(Dataset[Any]):
    """Not a ``TensorDataset``: each example is fetched by a Python integer."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, position: int) -> int:
        assert type(position) is int
        return 100 + position


class Fetching(OneByOne):
    def __getitems__(self, positions: list[int]) -> list[int]:
        assert all(type(position) is int for position in positions)
        return [200 + position for position in positions]


@pytest.mark.parametrize("whole", [OneByOne(), Fetching(), list(range(24))])
def test_a_subset_view_fetches_as_the_whole_data_set_does(whole: Examples) -> None:
    rows = SubsetView(whole, np.array([5, 3, 23]))
    expected = [whole[5], whole[23]]
    if isinstance(whole, Fetching):
        expected = [205, 223]
    assert batch_of(TwoLayers(), rows, [0, 2]).tolist() == expected
    assert batch_of(TwoLayers(), Subset(rows, [2, 0]), [1, 0]).tolist() == expected  # type: ignore[arg-type]
    assert [rows[0], rows[2]] == [whole[5], whole[23]]
    assert len(rows) == 3


class Scaled(TensorDataset):
    def __getitem__(self, position: int) -> tuple[Tensor, ...]:
        first, second = super().__getitem__(position)  # type: ignore[no-untyped-call]
        return first / 10, second


class ScaledTogether(TensorDataset):
    def __getitems__(self, positions: list[int]) -> list[Any]:
        return [(self.tensors[0][at] / 10, self.tensors[1][at]) for at in positions]


@pytest.mark.parametrize("kind", [Scaled, ScaledTogether])
def test_what_a_tensor_data_set_does_as_it_reads_is_done(kind: type[TensorDataset]) -> None:
    """As torch's own loader does, in a view, too."""
    whole = kind(torch.arange(24.0), torch.arange(24))
    expected = next(iter(DataLoader(whole, batch_size=24)))
    for rows in (whole, SubsetView(whole, np.arange(24))):
        assert dataset_tensors(TwoLayers(), rows) is None
        found = batch_of(TwoLayers(), rows, range(24))
        assert [one.tolist() for one in found] == [one.tolist() for one in expected]


def test_a_batch_of_a_tensor_data_set_is_indexed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(*_: Any) -> None:
        raise AssertionError("an example was fetched alone")

    monkeypatch.setattr(TensorDataset, "__getitem__", alone)
    whole = TensorDataset(torch.arange(24), torch.arange(24) * 10)
    rows = SubsetView(SubsetView(whole, np.arange(23, -1, -1)), np.array([4, 2, 0]))
    first, second = batch_of(TwoLayers(), rows, (2, 1))
    assert first.tolist() == [23, 21]
    assert second.tolist() == [230, 210]


def test_the_task_s_collate_gets_the_examples_of_a_view() -> None:
    class Collating(TwoLayers):
        def collate(self, examples: list[Any]) -> list[Any]:
            return examples

    rows = SubsetView(OneByOne(), np.array([7, 1]))
    assert batch_of(Collating(), rows, range(2)) == [107, 101]


def test_a_plain_list_of_examples_is_collated() -> None:
    rows = [(torch.tensor([float(p)]), p) for p in range(5)]
    values, numbers = batch_of(TwoLayers(), rows, [3, 1])
    assert torch.equal(values, torch.tensor([[3.0], [1.0]]))
    assert numbers.tolist() == [3, 1]


def test_a_collate_may_pop_from_the_examples_that_the_data_set_keeps() -> None:
    class Popping(TwoLayers):
        def collate(self, examples: Any) -> Any:
            return [(one.pop("x"), one.pop("y")) for one in examples]

    kept: Any = [{"x": number, "y": -number} for number in range(3)]
    first = batch_of(Popping(), kept, (0, 2))
    assert first == batch_of(Popping(), kept, (0, 2)) == [(0, 0), (2, -2)]


class Frames(Dataset[Any]):
    """Each read fills the same memory, as a video's decoder does."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer

    def __len__(self) -> int:
        return 5

    def __getitem__(self, position: int) -> Any:
        self.buffer[:] = position
        return self.buffer, position


@pytest.mark.parametrize("buffer", [torch.zeros(2), np.zeros(2, dtype=np.float32)])
def test_examples_that_are_read_into_one_memory_are_all_in_their_batch(buffer: Any) -> None:
    values, numbers = batch_of(TwoLayers(), Frames(buffer), [3, 1, 4])
    assert values.tolist() == [[3, 3], [1, 1], [4, 4]]
    assert numbers.tolist() == [3, 1, 4]
