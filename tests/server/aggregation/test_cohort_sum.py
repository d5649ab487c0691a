"""The cohort's sum: exact within its bound, and the same bits in any order of arrival."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from headwater.common.errors import CorruptUpdate, NonFiniteUpdate
from headwater.common.model.layout import ModelLayout
from headwater.common.model.parameters import ModelImage
from headwater.common.model.vectors import CHUNK
from headwater.server.aggregation.cohort_sum import (
    HEADROOM_BITS,
    LARGEST_VALUE,
    SUM_BITS,
    CohortSum,
)


class Tensors(nn.Module):
    """A model of tensors of the given lengths."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__()
        for at, length in enumerate(lengths):
            self.register_parameter(f"t{at}", nn.Parameter(torch.zeros(length)))


def layout(*lengths: int) -> ModelLayout:
    return ModelImage(Tensors(lengths)).layout


SMALL = layout(3, 1, 4)
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-1e3, max_value=1e3)
UPDATES = st.lists(st.lists(FLOAT32, min_size=8, max_size=8), min_size=1, max_size=9)


def summed(
    total: CohortSum, updates: Sequence[Tensor], weights: Sequence[int] | None = None
) -> Tensor:
    weights = weights or [1] * len(updates)
    total.open(num_clients=len(updates), planned_weight=sum(weights))
    for update, weight in zip(updates, weights, strict=True):
        total.check(update, name="pi")
        total.fold(update, weight)
    return total.close().clone()


def exact_sum(updates: Sequence[Tensor]) -> NDArray[np.float64]:
    """Return the correctly rounded sum of each coordinate."""
    return np.array(
        [math.fsum(column) for column in zip(*(u.tolist() for u in updates), strict=True)]
    )


def resolution(largest: float, num_clients: int) -> float:
    """Return 2^-f of the module's text: f = 61 - 10 - ceil(log2 n) - e, with largest < 2^e."""
    room = SUM_BITS - 1 - HEADROOM_BITS - math.ceil(math.log2(num_clients))
    return 2.0 ** (math.frexp(largest)[1] - room)


@given(UPDATES, st.data())
def test_the_order_of_arrival_does_not_change_a_bit(
    rows: list[list[float]], data: st.DataObject
) -> None:
    updates = [torch.tensor(row) for row in rows]
    order = data.draw(st.permutations(range(len(updates))))
    one, other = CohortSum(SMALL), CohortSum(SMALL)
    first = summed(one, updates)
    second = summed(other, [updates[at] for at in order])
    assert one.num_shifts == other.num_shifts == 0
    assert first.numpy().tobytes() == second.numpy().tobytes()
    assert one.largest == other.largest


@given(UPDATES, st.data())
def test_the_mean_is_the_exact_sum_over_the_weight_within_the_documented_bound(
    rows: list[list[float]], data: st.DataObject
) -> None:
    updates = [torch.tensor(row) for row in rows]
    counts = st.lists(st.integers(1, 50), min_size=len(rows), max_size=len(rows))
    weights = data.draw(counts)
    mean = summed(CohortSum(SMALL), updates, weights).double().numpy()
    expected = exact_sum(updates) / sum(weights)
    n = len(updates)
    # n halves of a step of the integers, and the mean's own rounding to float32.
    step = n * resolution(float(sum(weights)), n) / 2 / sum(weights)
    bound = step + np.abs(expected) * 2.0**-24 + 2.0**-149
    assert (np.abs(mean - expected) <= bound).all()


def test_the_second_round_resolves_what_the_first_round_measured() -> None:
    rng = np.random.default_rng(0)
    total = CohortSum(SMALL)
    updates = [torch.tensor(rng.normal(scale=1e-12, size=8), dtype=torch.float32) for _ in range(5)]
    summed(total, updates)
    mean = summed(total, updates).double().numpy()
    expected = exact_sum(updates) / 5
    bound = resolution(float(np.abs(exact_sum(updates)).max()), 5) + np.abs(expected) * 2.0**-23
    assert (np.abs(mean - expected) <= bound).all()


