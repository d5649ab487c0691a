"""Steps of a grid: exact at any width, and refused where they are not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.common.compression.grid_steps import (
    LEVELS,
    decoded_steps,
    encode_steps,
    nearest_on_grid,
    piece_bytes,
)
from headwater.common.compression.terms import BLOCK
from headwater.common.errors import CorruptUpdate


@given(
    length=st.sampled_from([1, 7, 8, BLOCK - 1, BLOCK, 2 * BLOCK + 5]),
    width=st.integers(0, 50),
    exponent=st.integers(-120, 100),
    seed=st.integers(0, 9),
)
def test_an_encoded_movement_is_exact(length: int, width: int, exponent: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    numbers = random.integers(-(2**width) + 1, 2**width, length).astype(np.float64)
    moved = np.ldexp(numbers, exponent)
    piece = encode_steps(moved)
    assert piece is not None
    assert piece_bytes(piece, length) == len(piece)
    assert np.array_equal(decoded_steps(piece, length), moved)


@given(scale=st.floats(1e-30, 1e30), step=st.floats(1e-12, 1e3), seed=st.integers(0, 9))
def test_versions_of_a_model_on_its_grids_differ_by_numbers_that_add_exactly(
    scale: float, step: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    target = (scale * random.standard_normal(BLOCK)).astype(np.float32)
    first = nearest_on_grid(target, np.zeros_like(target), levels=LEVELS)
    held, total = first, np.zeros(BLOCK)
    for _ in range(3):
        target = (target + step * scale * random.standard_normal(BLOCK)).astype(np.float32)
        after = nearest_on_grid(target, held, levels=LEVELS)
        largest = np.abs(target.astype(np.float64) - held).max()
        # Half a step, or half of float32's own at the block's largest coordinate.
        bound = max(largest / LEVELS, 2.0**-22 * float(np.abs(target).max()), 2.0**-126)
        assert np.abs(after.astype(np.float64) - target).max() <= bound
        piece = encode_steps(after.astype(np.float64) - held)
        assert piece is not None
        total += decoded_steps(piece, BLOCK)
        held = after
    assert np.array_equal((first + total).astype(np.float32), held)


def test_a_block_that_has_not_moved_takes_two_bytes_and_stays_as_it_is() -> None:
    values = nearest_on_grid(
        np.linspace(-1, 1, BLOCK, dtype=np.float32), np.zeros(BLOCK, np.float32), levels=LEVELS
    )
    assert np.array_equal(nearest_on_grid(values, values, levels=LEVELS), values)
    assert encode_steps(np.zeros(BLOCK)) == bytearray(2)


def test_a_movement_of_more_bits_than_float64_adds_is_not_encoded() -> None:
    assert encode_steps(np.array([1.0, 2.0**-60])) is None


def test_a_width_beyond_the_bound_is_refused() -> None:
    with pytest.raises(CorruptUpdate, match="at most 52 bits, found 53"):
        decoded_steps(bytearray([0, 53]) + bytearray(53), 1)
