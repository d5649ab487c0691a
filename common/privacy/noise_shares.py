"""How much discrete Gaussian noise each party adds to a sum of integers, and where it fits.

A clipped vector v, |v| <= B, becomes the integers nearest to v 2^f, whose L2 norm is at most

    D = B 2^f + sqrt(P) / 2,

the sensitivity: replacing one device's vector by zero changes the integers' sum by at most D. With
noise of s = z D in the sum it is zCDP with rho = 1 / (2 z^2).

If the unit is an example, a device adds n gradients of |g| <= b in float32. Replacing one by zero
changes the true sum by at most b. Each of the n sums on the way, of a norm of at most k b, is
rounded by up to 2^-24 of it, with the example and without; and so are both vectors, to integers:

    D = b (1 + 2^-24 n (n + 1)) 2^f + sqrt(P).

* In a plain round the server adds all of it.
* Under masks each device adds its share, s_i = ceil(z D / sqrt(m)), where m is the number of honest
  devices among the fewest survivors that a session accepts. With more survivors there is more
  noise. The sum of m discrete Gaussians is not quite one: by Kairouz, Liu and Steinke, "The
  Distributed Discrete Gaussian Mechanism for Federated Learning" (2021), theorem 1, rho grows by at
  most tau P / 4 with tau = 10 sum over k < m of exp(-2 pi^2 s_i^2 k / (k + 1)). Shares below
  ``MIN_SHARE`` are refused, so tau is below 10 m exp(-631): less than float64 can add to rho.

Noise may be larger than the room in the ring. Wrapping around costs no privacy, because it is a
function of the sum with its noise alone; it would ruin the step. ``private_clip`` leaves so much
room that any coordinate of a sum wraps with a probability of at most 2^-40.

Worked example: 100 devices, P = 10^6, B = 1, z = 1, a least of 70 survivors of whom 10 collude, so
m = 60: f = 24 and D = 2^24 + 500; each share has s_i = D / sqrt(60) = 2.2 million steps. If all 100
survive, the 90 honest ones have 1.22 times the noise of the plan.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection

from headwater.common.errors import CohortTooSmall, MaskingTooWeak, RingCanWrap
from headwater.common.privacy.clip_bit import bit_sigma, bit_steps
from headwater.common.privacy.discrete_gaussian import sigma_above
from headwater.common.privacy.terms import PrivacyTerms, joint_multiplier
from headwater.common.secagg.fixed_point import Encoding
from headwater.common.secagg.graph import ceil_fraction

MIN_SHARE = 8
WRAP_BITS = 40
FLOAT32_ROUNDING = 2.0**-24
CLIP_MARGIN = 1.03  # for rounding the vectors and the shares up; ``check_room`` checks the result
PLAIN_BITS = 24
"""A plain sum is made in steps of which about 2^24 are the noise's standard deviation."""


def num_colluding(terms: PrivacyTerms, num_members: int) -> int:
    """Return how many members are assumed to subtract their own noise: at least one.

    In a small session of a large round as many as in the whole round: the server says which clients
    a session has.
    """
    return max(terms.min_colluding, ceil_fraction(terms.corrupted, num_members))


def num_noisy(terms: PrivacyTerms, num_members: int) -> int:
    """Return m, the honest devices among the fewest survivors of ``num_members`` (U2).

    Raises:
        CohortTooSmall: there would be none.
    """
    least = ceil_fraction(terms.min_survivors, num_members)
    number = least - num_colluding(terms, num_members)
    if number < 1:
        raise CohortTooSmall(
            f"of {num_members} members with masks {least} may survive, and "
            f"{num_colluding(terms, num_members)} may know their own noise: none is left to hide "
            "the sum",
            remedy="invite more devices, or raise secure.min_survivors",
        )
    return number


def sensitivity(terms: PrivacyTerms, *, scale_bits: int, num_values: int) -> float:
    """Return D, how far a unit moves a device's integers in L2, in steps of 2^-``scale_bits``."""
    steps = math.ldexp(terms.unit_bound, scale_bits)
    if terms.unit == "device":
        return steps + math.sqrt(num_values) / 2
    number = terms.max_examples
    return steps * (1 + FLOAT32_ROUNDING * number * (number + 1)) + math.sqrt(num_values)


def share_sigma(terms: PrivacyTerms, *, scale_bits: int, num_values: int, num_members: int) -> int:
    """Return s_i, the parameter of each device's noise under masks; U2 has ``num_members``.

    Raises:
        CohortTooSmall: see ``num_noisy``.
        MaskingTooWeak: the ring's steps are too coarse for so little noise, or far too fine.
    """
    bound = sensitivity(terms, scale_bits=scale_bits, num_values=num_values)
    sigma = sigma_above(terms.vector_multiplier * bound / math.sqrt(num_noisy(terms, num_members)))
    if sigma < MIN_SHARE:
        raise MaskingTooWeak(
            f"each device's noise would be {sigma} steps of the ring, at least {MIN_SHARE} are due"
        )
    return sigma