@pytest.mark.parametrize("exponent", [-20, -60, -100, -140])
def test_gradients_however_tiny_are_summed_right_from_the_second_round_on(exponent: int) -> None:
    tiny = torch.full((8,), 2.0**exponent)
    total = CohortSum(SMALL)
    summed(total, [tiny, tiny])
    assert torch.equal(summed(total, [tiny, tiny]), tiny)


def test_a_tensor_without_any_gradient_in_the_first_round_is_summed_right_later() -> None:
    total = CohortSum(SMALL)
    summed(total, [torch.zeros(8)])
    update = torch.arange(8.0) / 8
    assert torch.equal(summed(total, [update]), update)


def test_a_tensor_that_falls_silent_after_a_burst_is_heard_again() -> None:
    total = CohortSum(SMALL)
    summed(total, [torch.full((8,), 2.0**40)])
    quiet = torch.full((8,), 2.0**-40)
    summed(total, [quiet])
    assert torch.equal(summed(total, [quiet]), quiet)


@pytest.mark.parametrize("factor_bits", [20, 40, 63, 90, 120])
def test_an_update_far_larger_than_expected_is_shifted_counted_and_right(factor_bits: int) -> None:
    total = CohortSum(SMALL)
    summed(total, [torch.ones(8)] * 3)
    large = torch.tensor([1.0, -1, 3, 1, 5, -7, 1, 1]) * 2.0**factor_bits
    updates = [torch.ones(8), large, torch.ones(8)]
    mean = summed(total, updates).double().numpy()
    expected = exact_sum(updates) / 3
    assert total.num_shifts > 0
    assert np.abs(mean / expected - 1).max() <= 2.0**-23


def test_a_round_without_an_outlier_counts_no_shift() -> None:
    total = CohortSum(SMALL)
    for _ in range(3):
        summed(total, [torch.ones(8)] * 3)
        assert total.num_shifts == 0


@given(st.integers(0, 2), st.lists(st.integers(-60, 60), min_size=3, max_size=3))
def test_where_a_shift_falls_moves_the_sum_by_no_more_than_the_bound(
    position: int, exponents: list[int]
) -> None:
    updates = [torch.full((8,), 1.0 + at) * 2.0**e for at, e in enumerate(exponents)]
    updates[0], updates[position] = updates[position], updates[0]
    total = CohortSum(SMALL)
    summed(total, [torch.ones(8)])
    mean = summed(total, updates).double().numpy()
    expected = exact_sum(updates) / 3
    # A shift rounds once more, to a step that is 2^-60 of the sum of the largest coordinates.
    step = 3 * sum(float(u.max()) for u in updates) * 2.0**-60
    step = max(step, 3 * resolution(1.0, 3))
    assert (np.abs(mean - expected) <= step + np.abs(expected) * 2.0**-24).all()


@pytest.mark.parametrize(
    "lengths", [(CHUNK,), (CHUNK + 1,), (CHUNK - 1, 1, 2 * CHUNK + 3, 5), (1, 3 * CHUNK)]
)
def test_the_mean_written_over_the_sum_is_that_of_a_separate_computation(
    lengths: tuple[int, ...],
) -> None:
    plan = layout(*lengths)
    rng = np.random.default_rng(1)
    # Whole numbers and a weight of 2^k: sum and mean are exact in float32.
    updates = [
        torch.from_numpy(rng.integers(-99, 100, size=plan.num_parameters).astype(np.float32))
        for _ in range(3)
    ]
    mean = summed(CohortSum(plan), updates, [1, 1, 2])
    assert torch.equal(mean, torch.stack(updates).double().sum(0).float() / 4)


def test_the_largest_sum_of_each_tensor_is_kept_by_itself() -> None:
    total = CohortSum(SMALL)
    summed(total, [torch.tensor([1.0, -6, 2, 9, 0.5, 0.25, 0, -0.125])] * 2)
    assert total.largest == [12.0, 18.0, 1.0]


