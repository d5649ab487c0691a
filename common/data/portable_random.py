"""Random numbers that are the same on every machine, in every process and with every numpy version.

numpy guarantees the raw stream of PCG64 for a seed, but not its distributions (NEP 19). So all
numbers here are computed from the raw stream with integers and with sums, products and quotients of
doubles, which IEEE 754 rounds alike everywhere. Only ``normals`` and ``gamma`` use a logarithm or a
cosine, whose last bit differs between machines: rounded to coarser steps, their results are the
same on all machines except with a probability of one in millions.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


class PortableRandom:
    """A stream of random numbers, seeded by any words and numbers."""

    def __init__(self, *name: object) -> None:
        text = "\x1f".join(str(part) for part in name)
        digest = hashlib.sha256(text.encode()).digest()
        self._bits = np.random.PCG64(int.from_bytes(digest[:16], "little"))

    def uniform(self, count: int) -> FloatArray:
        """Return floats of 53 bits, uniform on [0, 1)."""
        return np.asarray((self._bits.random_raw(count) >> np.uint64(11)) * 2.0**-53)

    def integers(self, bounds: int | IntArray, count: int) -> IntArray:
        """Return integers with 0 <= integer < bound; one bound, or an array of ``count`` bounds.

        Bounds are from 1 to 2^53 - 1. A uniform number is at most 1 - 2^-53, and its product with a
        bound rounds to less than the bound, so the bound itself is never returned.
        """
        return (self.uniform(count) * bounds).astype(np.int64)

    def permutation(self, count: int) -> IntArray:
        """Return a permutation of 0 to count - 1."""
        return np.argsort(self._bits.random_raw(count), kind="stable")

    def sample(self, count: int, population: int) -> IntArray:
        """Return ``count`` distinct integers below ``population``, in time proportional to count.

        Duplicates are drawn again, so each set is equally likely.
        """
        if 4 * count >= population:
            return self.permutation(population)[:count]
        chosen: dict[int, None] = {}
        while len(chosen) < count:
            drawn = self.integers(population, count - len(chosen))
            chosen.update(dict.fromkeys(drawn.tolist()))
        return np.fromiter(chosen, dtype=np.int64, count=count)

    def normals(self, count: int) -> FloatArray:
        """Return standard normal floats (Box and Muller 1958)."""
        radius = np.sqrt(-2 * np.log(1 - self.uniform(count)))
        return np.asarray(radius * np.cos(2 * math.pi * self.uniform(count)))

    def gamma(self, shape: float) -> float:
        """Return a float of Gamma(shape, 1), shape >= 0.001 (Marsaglia and Tsang 2000)."""
        if shape < 1:
            # Their section 6: Gamma(a) is Gamma(a + 1) U^(1/a). With a small shape it may be 0.
            return self.gamma(shape + 1) * math.pow(1 - self.uniform(1)[0], 1 / shape)
        d = shape - 1 / 3
        while True:
            x = float(self.normals(1)[0])
            v = (1 + x / math.sqrt(9 * d)) ** 3
            u = 1 - float(self.uniform(1)[0])
            if v > 0 and math.log(u) < x * x / 2 + d - d * v + d * math.log(v):
                return d * v
