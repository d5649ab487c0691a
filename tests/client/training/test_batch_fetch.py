"""Batches fetched together equal batches fetched alone, to the bit and in memory alignment."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import TensorDataset

from headwater.client.training.batch_fetch import ALIGNED_BYTES, MAX_BYTES, Batches
from headwater.client.training.sampler import split
from headwater.common.data.batches import SubsetView, batch_of
from headwater.common.task import Task
from tests.tasks import TwoLayers


def data(num_examples: int, num_features: int) -> TensorDataset:
    values = torch.arange(num_examples * num_features, dtype=torch.float32)
    return TensorDataset(values.view(num_examples, -1), torch.arange(num_examples))


class Counting(TensorDataset):
    """Counts how often its tensors are read."""

    num_asked = 0

    @property
    def tensors(self) -> Any:
        self.num_asked += 1
        return self._tensors

    @tensors.setter
    def tensors(self, found: Any) -> None:
        self._tensors = found


def assert_same(batch: list[Tensor], expected: list[Tensor]) -> None:
    for rows, others in zip(batch, expected, strict=True):
        assert torch.equal(rows, others)
        assert rows.stride() == others.stride()
        if rows.is_floating_point():
            assert rows.data_ptr() % ALIGNED_BYTES == others.data_ptr() % ALIGNED_BYTES == 0


@given(st.integers(1, 40), st.integers(1, 20), st.integers(1, 9), st.integers(0, 2**31))
def test_every_batch_equals_one_fetched_alone(
    num_examples: int, num_features: int, size: int, seed: int
) -> None:
    examples, task = data(num_examples, num_features), TwoLayers()
    window = tuple(np.random.default_rng(seed).permutation(num_examples).tolist())
    batches = Batches(task, examples)
    batches.begin(window)
    for positions in split(window, size):
        assert_same(batches.of(positions), batch_of(task, examples, positions))


def test_batches_out_of_order_are_the_same() -> None:
    examples, task = data(12, 16), TwoLayers()
    batches = Batches(task, examples)
    batches.begin((5, 3, 1, 0, 2, 4))
    for positions in ((5, 3), (3,), (1, 0), (5, 3), (2, 4), (11, 7)):
        assert_same(batches.of(positions), batch_of(task, examples, positions))


def test_without_a_window_each_batch_is_fetched_alone() -> None:
    examples, task = data(5, 3), TwoLayers()
    assert_same(Batches(task, examples).of((4, 2)), batch_of(task, examples, (4, 2)))


def test_a_restarted_window_reuses_the_fetched_rows() -> None:
    whole = Counting(*data(8, 16).tensors)
    examples = SubsetView(whole, np.arange(7, -1, -1))
    batches = Batches(TwoLayers(), examples)
    window = (0, 2, 4, 6)
    batches.begin(window)
    first = batches.of((0, 2))
    num_asked = whole.num_asked
    batches.of((4, 6))
    batches.begin(window)
    assert_same(batches.of((0, 2)), first)
    assert whole.num_asked == num_asked


def test_a_large_window_is_not_fetched_at_once() -> None:
    each = MAX_BYTES // 4 // 4  # a window of four fills the limit, and the labels pass it
    whole = Counting(torch.ones(8, each), torch.arange(8))
    batches = Batches(TwoLayers(), whole)
    batches.begin((0, 1, 2, 3))
    batches.of((0, 1))
    num_asked = whole.num_asked
    batches.of((2, 3))
    assert whole.num_asked > num_asked


class Collating(TwoLayers):
    """Collates by itself."""

    def collate(self, examples: list[Any]) -> int:
        return len(examples)


@pytest.mark.parametrize(
    ("task", "examples"),
    [(Collating(), data(6, 2)), (TwoLayers(), [(torch.ones(2), 1), (torch.zeros(2), 0)])],
)
def test_examples_that_are_not_tensor_rows_are_fetched_for_each_batch(
    task: Task, examples: Any
) -> None:
    batches = Batches(task, examples)
    batches.begin((1, 0))
    for positions in ((1,), (0,)):
        found, expected = batches.of(positions), batch_of(task, examples, positions)
        assert repr(found) == repr(expected)
