"""The watch over norms: its limit follows the cohort's medians and never an update by itself."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater.server.aggregation.norm_watch import LARGEST_NORM, NormWatch, norm_per_weight

NEW = NormWatch(multiple=100.0)


def test_the_limit_is_a_multiple_of_the_largest_median_of_a_round() -> None:
    assert NEW.limit == LARGEST_NORM
    first = NEW.after([1.0, 2.0, 3.0])
    assert first.limit == 200.0
    assert first.after([0.1, 0.2, 0.3]).limit == 200.0  # gradients shrink while a model learns
    assert first.after([4.0, 5.0, 6.0]).limit == 500.0


@pytest.mark.parametrize("norms", [[], [1.0], [1.0, 3e38], [0.0, 0.0, 0.0, 1.0], [math.inf] * 5])
def test_a_round_without_three_positive_norms_says_nothing(norms: list[float]) -> None:
    assert NEW.after(norms) == NEW


@given(
    honest=st.lists(st.floats(0.5, 2.0), min_size=3, max_size=20),
    lies=st.lists(st.floats(0.0, 1e300), max_size=19),
)
def test_a_minority_moves_the_limit_by_no_more_than_the_honest_norms_differ(
    honest: list[float], lies: list[float]
) -> None:
    limit = NEW.after(honest + lies[: len(honest) - 1]).limit
    assert 50.0 <= limit <= 200.0


def test_the_norm_of_the_largest_vector_is_finite() -> None:
    values_P = torch.full((10_000,), 3e38)
    assert norm_per_weight(values_P, 4) == pytest.approx(3e40 / 4, rel=1e-6)
