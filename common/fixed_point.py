"""Fixed point: how sums of float32 become elements of a ring and back, and with what error.

(to be written out)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

RingBits = Literal[16, 32]
RingVector: TypeAlias = NDArray[np.uint16] | NDArray[np.uint32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoding:
    """How a coordinate enters the ring: the integer nearest to x 2^scale_bits, two's complement.

    ``clip`` is c, the bound of a coordinate per unit of weight; ``max_weight`` is W, the largest
    weight that the round's plans allow in all. Made only if the cohort's sum cannot wrap.

    Raises:
        RingCanWrap: W c 2^f >= 2^(ring_bits - 1).
    """

    ring_bits: RingBits
    scale_bits: int
    clip: float
    max_weight: int


def plan_encoding(*, max_weight: int, clip: float, ring_bits: RingBits = 32) -> Encoding:
    """Return the encoding of the finest power-of-two scale that cannot wrap."""
    raise NotImplementedError


def encode_in_place(
    values_P: Tensor,
    *,
    weight: int,
    encoding: Encoding,
    random: np.random.Generator | None = None,
) -> tuple[RingVector, int]:
    """Write the ring's elements over the vector's own memory; return them and how many it clipped.

    With 32 bits the elements fill the memory, with 16 bits its first half. Each coordinate is
    clipped at weight x clip (at the whole step below). ``random`` draws the stochastic rounding of
    a 16-bit ring and is not looked at otherwise. The float32 values are gone afterwards.

    Raises:
        NonFiniteUpdate: a NaN or an infinity; nothing was changed.
        CountOutOfRange: the weight is not in 1..max_weight; nothing was changed.
    """
    raise NotImplementedError


def decode(total: RingVector, encoding: Encoding) -> NDArray[np.float64]:
    """Return the cohort's sum, exactly, in float64."""
    raise NotImplementedError


def decode_mean(
    total: RingVector, *, encoding: Encoding, weight: int, out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """Return the cohort's sum over its weight, in float32, in chunks.

    Without ``out`` a 32-bit total's own memory takes the mean (the total is gone afterwards), and a
    16-bit total's mean is new memory.
    """
    raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True)
class Scalar:
    """How one number rides along: an element of the 64-bit ring, of its own range and resolution.

    ``bound`` is the largest absolute value that one device may tell. A count (``scale_bits`` 0 and
    ``is_count``) outside 0..bound is refused; any other number is clipped at the bound and counted.

    Raises:
        RingCanWrap: num_devices x bound x 2^scale_bits >= 2^63.
    """

    name: str
    bound: float
    scale_bits: int
    num_devices: int
    is_count: bool = False


def plan_scalar(name: str, *, bound: float, num_devices: int, is_count: bool = False) -> Scalar:
    """Return the finest encoding of one number that cannot wrap (whole steps for a count)."""
    raise NotImplementedError


def encode_scalars(
    values: Mapping[str, float | int], scalars: Sequence[Scalar]
) -> tuple[NDArray[np.uint64], int]:
    """Return one ring element for each scalar, in their order, and how many were clipped.

    Raises:
        NonFiniteUpdate: a NaN or an infinity.
        CountOutOfRange: a count outside its range, or no whole number.
    """
    raise NotImplementedError


def decode_scalars(total: NDArray[np.uint64], scalars: Sequence[Scalar]) -> dict[str, float]:
    """Return the cohort's sums by name; counts are whole numbers, exact up to 2^53."""
    raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipState:
    """What the clip bound follows: the bound in force and the largest mean coordinate ever seen."""

    clip: float
    largest_mean: float = 0.0


def follow_clip(state: ClipState, *, largest_mean: float, num_clipped: int) -> ClipState:
    """Return the next round's clip bound, from a round's largest |mean coordinate| and its clips.

    Never under 16 times the largest mean coordinate seen.
    """
    raise NotImplementedError
