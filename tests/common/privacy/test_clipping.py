"""Clipping: no vector is longer than the bound, and none is refused."""

from __future__ import annotations

import math

import pytest
import torch

from headwater.common.model.vectors import squared_norm
from headwater.common.privacy.clipping import clip_to_norm


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e3, 1e18, 1e30, 3e38])
@pytest.mark.parametrize("bound", [1e-6, 1.0, 1234.5])
def test_no_vector_is_longer_than_the_bound_in_exact_arithmetic(scale: float, bound: float) -> None:
    values = torch.rand(1000, generator=torch.Generator().manual_seed(1)) * 2 - 1
    values *= torch.tensor(scale)
    clip_to_norm(values, bound)
    assert math.fsum(x * x for x in values.tolist()) <= bound * bound


def test_a_short_vector_is_unchanged_and_a_long_one_keeps_its_direction() -> None:
    values = torch.tensor([3.0, 4.0])
    assert not clip_to_norm(values, 5.0)
    assert values.tolist() == [3.0, 4.0]
    assert clip_to_norm(values, 1.0)
    assert values.tolist() == pytest.approx([0.6, 0.8], rel=2e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_vector_that_is_not_finite_becomes_zero_and_counts_as_short(bad: float) -> None:
    values = torch.tensor([1.0, bad, 2.0])
    assert not clip_to_norm(values, 5.0)
    assert squared_norm(values) == 0
