"""Single numbers that ride masked beside the vector: weight, loss, metrics, norms, clips.

Each is one element of a ring of 64 bits, of its own public range and resolution. The alternative,
several 32-bit limbs a number, would tell the server each limb's sum, and so the carries between
them, which is more than the number's sum. One element of 64 bits tells that sum and no more.

A number v enters as the integer nearest to v 2^f, in two's complement, within the bound B 2^f. The
sum of n devices is below 2^63 and cannot wrap, as n B 2^f < 2^63 is checked first; it is off by at
most n 2^-(f+1), and by one rounding to float64.

A worked number: 100 devices with losses up to 2^30 each. n B < 2^37, so f = 26; the sum of 100
losses is off by at most 100 x 2^-27 = 7.5e-7. A count has f = 0 and is exact: 100 counts up to 2^53
are below 2^60.

A number outside its range would say something of its device if the range were widened for it, so it
is clipped, and the clips are counted, themselves under a mask. A count is never clipped: it is what
the sum is divided by. It is refused instead, and a refusal is seen: whoever lets another choose the
bounds must take none as a count whose range it does not know. No error here quotes a number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from headwater.common.errors import CountOutOfRange, NonFiniteUpdate, RingCanWrap
from headwater.common.secagg.fixed_point import exponent_above

RING_BITS = 64
# Beyond it a double of size 1 has no further bits; the result is scaled by a float in range.
LARGEST_SCALE_BITS = 52
# Coarse enough for the largest float there is; 2 to a power without a bound could fill the memory.
LEAST_SCALE_BITS = -1100


@dataclass(frozen=True, kw_only=True, slots=True)
class Scalar:
    """How one number enters the ring of 64 bits.

    ``bound`` is the largest absolute value that one device may tell, of at most ``num_devices``.

    Raises:
        RingCanWrap: num_devices x bound x 2^scale_bits >= 2^63.
        ValueError: a bound that is not finite and positive, a scale that is not in -1,100..52, or a
            count with another scale than 0.
    """

    name: str
    bound: float
    scale_bits: int
    num_devices: int
    is_count: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.bound < math.inf or self.num_devices < 1:
            raise ValueError(f"{self.name}: {self.bound} of {self.num_devices} devices is no bound")
        if not LEAST_SCALE_BITS <= self.scale_bits <= LARGEST_SCALE_BITS:
            raise ValueError(f"{self.name}: no number is told in steps of 2^{-self.scale_bits}")
        if self.is_count and self.scale_bits:
            raise ValueError(f"{self.name}: counts are encoded as they are, not by a scale")
        total = Fraction(self.bound) * self.num_devices * Fraction(2) ** self.scale_bits
        if total >= 1 << (RING_BITS - 1):
            raise RingCanWrap(
                f"{self.name}: {self.num_devices} numbers up to {self.bound:g}, in steps of "
                f"2^{-self.scale_bits}, might reach 2^{RING_BITS - 1}"
            )


def plan_scalar(name: str, *, bound: float, num_devices: int, is_count: bool = False) -> Scalar:
    """Return the finest encoding of one number that cannot wrap; a count's steps are 1.

    Raises:
        RingCanWrap: a count whose sum might.
        ValueError: see ``Scalar``.
    """
    scale_bits = 0
    if not is_count and 0 < bound < math.inf:
        scale_bits = RING_BITS - 1 - exponent_above(Fraction(bound) * max(num_devices, 1))
    return Scalar(
        name=name,
        bound=bound,
        scale_bits=min(scale_bits, LARGEST_SCALE_BITS),
        num_devices=num_devices,
        is_count=is_count,
    )


def encode_scalars(
    values: Mapping[str, float | int], scalars: Sequence[Scalar]
) -> tuple[NDArray[np.uint64], int]:
    """Return one ring element for each scalar, in their order, and how many were clipped.

    Raises:
        NonFiniteUpdate: a NaN or an infinity.
        CountOutOfRange: a count that is no whole number in 0..bound.
        ValueError: the names are not those of the scalars.
    """
    if len(values) != len(scalars) or {scalar.name for scalar in scalars} != set(values):
        raise ValueError(f"{sorted(values)} are not {[scalar.name for scalar in scalars]}")
    encoded = [_encoded(values[scalar.name], scalar) for scalar in scalars]
    elements = [steps % (1 << RING_BITS) for steps, _ in encoded]
    return np.array(elements, dtype=np.uint64), sum(is_clipped for _, is_clipped in encoded)


def _encoded(value: float | int, scalar: Scalar) -> tuple[int, bool]:
    """Return one number in steps, and whether it was clipped."""
    if not math.isfinite(value):
        raise NonFiniteUpdate(f"{scalar.name} is not finite")
    if scalar.is_count and not (0 <= value <= scalar.bound and value == int(value)):
        raise CountOutOfRange(f"{scalar.name} is not a count up to {scalar.bound:,.0f}")
    scale = Fraction(2) ** scalar.scale_bits
    most = math.floor(Fraction(scalar.bound) * scale)
    steps = round(Fraction(value) * scale)
    return min(max(steps, -most), most), abs(steps) > most


def decode_scalars(total: NDArray[np.uint64], scalars: Sequence[Scalar]) -> dict[str, float]:
    """Return the cohort's sums by name; counts are whole numbers, exact up to 2^53.

    Raises:
        ValueError: another number of elements than of scalars.
    """
    steps = total.view(np.int64).tolist()
    return {
        scalar.name: math.ldexp(value, -scalar.scale_bits)
        for scalar, value in zip(scalars, steps, strict=True)
    }
