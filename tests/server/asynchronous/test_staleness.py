"""The discount of stale updates: both of a pair are multiplied by it, exactly."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from headwater.common.errors import StaleUpdate
from headwater.common.messages import Plan
from headwater.common.model.parameters import ModelImage
from headwater.common.settings.schema import AsynchronousSettings
from headwater.server.aggregation.cohort_sum import CohortSum
from headwater.server.asynchronous.staleness import (
    TIMES_OF_FRESH,
    StalenessRule,
    figures_of,
    times_of,
)

NUM_VALUES = 5
WHOLE = st.lists(st.integers(-1000, 1000), min_size=NUM_VALUES, max_size=NUM_VALUES)
UPDATES = st.lists(st.tuples(WHOLE, st.integers(1, 50), st.integers(0, 30)), min_size=1, max_size=6)


def plan_of(version: int) -> Plan:
    return Plan(round=version + 1, run_seed=0, model_version=version, quota=4, micro_batch_size=2)


def rule_at(version: int, **chosen: float) -> StalenessRule:
    settings = AsynchronousSettings(is_on=True, **chosen)
    return StalenessRule(version=version, chosen=settings, num_others=3)


def new_sum() -> CohortSum:
    return CohortSum(ModelImage(nn.Linear(NUM_VALUES, 1, bias=False)).layout)


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 16.0])
def test_a_fresh_update_counts_in_full_and_an_older_one_never_more(exponent: float) -> None:
    counts = [times_of(staleness, exponent) for staleness in range(200)]
    assert counts[0] == TIMES_OF_FRESH
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] >= 1


@given(st.integers(0, 10**6), st.floats(0, 2))
def test_the_discount_is_right_to_half_a_step(staleness: int, exponent: float) -> None:
    wanted = TIMES_OF_FRESH * (1 + staleness) ** -exponent
    assert abs(times_of(staleness, exponent) - wanted) <= max(0.5, 1 - wanted)


@given(UPDATES)
def test_the_step_is_the_weighted_mean_of_sums_and_weights_with_one_discount(
    updates: list[tuple[list[int], int, int]],
) -> None:
    rule, total = rule_at(30), new_sum()
    total.open(num_clients=len(updates), planned_weight=50 * len(updates) * TIMES_OF_FRESH)
    above, below = [Fraction(0)] * NUM_VALUES, Fraction(0)
    for values, weight, staleness in updates:
        times = rule.times(plan_of(30 - staleness))
        total.fold(torch.tensor(values, dtype=torch.float32), weight, times=times)
        discount = Fraction(times, TIMES_OF_FRESH)
        above = [sum_ + discount * value for sum_, value in zip(above, values, strict=True)]
        below += discount * weight
    assert total.weight == below * TIMES_OF_FRESH
    found = total.close().tolist()
    # The mean is rounded once, to float32.
    assert found == pytest.approx([float(one / below) for one in above], rel=2**-23, abs=1e-12)


@given(st.integers(1, 2**20), st.integers(0, 30), st.integers(1, 64))
def test_windows_of_one_update_weigh_no_more_than_the_other_updates_of_a_step(
    num_windows: int, staleness: int, num_others: int
) -> None:
    rule = StalenessRule(version=30, chosen=AsynchronousSettings(is_on=True), num_others=num_others)
    plan, one = plan_of(30 - staleness), rule.times(plan_of(30 - staleness))
    times = rule.times(plan, num_windows)
    if num_windows <= num_others:
        assert times == one
    elif times > 1:  # the fewest times that there are
        assert num_windows * times <= num_others * one < num_windows * (times + 1)


@given(UPDATES)
def test_a_buffer_of_fresh_updates_has_the_bits_of_a_synchronous_round(
    updates: list[tuple[list[int], int, int]],
) -> None:
    rule, plain, buffered = rule_at(7), new_sum(), new_sum()
    for _ in range(2):  # the second round's scale follows from the first one's sum
        planned = 50 * len(updates)
        plain.open(num_clients=len(updates), planned_weight=planned)
        buffered.open(num_clients=len(updates), planned_weight=planned * TIMES_OF_FRESH)
        for values, weight, _ in updates:
            values_P = torch.tensor(values, dtype=torch.float32) / 3
            plain.fold(values_P, weight)
            buffered.fold(values_P, weight, times=rule.times(plan_of(7)))
        assert torch.equal(plain.close().clone(), buffered.close().clone())


def test_an_update_is_refused_by_name_beyond_the_largest_staleness() -> None:
    rule = rule_at(12, max_staleness=4)
    rule.check("pi", 8)
    with pytest.raises(StaleUpdate, match=r"pi: its update is of model 7, 5 steps ago") as caught:
        rule.check("pi", 7)
    assert "--max-staleness" in caught.value.remedy


def test_the_figures_of_a_buffer_are_of_its_plans() -> None:
    found = figures_of(rule_at(5), [plan_of(5), plan_of(2)], summed_times=3 * TIMES_OF_FRESH)
    assert (found.mean, found.most, found.discounted_weight) == (1.5, 3, 3.0)
