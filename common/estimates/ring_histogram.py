"""Where a vector's elements lie in the ring: what the server sees of a masked one, and of a sum.

A masked vector is uniform over the ring, whatever is in it. An opened sum is not: its coordinates
lie around zero, at both ends of the ring, as negative numbers wrap around.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

BIN_BITS = 5
NUM_BINS = 1 << BIN_BITS
MAX_COORDINATES = 1 << 16  # enough to see it; a large model's vector is not read once more


def ring_histogram(vector_P: NDArray[Any]) -> tuple[int, ...]:
    """Return how many of the first coordinates lie in each of ``NUM_BINS`` parts of the ring."""
    part = vector_P[:MAX_COORDINATES]
    shift = 8 * part.dtype.itemsize - BIN_BITS
    return tuple(np.bincount(part >> shift, minlength=NUM_BINS).tolist())
