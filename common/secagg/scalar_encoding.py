"""Encodes what is masked beside the vector: weight, loss, metrics, norms, clips, named sums.

Each number is one element of a 64-bit ring, with its own public range and resolution. Several
32-bit limbs per number would show the server each limb's sum, and so the carries between them,
which is more than the number's sum. One 64-bit element reveals only that sum.

A number v is encoded as the integer nearest to v 2^f, in two's complement, within the bound B 2^f.
The sum of n devices cannot wrap, because n B 2^f < 2^63 is checked first; its error is at most
n 2^-(f+1), plus one rounding to float64.

Worked example: 100 devices with losses up to 2^30 each. n B < 2^37, so f = 26; the error of the sum
of 100 losses is at most 100 x 2^-27 = 7.5e-7. A count has f = 0 and is exact: 100 counts up to 2^53
are below 2^60.

Widening a range for one number would reveal something about its device, so a number outside its
range is clipped; the number of clips is itself masked. A count is never clipped, because the sum is
divided by it. It is refused instead, and a refusal is visible to the server: a device must not
accept a bound from the server for a count whose range it does not know. No error here quotes a
number.

The sums beside the model's (``LongSum``) are rows of such numbers. Their steps are those that the
plan's ``SumOf`` asks for, as where they are added in clear (``server.aggregation.extra_sums``), so
that an unmasked sum has the same bits; or the finest with which so many devices cannot wrap. A
value beyond its limit is cut to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwater.common.errors import CountOutOfRange, NonFiniteUpdate, RingCanWrap
from headwater.common.secagg.fixed_point import exponent_above
from headwater.common.terms import SumOf

RING_BITS = 64
# A double of size 1 has no more bits than this, and 2^52 is a float in range.
MAX_SCALE_BITS = 52
# Coarse enough for the largest float; 2 to an unbounded power could exhaust the memory.
MIN_SCALE_BITS = -1100


@dataclass(frozen=True, kw_only=True, slots=True)
class Scalar:
    """The encoding of one number in the 64-bit ring.

    ``bound`` is the largest absolute value of one device; there are at most ``num_devices``.

    Raises:
        RingCanWrap: num_devices x bound x 2^scale_bits >= 2^63.
        ValueError: a bound that is not finite and positive, a scale outside -1,100..52, or a count
            with another scale than 0.
    """

    name: str
    bound: float
    scale_bits: int
    num_devices: int
    is_count: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.bound < math.inf or self.num_devices < 1:
            raise ValueError(
                f"{self.name}: no bound of {self.bound} for {self.num_devices} devices"
            )
        if not MIN_SCALE_BITS <= self.scale_bits <= MAX_SCALE_BITS:
            raise ValueError(f"{self.name}: steps of 2^{-self.scale_bits} are out of range")
        if self.is_count and self.scale_bits:
            raise ValueError(f"{self.name}: a count has scale 0, not {self.scale_bits}")
        total = Fraction(self.bound) * self.num_devices * Fraction(2) ** self.scale_bits
        if total >= 1 << (RING_BITS - 1):
            raise RingCanWrap(
                f"{self.name}: {self.num_devices} numbers up to {self.bound:g}, in steps of "
                f"2^{-self.scale_bits}, might reach 2^{RING_BITS - 1}"
            )


def plan_scalar(name: str, *, bound: float, num_devices: int, is_count: bool = False) -> Scalar:
    """Return the finest encoding of one number that cannot wrap; a count's steps are 1.

    Raises:
        RingCanWrap: the sum of a count might wrap.
        ValueError: see ``Scalar``.
    """
    scale_bits = 0
    if not is_count and 0 < bound < math.inf:
        scale_bits = RING_BITS - 1 - exponent_above(Fraction(bound) * max(num_devices, 1))
    return Scalar(
        name=name,
        bound=bound,
        scale_bits=min(scale_bits, MAX_SCALE_BITS),
        num_devices=num_devices,
        is_count=is_count,
    )


def encode_scalars(
    values: Mapping[str, float | int], scalars: Sequence[Scalar]
) -> tuple[NDArray[np.uint64], int]:
    """Return one ring element per scalar, in their order, and the number of clips.

    Raises:
        NonFiniteUpdate: a NaN or an infinity.
        CountOutOfRange: a count is not an integer in 0..bound.
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
    max_steps = largest_steps(scalar)
    steps = round(Fraction(value) * Fraction(2) ** scalar.scale_bits)
    return min(max(steps, -max_steps), max_steps), abs(steps) > max_steps


