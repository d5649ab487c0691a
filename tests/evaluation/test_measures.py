"""Confusions, calibration and ROC: what they count, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import headwater
from headwater.common.errors import CorruptUpdate, TaskError
from headwater.common.evaluation.measures import Measures, measures_of
from headwater.common.evaluation.terms import PART, from_two, in_two

MODEL = nn.Identity()


class Given:
    """A task whose batches are its predictions."""

    def __init__(self, **evaluated: Any) -> None:
        self.evaluated = evaluated

    def predictions(self, model: nn.Module, batch: Any) -> Any:
        return batch


def counted(task: Given, *batches: tuple[Tensor, Tensor]) -> dict[str, dict[str, Any]]:
    measures = measures_of(task)
    counts, reals = measures.empty()
    for batch in batches:
        measures.add(task, MODEL, batch, counts, reals)
    measures.check(counts, reals)
    return measures.found(counts, reals)


def test_counts_of_parts_add_up_to_those_of_the_whole() -> None:
    task = Given(
        confusion=headwater.ConfusionMatrix(4),
        calibration=headwater.Calibration(),
        roc=headwater.RocHistogram(num_classes=4),
    )
    chances = torch.rand(50, 4, generator=torch.Generator().manual_seed(0)).softmax(1)
    labels = torch.arange(50) % 4
    parts = [(chances[at : at + 7], labels[at : at + 7]) for at in range(0, 50, 7)]
    whole, found = counted(task, (chances, labels)), counted(task, *parts)
    for name in ("confusion", "roc"):
        assert found[name] == whole[name]
    assert found["calibration"]["counts"] == whole["calibration"]["counts"]


def test_a_confusion_matrix_is_by_label_and_then_by_prediction() -> None:
    chances = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]])
    found = counted(Given(c=headwater.ConfusionMatrix(2)), (chances, torch.tensor([0, 1, 1])))["c"]
    assert found["matrix"] == [[1, 0], [1, 1]]
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["recall"] == [1.0, 0.5]
    assert found["precision"] == [0.5, 1.0]
    assert found["f1"] == pytest.approx([2 / 3, 2 / 3])


def test_a_class_without_examples_has_no_recall() -> None:
    found = counted(
        Given(c=headwater.ConfusionMatrix(3)), (torch.eye(3)[:2], torch.tensor([0, 1]))
    )["c"]
    assert found["recall"] == [1.0, 1.0, None]
    assert found["precision"] == [1.0, 1.0, None]


def test_perfect_probabilities_have_no_calibration_error() -> None:
    chances = torch.full((4,), 0.75)
    found = counted(Given(c=headwater.Calibration(4)), (chances, torch.tensor([1, 1, 1, 0])))["c"]
    assert found["counts"] == [0, 0, 4, 0]  # the upper edge belongs to the bin
    assert found["accuracy"] == [None, None, 0.75, None]
    assert found["error"] == 0.0


@given(st.lists(st.tuples(st.floats(0, 1, width=32), st.booleans()), min_size=1, max_size=40))
def test_the_area_is_the_part_of_pairs_in_the_right_order(rows: list[tuple[float, bool]]) -> None:
    chances = torch.tensor([chance for chance, _ in rows])
    labels = torch.tensor([int(label) for _, label in rows])
    found = counted(Given(roc=headwater.RocHistogram(16)), (chances, labels))["roc"]
    bins = [min(int(chance * 16), 15) for chance, _ in rows]
    own = [one for one, (_, label) in zip(bins, rows, strict=True) if label]
    others = [one for one, (_, label) in zip(bins, rows, strict=True) if not label]
    pairs = [(a > b) + (a == b) / 2 for a in own for b in others]
    expected = [sum(pairs) / len(pairs)] if pairs else [None]
    assert found["auc"] == pytest.approx(expected) if pairs else found["auc"] == [None]


def test_a_negative_label_is_left_out_as_padding_is() -> None:
    chances = torch.eye(2).repeat(2, 1).reshape(2, 2, 2)
    labels = torch.tensor([[0, 1], [-100, 1]])
    found = counted(Given(c=headwater.ConfusionMatrix(2)), (chances, labels))["c"]
    assert found["matrix"] == [[1, 0], [0, 2]]


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (torch.zeros(2), "two tensors"),
        ((torch.zeros(2, 3), torch.zeros(3).long()), "one more dimension"),
        ((torch.full((2, 2), 1.5), torch.zeros(2).long()), "beyond 0..1"),
        ((torch.full((2, 2), float("nan")), torch.zeros(2).long()), "beyond 0..1"),
        ((torch.full((2, 3), 0.3), torch.zeros(2).long()), "of 3 classes"),
        ((torch.full((2, 2), 0.5), torch.tensor([0, 2])), "the label 2"),
        ((torch.full((2, 2), 0.5), torch.tensor([0.0, 0.5])), "no whole numbers"),
    ],
)
def test_other_predictions_are_refused_with_what_was_found(batch: Any, text: str) -> None:
    with pytest.raises(TaskError, match=text) as caught:
        counted(Given(c=headwater.ConfusionMatrix(2)), batch)
    assert caught.value.remedy


@pytest.mark.parametrize(
    "make",
    [
        lambda: headwater.ConfusionMatrix(1),
        lambda: headwater.ConfusionMatrix(2.0),  # type: ignore[arg-type]
        lambda: headwater.Calibration(0),
        lambda: headwater.RocHistogram(1),
        lambda: headwater.RocHistogram(num_classes=5_000),
    ],
)
def test_a_measure_of_no_whole_number_is_refused(make: Any) -> None:
    with pytest.raises(TaskError, match="must be a whole number"):
        make()


@pytest.mark.parametrize("evaluated", [{"a": 3}, {3: headwater.Calibration()}, [1]])
def test_what_is_no_measure_is_refused(evaluated: Any) -> None:
    task = Given()
    task.evaluated = evaluated
    with pytest.raises(TaskError, match="must have names"):
        measures_of(task)


def test_both_sides_compare_what_they_count_by_its_digest() -> None:
    digests = {
        measures_of(task).digest
        for task in (
            Given(a=headwater.Calibration(10)),
            Given(a=headwater.Calibration(11)),
            Given(b=headwater.Calibration(10)),
            Given(a=headwater.ConfusionMatrix(10)),
        )
    }
    assert len(digests) == 4
    assert Measures({}, "A").digest != Measures({}, "B").digest


def test_sums_that_no_predictions_have_are_named() -> None:
    measures = measures_of(Given(a=headwater.ConfusionMatrix(2), b=headwater.Calibration(2)))
    counts, reals = measures.empty()
    counts[0] = 1  # of a alone
    with pytest.raises(CorruptUpdate, match="the counts of b"):
        measures.check(counts, reals)
    counts[5], reals[1] = 1, 1.5  # a probability of 1.5
    with pytest.raises(CorruptUpdate, match="the counts of b"):
        measures.check(counts, reals)
    reals[1] = 0.75
    measures.check(counts, reals)
    counts[0], counts[1] = 2, -1
    with pytest.raises(CorruptUpdate, match="the counts of a"):
        measures.check(counts, reals)


@given(st.lists(st.integers(-(2**44), 2**44), max_size=20))
def test_whole_numbers_travel_in_two_float32_without_a_loss(numbers: list[int]) -> None:
    values = np.array(numbers, np.float64)
    high, low = (one.astype(np.float32).astype(np.float64) for one in in_two(values))
    assert from_two(high, low).tolist() == values.tolist()
    assert (np.abs(low) < PART).all()


@given(st.floats(-(2.0**43), 2.0**43))
def test_a_real_is_off_by_a_rounding_of_itself(value: float) -> None:
    high, low = (one.astype(np.float32) for one in in_two(np.array([value])))
    (found,) = from_two(high.astype(np.float64), low.astype(np.float64))
    assert abs(found - value) <= max(2.0**-24 * abs(value), 2.0**-149)
