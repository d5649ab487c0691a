"""Draws the discrete Gaussian exactly: integers k with probability proportional to exp(-k^2/2s^2).

The method is that of Canonne, Kamath and Steinke, "The Discrete Gaussian for Differential Privacy"
(2020), algorithm 3, in columns. A two-sided geometric proposal of scale s is accepted with the
probability exp(-(|k| - s)^2 / 2 s^2); about 0.76 of the proposals are. The random numbers are bits
of a ChaCha20 stream with a key from the operating system.

No float rounding enters the distribution, which matters: noise of ordinary floating-point code
has gaps that reveal the sum (Mironov, "On significance of the least significant bits for
differential privacy", 2012). A comparison of two reals is first made in float64 with a bound of its
error; where that cannot decide, it is repeated with as many decimal digits and further random bits
as it takes. That happens about once in ten million draws.
"""

from __future__ import annotations

import decimal
import math
import os
from collections.abc import Callable

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray

from headwater.common.errors import MaskingTooWeak

MAX_SIGMA = 1 << 30
"""Above it the float64 comparison would leave too much to the slow one."""

CHUNK = 1 << 14  # draws at a time: a few columns of 128 KiB stay in cache
KEY_BYTES = 32
WORD_BITS = 64

Integers = NDArray[np.int64]
Words = NDArray[np.uint64]
Bools = NDArray[np.bool_]


class RandomBits:
    """Uniform 64-bit words: the keystream of ChaCha20."""

    def __init__(self, random: Callable[[int], bytes] = os.urandom) -> None:
        """Take the key from ``random``, by default from the operating system."""
        algorithm = algorithms.ChaCha20(random(KEY_BYTES), bytes(16))
        self._stream = Cipher(algorithm, mode=None).encryptor()

    def words(self, number: int) -> Words:
        """Return the next words of the stream."""
        return np.frombuffer(self._stream.update(bytes(8 * number)), np.uint64)

    def word(self) -> int:
        """Return the next word of the stream."""
        return int(self.words(1)[0])


def sigma_above(value: float) -> int:
    """Return the least parameter that is no smaller than a standard deviation in float64.

    Raises:
        MaskingTooWeak: it is larger than MAX_SIGMA.
    """
    sigma = math.ceil(value * (1 + 2.0**-40))  # float64 rounds the value by less
    if sigma > MAX_SIGMA:
        raise MaskingTooWeak(f"noise of {sigma:,} steps is more than {MAX_SIGMA:,}: coarsen them")
    return sigma


def draw(sigma: int, number: int, bits: RandomBits) -> Integers:
    """Return independent draws of the discrete Gaussian with parameter ``sigma`` [number].

    Raises:
        ValueError: ``sigma`` is not in 1..MAX_SIGMA.
    """
    if not 1 <= sigma <= MAX_SIGMA:
        raise ValueError(f"no discrete Gaussian with sigma = {sigma}")
    drawn = np.empty(number, dtype=np.int64)
    done = 0
    while done < number:
        accepted = _accepted(sigma, min(int(1.33 * (number - done)) + 16, CHUNK), bits)
        taken = accepted[: number - done]
        drawn[done : done + len(taken)] = taken
        done += len(taken)
    return drawn


def _accepted(sigma: int, number: int, bits: RandomBits) -> Integers:
    """Return those of ``number`` proposals that are accepted."""
    first, second = bits.words(number), bits.words(number)
    sizes = _geometric(sigma, first, bits)
    is_negative = (second & np.uint64(1)).astype(np.bool_)
    is_accepted = _bernoulli_exp(sigma, sizes, second >> np.uint64(1), bits)
    is_accepted &= ~(is_negative & (sizes == 0))  # else zero would be drawn twice as often
    signed: Integers = np.where(is_negative, -sizes, sizes)
    return signed[is_accepted]


def _geometric(sigma: int, words: Words, bits: RandomBits) -> Integers:
    """Return floor(-sigma ln U) of the reals U whose first 64 bits are the words.

    P(floor(-sigma ln U) >= k) = P(U <= exp(-k / sigma)), which is a geometric distribution.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        wide = words.astype(np.float64)
        logs = -np.log(wide * 2.0**-WORD_BITS)
        exact = sigma * logs
        # The word is an interval of width 1, and was rounded to 53 bits; numpy's logarithm
        # is within 4 units in the last place. The bound is four times that.
        slack = sigma * (logs * 2.0**-48 + 2.0**-50 + 2.0 / wide)
        whole = np.floor(exact)
        is_open = ~((exact - whole > slack) & (whole + 1 - exact > slack))
        whole[is_open] = 0
    sizes: Integers = whole.astype(np.int64)
    for at in np.flatnonzero(is_open).tolist():
        sizes[at] = _exact_geometric(sigma, int(words[at]), bits)
    return sizes


def _bernoulli_exp(sigma: int, sizes: Integers, words: Words, bits: RandomBits) -> Bools:
    """Return, for each size k, True with probability exp(-(k - sigma)^2 / (2 sigma^2)).

    ``words`` have 63 random bits each.
    """
    distance = (sizes - sigma).astype(np.float64)
    chance = np.exp(distance * distance * (-0.5 / sigma**2))
    # Of x exp(-x) <= 0.37 each relative error of x, below 2^-50, costs as much; the rest is exp's
    # own error and the word's rounding.
    gap = words.astype(np.float64) * 2.0 ** -(WORD_BITS - 1) - chance
    is_true: Bools = gap < 0
    for at in np.flatnonzero(np.abs(gap) <= 2.0**-48).tolist():
        is_true[at] = _exact_bernoulli_exp(sigma, int(sizes[at]), int(words[at]), bits)
    return is_true


def _exact_geometric(sigma: int, word: int, bits: RandomBits) -> int:
    """Return floor(-sigma ln U) by as many digits and bits as it takes."""
    numerator, num_bits = word, WORD_BITS
    while True:
        with decimal.localcontext() as context:
            context.prec = digits = num_bits // 2 + 30
            error = decimal.Decimal(10) ** (15 - digits)
            one = decimal.Decimal(1)
            scale = decimal.Decimal(2) ** num_bits
            most = None if not numerator else -(numerator / scale * one).ln() * sigma
            least = -((numerator + 1) / scale * one).ln() * sigma
            if most is not None and math.floor(most + error) == math.floor(least - error):
                return math.floor(most)
        numerator, num_bits = numerator << WORD_BITS | bits.word(), num_bits + WORD_BITS


def _exact_bernoulli_exp(sigma: int, size: int, word: int, bits: RandomBits) -> bool:
    """Return whether U < exp(-(size - sigma)^2 / (2 sigma^2)), by as many digits as it takes."""
    numerator, num_bits = word, WORD_BITS - 1
    distance = size - sigma
    if distance == 0:
        return True
    while True:
        with decimal.localcontext() as context:
            context.prec = digits = num_bits // 2 + 30
            error = decimal.Decimal(10) ** (15 - digits)
            power = decimal.Decimal(distance * distance) / decimal.Decimal(2 * sigma * sigma)
            chance, scale = (-power).exp(), decimal.Decimal(2) ** num_bits
            if (numerator + 1) / scale < chance - error:
                return True
            if numerator / scale > chance + error:
                return False
        numerator, num_bits = numerator << WORD_BITS | bits.word(), num_bits + WORD_BITS
