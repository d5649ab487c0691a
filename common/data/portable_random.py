"""Random numbers that are the same on every machine, in every process and under every numpy.

numpy promises that the raw stream of PCG64 stays what it is for a seed, and promises nothing of
its distributions (NEP 19). So everything here is worked out from the raw stream, by whole numbers
and by sums, products and quotients of doubles, which IEEE 754 rounds alike everywhere. Only
``normals`` and ``gamma`` take a logarithm or a cosine, in whose last bit machines differ: who
rounds what they give to coarser steps gets the same on all, but for a chance of one in millions.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

Whole = NDArray[np.int64]
Shares = NDArray[np.float64]


class Chance:
    """A stream of random numbers with a name: any seed, words and numbers."""

    def __init__(self, *name: object) -> None:
        text = "\x1f".join(str(part) for part in name)
        digest = hashlib.sha256(text.encode()).digest()
        self._bits = np.random.PCG64(int.from_bytes(digest[:16], "little"))

    def shares(self, count: int) -> Shares:
        """Return numbers of 53 bits, evenly from [0, 1)."""
        return np.asarray((self._bits.random_raw(count) >> np.uint64(11)) * 2.0**-53)

    def below(self, bounds: int | Whole, count: int) -> Whole:
        """Return whole numbers of 0 <= number < bound, with a bound for all or for each.

        Bounds are below 2^53, and at least 1. A share is at most 1 - 2^-53, and its product with a
        bound rounds to less than the bound, so the bound itself is never reached.
        """
        return (self.shares(count) * bounds).astype(np.int64)

    def order(self, count: int) -> Whole:
        """Return a permutation of 0 to count - 1."""
        return np.argsort(self._bits.random_raw(count), kind="stable")

    def some(self, count: int, population: int) -> Whole:
        """Return ``count`` different numbers below ``population``, in time that follows the count.

        Drawn one after another, and again where a number came before: so each set is as likely.
        """
        if 4 * count >= population:
            return self.order(population)[:count]
        found: dict[int, None] = {}
        while len(found) < count:
            drawn = self.below(population, count - len(found))
            found.update(dict.fromkeys(drawn.tolist()))
        return np.fromiter(found, dtype=np.int64, count=count)

    def normals(self, count: int) -> Shares:
        """Return numbers of the standard normal distribution (Box and Muller 1958)."""
        radius = np.sqrt(-2 * np.log(1 - self.shares(count)))
        return np.asarray(radius * np.cos(2 * math.pi * self.shares(count)))

    def gamma(self, shape: float) -> float:
        """Return a number of Gamma(shape, 1), of 0.001 or more (Marsaglia and Tsang 2000)."""
        if shape < 1:
            # Their section 6: Gamma(a) is Gamma(a + 1) U^(1/a). For a small shape it may come to 0.
            return self.gamma(shape + 1) * math.pow(1 - self.shares(1)[0], 1 / shape)
        d = shape - 1 / 3
        while True:
            x = float(self.normals(1)[0])
            v = (1 + x / math.sqrt(9 * d)) ** 3
            u = 1 - float(self.shares(1)[0])
            if v > 0 and math.log(u) < x * x / 2 + d - d * v + d * math.log(v):
                return d * v
