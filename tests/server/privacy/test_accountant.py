"""The accountant against the closed form, and the noise that is left for the coming rounds."""

from __future__ import annotations

import math

import pytest

from headwater.common.errors import PrivacySpent
from headwater.common.privacy.spending import epsilon_of
from headwater.common.privacy_terms import rho_of
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


def test_nothing_left_is_refused_by_name() -> None:
    rho = largest_rho(1.0, delta=1e-5)
    with pytest.raises(PrivacySpent):
        multiplier_of_rest(rho, [(math.sqrt(1 / (2 * rho)), 1)], rounds=1)