def largest_sum(scalar: Scalar, num_devices: int) -> float:
    """Return the largest sum that ``decode_scalars`` returns for devices within their bound.

    It is decoded like a sum, so it is exact: rounding to float64 is monotone.
    """
    return math.ldexp(num_devices * largest_steps(scalar), -scalar.scale_bits)


def largest_steps(scalar: Scalar) -> int:
    """Return the largest magnitude of one device's number, in steps."""
    return math.floor(Fraction(scalar.bound) * Fraction(2) ** scalar.scale_bits)


def decode_scalars(total: NDArray[np.uint64], scalars: Sequence[Scalar]) -> dict[str, float]:
    """Return the cohort's sums by name; counts are exact integers up to 2^53.

    Raises:
        ValueError: the numbers of elements and scalars differ.
    """
    steps = total.view(np.int64).tolist()
    return {
        scalar.name: math.ldexp(value, -scalar.scale_bits)
        for scalar, value in zip(scalars, steps, strict=True)
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class LongSum:
    """The encoding of one sum: so many values, each in the 64-bit ring."""

    length: int
    value: Scalar


def plan_sums(asked: Mapping[str, SumOf], *, num_devices: int) -> tuple[LongSum, ...]:
    """Return the encodings of the sums that a plan asks for, in its order."""
    found = []
    for name, one in asked.items():
        finest = plan_scalar(name, bound=one.limit, num_devices=num_devices)
        value = replace(finest, scale_bits=min(finest.scale_bits, one.scale_bits))
        found.append(LongSum(length=one.length, value=value))
    return tuple(found)


def num_elements(sums: Sequence[LongSum]) -> int:
    """Return how many elements of the ring the sums have together."""
    return sum(one.length for one in sums)


def cut_to_limits(values_S: Tensor, asked: Mapping[str, SumOf]) -> None:
    """Cut an update's sums, one after the other, to their limits, in place; a NaN becomes 0."""
    limits_S = np.repeat([one.limit for one in asked.values()], [s.length for s in asked.values()])
    found_S = np.nan_to_num(values_S.numpy(), nan=0.0, posinf=np.inf, neginf=-np.inf)
    values_S.copy_(torch.from_numpy(np.clip(found_S, -limits_S, limits_S)))


def encode_sums(values_S: Tensor, sums: Sequence[LongSum]) -> NDArray[np.uint64]:
    """Return one ring element for each value; the values are within their limits."""
    values = values_S.numpy().astype(np.float64)
    start = 0
    for one in sums:
        values[start : start + one.length] *= 2.0**one.value.scale_bits
        start += one.length
    return np.rint(values).astype(np.int64).view(np.uint64)


def out_of_range(
    total_S: NDArray[np.uint64], sums: Sequence[LongSum], *, num_devices: int
) -> list[str]:
    """Return the names of the sums that are impossible for devices within their limits."""
    wrong = []
    for one, steps in zip(sums, _cut(total_S, sums), strict=True):
        most = num_devices * largest_steps(one.value)
        if int(steps.max(initial=0)) > most or int(steps.min(initial=0)) < -most:
            wrong.append(one.value.name)
    return wrong


def decode_sums(total_S: NDArray[np.uint64], sums: Sequence[LongSum]) -> dict[str, Tensor]:
    """Return the sums by name, in float64."""
    return {
        one.value.name: torch.from_numpy(steps.astype(np.float64) * 2.0**-one.value.scale_bits)
        for one, steps in zip(sums, _cut(total_S, sums), strict=True)
    }


def _cut(total_S: NDArray[np.uint64], sums: Sequence[LongSum]) -> list[NDArray[np.int64]]:
    ends = np.cumsum([one.length for one in sums])
    return np.split(total_S.view(np.int64), ends[:-1]) if sums else []
