"""The bit with which a device tells, under noise, whether its vector was within the clip norm.

From the share of such vectors the server follows a quantile of the norms: Andrew, Thakkar, McMahan
and Ramaswamy, "Differentially Private Learning with Adaptive Clipping" (2021), algorithm 1. A bit
is encoded as +1 (within the clip norm) or -1 (beyond it), where a device that is not in the sum
adds 0, so that its sensitivity is 1; that is the paper's bit less 1/2, twice. In steps of 2^-f it
is an integer, and gets discrete Gaussian noise of its own, of z_b in the sum. Vector and bit
together cost what a round of noise multiplier z costs (``PrivacyTerms.vector_multiplier``):

    1 / z^2 = 1 / z_v^2 + 1 / z_b^2,    z_b = max(n / 10, 4 z) for n devices.

The paper has z_b = n / 10: the estimated share of n devices then has a standard deviation of 0.05.
Where z is large, as it is without sampling, that would cost more than the round has; the bit takes
a sixteenth of the round's zCDP at most, and the vector's noise grows by at most 3.3 %.

Worked example: n = 100, z = 10. z_b = 40, so the share has a standard deviation of 40 / 200 = 0.2,
and one round's noise moves the clip norm by a factor of about exp(0.2 x 0.2) = 1.04.
"""

from __future__ import annotations

import math

from headwater.common.privacy.discrete_gaussian import sigma_above
from headwater.common.privacy.terms import PrivacyTerms
from headwater.common.secagg.masked_numbers import CLIP_BIT
from headwater.common.secagg.scalar_encoding import Scalar

BIT_BITS = 24
"""The noise of a bit has a standard deviation of about 2^24 steps, if one party adds it."""

MAX_COST_ROOT = 4.0  # z_b >= 4 z: at most 1/16 of a round's zCDP
DEVICES_PER_MULTIPLIER = 10
LARGEST_MULTIPLIER = 1e6
RATE = 0.2
"""How fast the clip norm follows: eta in the paper, which recommends 0.2."""
MIN_CLIP, MAX_CLIP = 1e-15, 1e15
# A bound of 2^-40 on the probability that a device's noise is larger than so many deviations.
TAIL = 8.0


def bit_multiplier_of(noise_multiplier: float, *, num_devices: int) -> float:
    """Return z_b of a round of ``num_devices`` whose vectors and bits together have this noise."""
    fewest = MAX_COST_ROOT * noise_multiplier
    return max(fewest, min(num_devices / DEVICES_PER_MULTIPLIER, LARGEST_MULTIPLIER))


def bit_steps(terms: PrivacyTerms) -> int:
    """Return 2^f, the integer that a bit of +1 is encoded as."""
    return 1 << _scale_bits(terms)


def bit_sigma(terms: PrivacyTerms, *, num_noisy: int = 1) -> int:
    """Return the parameter of the noise that each of ``num_noisy`` parties adds to the bits' sum.

    Raises:
        MaskingTooWeak: it would be too large to draw.
    """
    assert terms.bit_multiplier is not None
    return sigma_above(terms.bit_multiplier * bit_steps(terms) / math.sqrt(num_noisy))


def bit_scalar(terms: PrivacyTerms, *, num_devices: int) -> Scalar:
    """Return the masked number of a session; its bound has room for a device's noise.

    Raises:
        RingCanWrap: so many devices do not fit into 64 bits (over 2^35).
    """
    assert terms.bit_multiplier is not None
    return Scalar(
        name=CLIP_BIT,
        bound=1 + TAIL * terms.bit_multiplier,
        scale_bits=_scale_bits(terms),
        num_devices=num_devices,
    )


def _scale_bits(terms: PrivacyTerms) -> int:
    assert terms.bit_multiplier is not None
    return max(BIT_BITS - math.frexp(max(terms.bit_multiplier, 1.0))[1], 0)


def next_clip(clip: float, *, share: float, quantile: float) -> float:
    """Return the next round's clip norm: C exp(-eta (b - gamma)), equation 2 of the paper.

    ``share`` is the noisy share b of the vectors that were within the clip norm C, and ``quantile``
    gamma, the share that should be. With much noise b may be far outside of 0..1: no step is larger
    than a factor of exp(eta) = 1.22, in both directions alike.
    """
    step = min(max(share - quantile, -1.0), 1.0)
    return min(max(clip * math.exp(-RATE * step), MIN_CLIP), MAX_CLIP)