def test_a_sum_restored_goes_on_with_the_same_bits() -> None:
    rng = np.random.default_rng(2)
    rounds = [
        [torch.tensor(rng.normal(size=8), dtype=torch.float32) for _ in range(3)] for _ in range(2)
    ]
    unbroken, broken, resumed = CohortSum(SMALL), CohortSum(SMALL), CohortSum(SMALL)
    for total in (unbroken, broken):
        summed(total, rounds[0])
    resumed.restore(broken.largest)
    assert torch.equal(summed(resumed, rounds[1]), summed(unbroken, rounds[1]))


def test_a_sum_that_was_never_closed_restores_to_its_beginning() -> None:
    total = CohortSum(SMALL)
    total.open(num_clients=2, planned_weight=2)
    total.fold(torch.full((8,), 1e20), 1)
    assert total.largest is None


def test_opening_a_round_forgets_what_an_aborted_one_had_summed() -> None:
    total = CohortSum(SMALL)
    total.open(num_clients=2, planned_weight=2)
    total.fold(torch.full((8,), 2.0**70), 5)
    assert torch.equal(summed(total, [torch.ones(8)]), torch.ones(8))


@pytest.mark.parametrize("length", [0, 7, 9, 16])
def test_an_update_of_another_length_is_corrupt(length: int) -> None:
    with pytest.raises(CorruptUpdate, match=f"pi: the update has {length} coordinates"):
        CohortSum(SMALL).check(torch.zeros(length), name="pi")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, CHUNK - 1, CHUNK, CHUNK + 1])
def test_an_update_that_is_not_finite_anywhere_is_refused(value: float, position: int) -> None:
    values_P = torch.zeros(CHUNK + 2)
    values_P[position] = value
    with pytest.raises(NonFiniteUpdate, match="pi: "):
        CohortSum(layout(CHUNK + 2)).check(values_P, name="pi")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", range(8))
def test_nor_is_one_of_a_small_model(value: float, position: int) -> None:
    values_P = torch.zeros(8)
    values_P[position] = value
    with pytest.raises(NonFiniteUpdate, match="pi: "):
        CohortSum(layout(3, 0, 1, 4)).check(values_P, name="pi")
    with pytest.raises(NonFiniteUpdate, match="pi: "):
        CohortSum(SMALL).check(values_P, name="pi")


@given(UPDATES, st.sampled_from([-130, -120, -60, 0, 60, 110]))
def test_a_small_model_is_summed_as_the_same_tensors_of_a_large_one(
    rows: list[list[float]], exponent: int
) -> None:
    updates = [torch.tensor(row, dtype=torch.float64).mul(2.0**exponent).float() for row in rows]
    padded = [torch.cat([update, torch.zeros(CHUNK)]) for update in updates]
    small, large = CohortSum(SMALL), CohortSum(layout(3, 1, 4, CHUNK))
    for _ in range(2):  # the second time at the scale of the first sum
        assert torch.equal(summed(small, updates), summed(large, padded)[:8])
        assert small.num_shifts == large.num_shifts


def test_the_largest_finite_updates_of_a_large_cohort_do_not_overflow() -> None:
    most = torch.full((8,), float(np.finfo(np.float32).max))
    total = CohortSum(SMALL)
    mean = summed(total, [most] * 64)
    assert torch.equal(mean, most)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"scale_bits": (-101, -101, -101)}, id="a scale that no update needs"),
        pytest.param({"scale_bits": (-2000, -2000, -2000)}, id="one whose power overflows"),
        pytest.param({"bounds": (1e100, 1e100, 1e100)}, id="more than an update of float32 has"),
    ],
)
def test_a_part_that_would_round_all_other_updates_to_zero_is_corrupt(
    changes: dict[str, Any],
) -> None:
    branch, total = CohortSum(SMALL), CohortSum(SMALL)
    total.open(num_clients=2, planned_weight=2)
    branch.open_part(total.scale_bits)
    part = branch.part()
    total.check_part(part, name="north", limits=[LARGEST_VALUE] * 1)
    with pytest.raises(CorruptUpdate, match="north: tensor 0 has"):
        total.check_part(replace(part, **changes), name="north", limits=[LARGEST_VALUE] * 1)
