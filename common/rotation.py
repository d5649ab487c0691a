"""A randomized block-Hadamard rotation, which spreads every coordinate evenly over its block.

(to be written out)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from common.fixed_point import Encoding

BLOCK_SIZE = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotation:
    """A rotation of [P] that everybody can compute: public 32-byte seed, new in each round."""

    seed: bytes
    num_coordinates: int
    block_size: int = BLOCK_SIZE

    @property
    def num_blocks(self) -> int:
        """How many bounds there are: ceil(P / block_size)."""
        return -(-self.num_coordinates // self.block_size)


def rotated_encoding(*, max_weight: int) -> Encoding:
    """Return the 16-bit encoding of a vector that was rotated and measured in its bounds."""
    raise NotImplementedError


def rotate_in_place(
    values_P: Tensor, *, rotation: Rotation, bounds: NDArray[np.float32], max_weight: int
) -> None:
    """Rotate a device's sum and measure each block in steps of its bound, in the same memory."""
    raise NotImplementedError


def unrotate_in_place(
    mean_P: NDArray[np.float32],
    *,
    rotation: Rotation,
    bounds: NDArray[np.float32],
    max_weight: int,
) -> NDArray[np.float64]:
    """Turn the decoded mean back, in the same memory; return the RMS of each rotated block."""
    raise NotImplementedError


def first_bounds(rotation: Rotation, *, clip: float) -> NDArray[np.float32]:
    """Return the bounds [num_blocks] before any sum is known."""
    raise NotImplementedError


def follow_bounds(
    bounds: NDArray[np.float32], *, block_rms: NDArray[np.float64], spread: float, clipped: float
) -> NDArray[np.float32]:
    """Return the next round's bounds, from the RMS of each block of the mean.

    ``spread`` is how much larger a device's own mean is than the cohort's (ratio of RMS, >= 1),
    ``clipped`` the share of coordinates that were clipped.
    """
    raise NotImplementedError
