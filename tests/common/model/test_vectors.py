"""Finiteness and norms of vectors of any length."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as some

from headwater.common.model.vectors import CHUNK, all_finite, squared_norm

FLOATS = st.floats(width=32)


@given(values=some.arrays(np.float32, st.integers(0, 70), elements=FLOATS))
def test_a_vector_is_finite_if_each_of_its_numbers_is(values: np.ndarray) -> None:
    assert all_finite(torch.from_numpy(values)) == bool(np.isfinite(values).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 1, CHUNK, 2 * CHUNK - 1])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_one_bad_number_is_found_at_any_position(bad: float, at: int, kind: torch.dtype) -> None:
    values = torch.ones(2 * CHUNK, dtype=kind)
    assert all_finite(values)
    values[at] = bad
    assert not all_finite(values)


@pytest.mark.parametrize("length", [0, 1, CHUNK, CHUNK + 1, 3 * CHUNK - 5])
def test_the_squared_norm_is_summed_in_float64(length: int) -> None:
    values = torch.randn(length, generator=torch.Generator().manual_seed(length)) * 1e25
    exact = math.fsum((values.double() ** 2).tolist())
    assert squared_norm(values) == pytest.approx(exact, rel=1e-12)
