"""Where a vector's elements lie in the ring."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headwater.common.estimates.ring_histogram import MAX_COORDINATES, NUM_BINS, ring_histogram
from headwater.common.secagg.masking import Stream, mask_in_place
from headwater.common.secagg.secret import Secret


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_small_numbers_are_at_both_ends_and_masked_ones_everywhere(dtype: type) -> None:
    vector: NDArray[Any] = np.tile(np.array([1, -1, 2, -2], np.int64), 3_000).astype(dtype)
    counts = ring_histogram(vector)
    assert (counts[0], counts[-1]) == (6_000, 6_000)
    assert sum(counts) == len(vector)
    mask_in_place(vector, [Stream(key=Secret(bytes(32)), sign=1)])
    expected = len(vector) / NUM_BINS
    assert all(0.7 * expected < count < 1.3 * expected for count in ring_histogram(vector))


def test_of_a_large_vector_the_first_coordinates_are_counted() -> None:
    assert sum(ring_histogram(np.zeros(3 * MAX_COORDINATES, np.uint32))) == MAX_COORDINATES
