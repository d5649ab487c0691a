"""The search for an algorithm's rate: which rates it tries, and which one it takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headwater.simulation.compare.rate_search import (
    MAX_RATES,
    best_rate,
    first_rates,
    next_rate,
    score,
)


def searched(around: float, value: Callable[[float], float | None]) -> dict[float, float | None]:
    """Return the rates that a whole search tries, with their values."""
    scores = {rate: value(rate) for rate in first_rates(around)}
    while (rate := next_rate(scores)) is not None:
        scores[rate] = value(rate)
    return scores


@pytest.mark.parametrize(
    ("around", "expected"),
    [
        (0.01, (0.003, 0.01, 0.03)),
        (0.1, (0.03, 0.1, 0.3)),
        (0.001, (0.0003, 0.001, 0.003)),
        (1.0, (0.3, 1.0, 3.0)),
        (0.02, (0.01, 0.03, 0.1)),  # the rung nearest to 0.02 by its logarithm is 0.03
    ],
)
def test_the_first_rates_are_three_rungs_of_the_ladder(
    around: float, expected: tuple[float, ...]
) -> None:
    assert first_rates(around) == expected


def test_a_best_rate_between_two_others_ends_the_search() -> None:
    assert set(searched(0.1, lambda rate: -abs(rate - 0.1))) == {0.03, 0.1, 0.3}


def test_the_search_follows_the_best_rate_to_either_side() -> None:
    assert sorted(searched(0.1, lambda rate: rate)) == [0.03, 0.1, 0.3, 1.0, 3.0]
    assert sorted(searched(0.1, lambda rate: -rate)) == [0.003, 0.01, 0.03, 0.1, 0.3]


def test_the_search_goes_down_from_rates_that_diverge() -> None:
    found = searched(0.1, lambda rate: None if rate > 0.01 else rate)
    assert sorted(found) == [0.003, 0.01, 0.03, 0.1, 0.3]
    assert best_rate(found) == 0.01


def test_no_search_tries_more_than_five_rates() -> None:
    assert len(searched(0.1, lambda _: None)) == MAX_RATES
    assert best_rate(searched(0.1, lambda _: None)) is None


def test_of_equal_rates_the_smallest_is_taken() -> None:
    assert best_rate({0.1: 0.5, 0.3: 0.5, 1.0: None}) == 0.1


def test_the_score_is_the_mean_of_the_later_half_and_larger_is_better() -> None:
    assert score([0.0, 0.2, 0.4, 0.8], is_smaller_better=False) == pytest.approx(0.6)
    assert score([9.0, 3.0, 1.0], is_smaller_better=True) == pytest.approx(-2.0)
    assert score([], is_smaller_better=True) is None
