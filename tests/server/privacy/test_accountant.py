"""The accountant against the closed form, and the noise that is left for the coming rounds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.common.errors import PrivacySpent
from headwater.common.privacy.spending import epsilon_of
from headwater.common.privacy.terms import rho_of
from headwater.server.privacy.accountant import (
    Accountant,
    largest_rho,
    multiplier_of_rest,
    spent_rho,
)


@pytest.mark.parametrize("z", [0.5, 1.0, 4.0, 20.0, 100.0])
@pytest.mark.parametrize("count", [1, 30, 1000])
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-9])
def test_the_accountant_and_the_closed_form_agree_to_one_percent(
    z: float, count: int, delta: float
) -> None:
    found = Accountant(delta, [(z, count)]).epsilon
    assert found == pytest.approx(epsilon_of(count * rho_of(z), delta=delta), rel=0.01, abs=1e-6)


def test_sums_with_unlike_noise_add_up_in_any_order() -> None:
    events = [(1.5, 2), (3.0, 1), (0.9, 1)]
    one = Accountant(1e-5, events)
    other = Accountant(1e-5)
    for multiplier in (0.9, 3.0, 1.5, 1.5):
        other.add(multiplier)
    assert one.epsilon == pytest.approx(other.epsilon)
    assert other.events == [(0.9, 1), (3.0, 1), (1.5, 2)]
    rho = 2 * rho_of(1.5) + rho_of(3.0) + rho_of(0.9)
    assert spent_rho(events) == pytest.approx(rho)
    assert one.epsilon == pytest.approx(epsilon_of(rho, delta=1e-5), rel=0.01)


def test_no_sum_is_epsilon_zero() -> None:
    assert Accountant(1e-5).epsilon == 0


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0, 50.0])
def test_rounds_with_the_chosen_noise_reach_the_epsilon_and_no_more(epsilon: float) -> None:
    rho = largest_rho(epsilon, delta=1e-5)
    z = multiplier_of_rest(rho, [], rounds=40)
    assert epsilon * 0.99 < Accountant(1e-5, [(z, 40)]).epsilon <= epsilon


def test_more_noise_than_planned_leaves_more_for_the_rest_and_less_leaves_less() -> None:
    rho = largest_rho(4.0, delta=1e-5)
    z = multiplier_of_rest(rho, [], rounds=10)
    assert multiplier_of_rest(rho, [(z, 4)], rounds=6) == pytest.approx(z)
    assert multiplier_of_rest(rho, [(2 * z, 4)], rounds=6) < z
    after = multiplier_of_rest(rho, [(z, 5)], rounds=6)  # a round was opened and then undone
    assert after > z
    assert Accountant(1e-5, [(z, 5), (after, 6)]).epsilon <= 4.0


def noise_of_a_run(costs: list[float], *, gain: float) -> tuple[list[float], float]:
    """Return the multipliers of sums that cost these parts of what they say, and the rho left."""
    events: list[tuple[float, int]] = []
    chosen = []
    for at, cost in enumerate(costs):
        z = multiplier_of_rest(1.0, events, rounds=len(costs) - at, gain=gain if at else 1.0)
        chosen.append(z)
        events.append((z / math.sqrt(cost), 1))
    return chosen, 1 - spent_rho(events)


def test_sums_that_cost_as_little_as_expected_have_even_noise_and_leave_almost_nothing() -> None:
    noise, left = noise_of_a_run([1 / 1.5] * 30, gain=1.5)
    assert max(noise[1:-1]) == pytest.approx(min(noise[1:-1]))
    assert noise[1] < noise[0] * 0.83  # 1 / sqrt(1.5) is 0.816
    assert 0 < left < 0.02
    uneven, unused = noise_of_a_run([1 / 1.5] * 30, gain=1.0)
    assert max(uneven[1:-1]) > 1.4 * min(uneven[1:-1])
    assert unused > 0.03
    assert sum(z * z for z in noise) < 0.9 * sum(z * z for z in uneven)


@given(
    costs=st.lists(st.floats(0.05, 1.0), min_size=1, max_size=40),
    gain=st.floats(1.0, 20.0),
)
def test_whatever_sums_cost_they_never_exceed_the_whole(costs: list[float], gain: float) -> None:
    try:
        _, left = noise_of_a_run(costs, gain=gain)
    except PrivacySpent:
        return
    assert left >= -1e-9


def test_nothing_left_is_refused_by_name() -> None:
    rho = largest_rho(1.0, delta=1e-5)
    with pytest.raises(PrivacySpent):
        multiplier_of_rest(rho, [(math.sqrt(1 / (2 * rho)), 1)], rounds=1)
