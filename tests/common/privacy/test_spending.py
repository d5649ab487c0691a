"""What sums with noise cost: the closed form against integrals of the Gaussian itself."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from headwater.common.privacy.spending import epsilon_of
from headwater.common.privacy.terms import rho_of

CASES = [
    (z, count, delta) for z in (0.6, 2.0, 10.0) for count in (1, 100) for delta in (1e-5, 1e-8)
]


def by_orders(rho: float, delta: float) -> float:
    """Return the least bound over a fine grid of orders (Canonne et al. 2020, corollary 13)."""
    alpha = 1 + np.logspace(-6, 8, 200_001)
    bounds = alpha * rho - np.log(alpha * delta) / (alpha - 1) + np.log1p(-1 / alpha)
    return max(float(bounds.min()), 0.0)


def exact_gaussian(rho: float, delta: float) -> float:
    """Return the exact epsilon of a Gaussian of this rho (Balle and Wang 2018, theorem 8)."""
    mu = math.sqrt(2 * rho)

    def log_phi(x: float) -> float:
        return (
            math.log(math.erfc(-x / math.sqrt(2)) / 2)
            if x > -35
            else -x * x / 2 - math.log(-x * 2.5066)
        )

    def delta_at(epsilon: float) -> float:
        first = math.exp(log_phi(mu / 2 - epsilon / mu))
        return first - math.exp(epsilon + log_phi(-mu / 2 - epsilon / mu))

    low, high = 0.0, 10_000.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_at(middle) > delta else (low, middle)
    return high


@pytest.mark.parametrize(("z", "count", "delta"), CASES)
def test_epsilon_is_the_least_over_all_orders_to_one_percent(
    z: float, count: int, delta: float
) -> None:
    rho = count * rho_of(z)
    assert epsilon_of(rho, delta=delta) == pytest.approx(by_orders(rho, delta), rel=0.01)


@pytest.mark.parametrize(("z", "count", "delta"), CASES)
def test_epsilon_is_never_below_that_of_the_continuous_gaussian(
    z: float, count: int, delta: float
) -> None:
    rho = count * rho_of(z)
    exact = exact_gaussian(rho, delta)
    assert exact <= epsilon_of(rho, delta=delta) <= 1.25 * exact + 0.01


def test_nothing_spent_is_epsilon_zero_and_everything_infinite() -> None:
    assert epsilon_of(0.0, delta=1e-5) == 0
    assert epsilon_of(math.inf, delta=1e-5) == math.inf


@pytest.mark.parametrize(("rho", "delta"), [(-1.0, 1e-5), (math.nan, 1e-5), (1.0, 0.0), (1.0, 1.0)])
def test_impossible_figures_are_refused(rho: float, delta: float) -> None:
    with pytest.raises(ValueError, match="no epsilon"):
        epsilon_of(rho, delta=delta)


def test_the_table_of_the_documentation_holds() -> None:
    text = (Path(__file__).parents[3] / "docs/privacy.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| (\d+) \| (\d+) \| ([\d.]+) \|$", text, re.MULTILINE)
    assert len(table) == 5
    for z, count, epsilon in table:
        found = epsilon_of(int(count) * rho_of(float(z)), delta=1e-5)
        assert f"{found:.2f}" == epsilon