def bit_share_sigma(terms: PrivacyTerms, *, num_members: int) -> int:
    """Return the parameter of each device's noise on the bits' sum; U2 has ``num_members``.

    Raises:
        CohortTooSmall, MaskingTooWeak: see ``share_sigma``.
    """
    sigma = bit_sigma(terms, num_noisy=num_noisy(terms, num_members))
    if sigma < MIN_SHARE:
        raise MaskingTooWeak(f"each device's noise on the bits would be {sigma} steps")
    return sigma


def plain_scale_bits(terms: PrivacyTerms) -> int:
    """Return f of a plain sum with noise."""
    return PLAIN_BITS - math.frexp(max(terms.vector_multiplier, 1.0) * terms.unit_bound)[1]


def plain_sigma(terms: PrivacyTerms, *, scale_bits: int, num_values: int) -> int:
    """Return s, the parameter of the noise that the server adds to a plain sum."""
    bound = sensitivity(terms, scale_bits=scale_bits, num_values=num_values)
    return sigma_above(terms.vector_multiplier * bound)


def statistics_sigma(
    terms: PrivacyTerms, *, scale_bits: int, num_values: int, max_examples: int
) -> int:
    """Return s of the noise that the server adds to sums of at most so many examples of a device.

    They are made in float64 and rounded once to float32, with the example and without it.
    """
    rounding = 2 * FLOAT32_ROUNDING * max_examples if terms.unit == "example" else 0.0
    steps = math.ldexp(terms.unit_bound, scale_bits) * (1 + rounding)
    return sigma_above(terms.noise_multiplier * (steps + math.sqrt(num_values)))


def opened_multiplier(
    terms: PrivacyTerms, *, scale_bits: int, num_values: int, num_members: int, num_survivors: int
) -> float:
    """Return the noise multiplier of an opened sum: of its honest survivors' shares.

    At least the one in the terms, and more if more devices survived than had to. With bits on the
    clip norm it counts both sums.
    """
    sigma = share_sigma(
        terms, scale_bits=scale_bits, num_values=num_values, num_members=num_members
    )
    honest = math.sqrt(max(num_survivors - num_colluding(terms, num_members), 0))
    bound = sensitivity(terms, scale_bits=scale_bits, num_values=num_values)
    multiplier = sigma * honest / bound
    if terms.bit_multiplier is None:
        return multiplier
    share = bit_share_sigma(terms, num_members=num_members)
    return joint_multiplier(multiplier, share * honest / bit_steps(terms))


def private_clip(
    terms: PrivacyTerms, planned_weights: Collection[int], num_values: int, *, num_sums: int = 1
) -> float:
    """Return c for ``plan_encoding``: no device's vector is clipped, and sum and noise fit.

    ``num_sums`` sessions may share the planned weights: their sums, each with its noise, are added.
    """
    number, bound = len(planned_weights), terms.norm_bound
    variance = num_sums * _most_noise(terms, number)
    noise = _tail(num_values) * terms.vector_multiplier * math.sqrt(variance)
    largest = bound * number + sensitivity(terms, scale_bits=0, num_values=0) * noise
    per_weight = max(bound / min(planned_weights), largest / sum(planned_weights))
    return CLIP_MARGIN * per_weight


def check_room(
    terms: PrivacyTerms, encoding: Encoding, *, num_values: int, num_members: int
) -> None:
    """Check that the sum of so many vectors with their noise fits the ring, but for 2^-40.

    The discrete Gaussian is subgaussian: |sum| >= t has a probability of at most
    2 exp(-t^2 / (2 n s_i^2)) in each of P coordinates.

    Raises:
        RingCanWrap: it does not fit.
        CohortTooSmall, MaskingTooWeak: see ``share_sigma``.
    """
    bits = encoding.scale_bits
    sigma = share_sigma(terms, scale_bits=bits, num_values=num_values, num_members=num_members)
    largest = num_members * (math.ldexp(terms.norm_bound, bits) + 0.5)
    largest += _tail(num_values) * sigma * math.sqrt(num_members)
    if encoding.ring_bits != 32 or largest >= 2.0**31:
        raise RingCanWrap(
            f"{num_members} vectors of norm {terms.norm_bound:g} with noise may reach "
            f"{largest:.3g} steps, a ring of {encoding.ring_bits} bits does not hold it"
        )


def _tail(num_values: int) -> float:
    """Return t / s so that 2 P exp(-t^2 / 2 s^2) <= 2^-40."""
    return math.sqrt(2 * (math.log(2 * max(num_values, 1)) + WRAP_BITS * math.log(2)))


@functools.lru_cache(maxsize=64)
def _most_noise(terms: PrivacyTerms, num_members: int) -> float:
    """Return the largest n / m over the sizes that U2 may have: the noise's variance over z^2 D^2.

    Raises:
        CohortTooSmall: see ``num_noisy``; for ``num_members`` themselves.
    """
    ratio = num_members / num_noisy(terms, num_members)
    for size in range(3, num_members):
        honest = ceil_fraction(terms.min_survivors, size) - num_colluding(terms, size)
        ratio = max(ratio, size / honest if honest > 0 else 0.0)
    return ratio
