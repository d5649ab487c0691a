"""Sends random coordinates, the same of every device: random-k by a seed that all of them share.

The vector [P] is cut into k strata of equal length, and one coordinate of each is drawn, so that a
coordinate is sent with probability k/P in each round. The positions follow from the run's seed and
the round: only values travel, two bytes each in clear, and a masked sum has k elements instead of
P. What is not sent stays in the vector, as in ``top_coordinates``.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwater.common.compression.rounding import encode_bfloat16
from headwater.common.sums.encoded_vector import EncodedVector, Floats

Positions = NDArray[np.int64]

DRAWN = 1 << 16  # strata that are drawn together


class SharedPositions:
    """The positions of a round: ``number`` of ``num_values`` coordinates, in increasing order."""

    def __init__(self, num_values: int, number: int, *, run_seed: int, round_number: int) -> None:
        self.num_values = num_values
        self.number = number
        text = f"random-k {run_seed} {round_number}".encode()
        self._seed = int.from_bytes(hashlib.sha256(text).digest()[:16], "little")

    def positions(self, first: int, end: int) -> Positions:
        """Return the positions in strata ``first`` (inclusive) to ``end`` (exclusive)."""
        pieces = [
            self._drawn(group)[max(first - group * DRAWN, 0) : end - group * DRAWN]
            for group in range(first // DRAWN, -(-end // DRAWN))
        ]
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)

    def _drawn(self, group: int) -> Positions:
        strata = np.arange(group * DRAWN, min((group + 1) * DRAWN, self.number) + 1)
        bounds = strata * self.num_values // self.number
        lengths = np.diff(bounds)
        key = np.array([self._seed >> 64, group], dtype=np.uint64)
        drawn = np.random.Generator(np.random.Philox(key=key)).random(len(lengths))
        within = np.minimum((drawn * lengths).astype(np.int64), lengths - 1)
        positions: Positions = bounds[:-1] + within
        return positions

    def gather(self, values_P: Tensor) -> Tensor:
        """Return the values at the positions [k], and set them to zero in the vector."""
        values = values_P.numpy()
        gathered_K = np.empty(self.number, dtype=np.float32)
        for first in range(0, self.number, DRAWN):
            at = self.positions(first, min(first + DRAWN, self.number))
            gathered_K[first : first + len(at)] = values[at]
            values[at] = 0.0
        return torch.from_numpy(gathered_K)

    def scatter_add(self, values_K: Tensor, values_P: Tensor) -> None:
        """Add values [k] to the coordinates of a vector at the positions."""
        source, target = values_K.numpy(), values_P.numpy()
        for first in range(0, self.number, DRAWN):
            at = self.positions(first, min(first + DRAWN, self.number))
            target[at] += source[first : first + len(at)]

    def strata(self, low: int, high: int) -> tuple[int, int]:
        """Return the strata with coordinates from ``low`` (inclusive) to ``high`` (exclusive)."""
        if low >= high:
            return 0, 0
        number, num_values = self.number, self.num_values
        first = ((low + 1) * number - 1) // num_values
        last = (high * number - 1) // num_values
        return first, min(last + 1, number)


def encode_random(values_P: Tensor, positions: SharedPositions) -> bytearray:
    """Return the values at the positions; ``values_P`` becomes what was not sent."""
    gathered_K = positions.gather(values_P)
    data = encode_bfloat16(gathered_K)
    positions.scatter_add(gathered_K, values_P)
    return data


def decoded_random(data: memoryview, positions: SharedPositions) -> EncodedVector:
    """Return a vector of which the values at the positions were sent; the others are zero."""
    codes = np.frombuffer(data, "<u2", positions.number)

    def decode(low: int, high: int) -> Floats:
        decoded = np.zeros(high - low, dtype=np.float32)
        first, end = positions.strata(low, high)
        at = positions.positions(first, end) - low
        is_within = (at >= 0) & (at < high - low)
        wide = (codes[first:end].astype(np.uint32) << 16).view(np.float32)
        decoded[at[is_within]] = wide[is_within]
        return decoded

    return EncodedVector(positions.num_values, decode)
