"""Correlated noise: the banded square root of the prefix sums, in whole numbers.

Training uses the sums of all rounds so far, so noise that later rounds partly take back disturbs it
less (DP-FTRL: Kairouz et al., "Practical and Private (Deep) Learning without Sampling or
Shuffling", 2021). Let C be the lower triangular Toeplitz matrix of the coefficients c_0, c_1, ...,
c_(b-1), and 0 beyond them. What is released is y = C X + Z, with independent noise Z; everything
else follows from y, above all the sums X + C^-1 Z. The c_k = binom(2k, k) / 4^k are those of the
square root of the prefix sums (Fichtenberger, Henzinger and Upadhyay, "Constant matters", 2023),
cut off after b bands (Choquette-Choo et al., "(Amplified) Banded Matrix Factorization", 2023). A
device that takes part k times, any two of them at least b rounds apart, changes columns of C that
have no row in common: the sensitivity is sqrt(k) |c| D, where D is that of one sum.

All of it is exact in integers. The coefficients are rounded to 64ths, which still is a
factorisation, X are integers, and Z are draws of the discrete Gaussian. With W for what a round's
sum gets (so that X + W is used), a function of y and the sums that were released before is

    X_t + W_t = round((y_t - sum over k >= 1 of c_k (X_(t-k) + W_(t-k))) / c_0),
    hence  W_t = round((Z_t - sum over k >= 1 of c_k W_(t-k)) / c_0),

as X_t is an integer. So the rounding is that of released figures, and costs no privacy. Inputs may
depend on earlier outputs: each y_t has fresh noise, and the zCDP of all of them together never
exceeds k |c|^2 D^2 / 2 s^2, which is what composition with a filter needs (Feldman and Zrnic 2021).

Worked example: b = 16, |c| = 1.39; over 200 rounds the prefix sums' error is 2.9 times smaller
(root of the mean square) than that of independent noise at the same epsilon, and one round's own
noise is 1.6 times larger.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from headwater.common.privacy.discrete_gaussian import MAX_SIGMA, sigma_above
from headwater.common.privacy.noise_shares import sensitivity
from headwater.common.privacy.terms import PrivacyTerms

COEFFICIENT_BITS = 6
"""The coefficients are whole numbers of 2^-6; c_0 is 1."""

SIGMA_BITS = MAX_SIGMA.bit_length() - 2
"""Z has a standard deviation of about 2^28 to 2^29 steps."""


def coefficients(bands: int) -> tuple[int, ...]:
    """Return c_0 .. c_(b-1) in steps of 2^-COEFFICIENT_BITS."""
    unit = 1 << COEFFICIENT_BITS
    return tuple(
        (2 * unit * math.comb(2 * k, k) + 4**k) // (2 * 4**k)  # to nearest
        for k in range(bands)
    )


def norm(bands: int) -> float:
    """Return |c|, the L2 norm of a column of C, in the steps of ``coefficients``."""
    return math.sqrt(sum(c * c for c in coefficients(bands)))


def banded_scale_bits(terms: PrivacyTerms, *, bands: int) -> int:
    """Return f: the sums are made in steps of 2^-f."""
    largest = terms.noise_multiplier * norm(bands) * terms.unit_bound
    return SIGMA_BITS - math.frexp(largest)[1]


def banded_sigma(terms: PrivacyTerms, *, bands: int, scale_bits: int, num_values: int) -> int:
    """Return s, the parameter of the independent noise Z.

    Each time that a device takes part costs it rho = |c|^2 D^2 / (2 s^2), at most 1 / (2 z^2) for
    the terms' noise multiplier z: as in rounds with independent noise.

    Raises:
        MaskingTooWeak: it is too large to draw.
    """
    bound = sensitivity(terms, scale_bits=scale_bits, num_values=num_values)
    return sigma_above(terms.noise_multiplier * norm(bands) * bound)


def correlated(
    fresh: NDArray[np.int64], before: Iterable[NDArray[np.int32]], multiples: Sequence[int]
) -> NDArray[np.int64]:
    """Return W_t of Z_t (``fresh``, which is overwritten) and W_(t-1), W_(t-2), ...; see above."""
    for multiple, earlier in zip(multiples[1:], before, strict=False):
        fresh -= multiple * earlier.astype(np.int64)
    fresh += 1 << (COEFFICIENT_BITS - 1)
    fresh >>= COEFFICIENT_BITS
    return fresh
