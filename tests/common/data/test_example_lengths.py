"""How long examples are, and micro-batches of like lengths within a number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Subset, TensorDataset

from headwater.client.training.sampler import split
from headwater.common.data.example_lengths import (
    ExampleLengths,
    LengthCost,
    length_of,
    length_record,
)
from headwater.common.errors import TaskError, TaskFailed
from headwater.common.task import Examples
from tests.laws.architectures import Mlp, Ragged

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


class Told(Mlp):
    """A task that tells its lengths."""

    def __init__(self, told: Any) -> None:
        self.told = told

    def lengths(self, examples: Examples) -> Any:
        return self.told() if callable(self.told) else self.told


def lengths_of(told: Sequence[int]) -> ExampleLengths:
    examples: Examples = list(told)
    record = length_record(Told(told), examples)
    assert record is not None
    return ExampleLengths(examples, record)


@given(LENGTHS, st.integers(1, 12), st.none() | st.integers(1, 500), st.data())
def test_a_cut_has_every_example_once_within_its_tokens_or_alone(
    told: list[int], size: int, max_tokens: int | None, data: st.DataObject
) -> None:
    lengths = lengths_of(told)
    positions = data.draw(st.permutations(range(len(told))))
    groups = lengths.cut(positions, size, max_tokens=max_tokens)
    assert sorted(p for group in groups for p in group) == sorted(positions)
    most = min(size * lengths.usual, max_tokens or size * lengths.usual)
    assert all(lengths.tokens(group) <= most or len(group) == 1 for group in groups)


@given(LENGTHS, st.integers(1, 12))
def test_two_micro_batches_overlap_in_no_more_than_one_length(told: list[int], size: int) -> None:
    groups = lengths_of(told).cut(range(len(told)), size)
    spans = sorted((min(told[p] for p in g), max(told[p] for p in g)) for g in groups)
    assert all(low[1] <= high[0] for low, high in pairwise(spans))


@given(LENGTHS, st.integers(1, 12), st.data())
def test_micro_batches_come_in_the_order_of_the_first_example_in_each(
    told: list[int], size: int, data: st.DataObject
) -> None:
    positions = data.draw(st.permutations(range(len(told))))
    groups = lengths_of(told).cut(positions, size)
    firsts = [positions.index(group[0]) for group in groups]
    assert firsts == sorted(firsts)
    assert all(list(group) == sorted(group, key=positions.index) for group in groups)


@given(st.integers(1, 40), st.integers(1, 999), st.integers(1, 50))
def test_examples_of_one_length_are_cut_in_their_order(number: int, length: int, size: int) -> None:
    lengths = lengths_of([length] * number)
    assert lengths.cut(range(number), size) == split(range(number), size)
    assert lengths.size(range(number)) == lengths.load(range(number)) == number


def test_like_lengths_together_leave_a_fraction_of_the_padding() -> None:
    told = np.random.default_rng(0).lognormal(4.0, 1.0, size=256).astype(int).tolist()
    lengths = lengths_of(told)
    own = sum(lengths[p] for p in range(256))
    as_they_come = sum(map(lengths.tokens, split(range(256), 16)))
    assert as_they_come > 2 * own
    assert sum(map(lengths.tokens, lengths.cut(range(256), 16))) < 1.25 * own


@pytest.mark.parametrize(
    ("example", "length"),
    [
        (torch.zeros(7), 7),
        ((torch.zeros(7), 3), 7),
        ({"image": np.zeros((2, 3)), "name": "a"}, 6),
        ("words", 5),
        ([1, 2, 3], 3),
        (([1, 2], [1, 2, 3, 4]), 4),
        ((), 1),
        ([np.int64(7), np.int64(2)], 2),
        (object(), 1),
    ],
)
def test_the_length_of_an_example_is_that_of_its_largest_part(example: Any, length: int) -> None:
    assert length_of(example) == length


def test_only_a_task_that_collates_or_tells_lengths_has_lengths() -> None:
    plain = Mlp().train_examples(data=None, part=0, num_parts=1)
    assert length_record(Mlp(), plain) is None
    ragged = Ragged().train_examples(data=None, part=0, num_parts=1)
    record = length_record(Ragged(), ragged)
    assert record is not None
    lengths = ExampleLengths(ragged, record)
    assert [lengths[p] for p in range(len(ragged))] == [len(text) for text in ragged]  # type: ignore[attr-defined]


def test_a_view_of_a_data_set_has_the_lengths_of_its_own_examples() -> None:
    examples = list(range(6))
    record = length_record(Told([1, 2, 3, 4, 5, 6]), Subset(examples, [5, 3]))  # type: ignore[arg-type]
    assert record is not None
    view = ExampleLengths(Subset(examples, [5, 3]), record)  # type: ignore[arg-type]
    assert [view[0], view[1]] == [6, 4]


def test_an_example_that_cannot_be_read_counts_as_one_token() -> None:
    class Broken(list[Any]):
        def __getitem__(self, position: Any) -> Any:
            if position == 1:
                raise OSError("gone")
            return torch.zeros(5)

    examples = Broken([0, 0, 0])
    record = length_record(Ragged(), examples)
    assert record is not None
    lengths = ExampleLengths(examples, record)
    assert [lengths[0], lengths[1], lengths[2]] == [5, 1, 5]


@pytest.mark.parametrize("told", [[1, 2], [1.5] * 3, [-1, 1, 1], [[1], [2], [3]]])
def test_lengths_that_are_no_whole_number_for_each_example_are_an_error(told: Any) -> None:
    with pytest.raises(TaskError, match="for each of 3"):
        length_record(Told(told), TensorDataset(torch.zeros(3)))


def test_lengths_that_raise_are_the_task_s_failure() -> None:
    def raises() -> None:
        raise KeyError("tokens")

    with pytest.raises(TaskFailed, match="KeyError"):
        length_record(Told(raises), TensorDataset(torch.zeros(3)))


# What an example costs by its length.


@given(st.floats(0, 1e6), st.floats(1, 1e5), st.floats(0, 1e3), st.integers(2, 40))
def test_three_lengths_give_the_curve_and_its_extrapolation(
    fixed: float, each: float, square: float, usual: int
) -> None:
    def cost(length: int) -> float:
        return fixed + each * length + square * length**2

    curve = LengthCost.through({t: cost(t) for t in (1, usual, 4 * usual)})
    assert curve.at(50 * usual) == pytest.approx(cost(50 * usual), rel=1e-3)


def test_two_lengths_tell_a_line_from_a_square() -> None:
    line = LengthCost.through({10: 1000.0 + 10, 40: 4000.0 + 10})
    assert line.at(500) == pytest.approx(50_000, rel=0.01)
    square = LengthCost.through({10: 1e3 + 1e2, 40: 4e3 + 1.6e3})
    assert square.at(500) == pytest.approx(5e4 + 2.5e5)


def test_one_length_counts_longer_examples_as_quadratic() -> None:
    guess = LengthCost.through({10: 100.0})
    assert guess.at(5) == 50
    assert guess.at(10) == 100
    assert guess.at(100) == 100 * 10**2
