"""Fixed-point encoding of float32 vectors in an integer ring, its clip bound and its error.

A coordinate x is encoded as the integer nearest to x 2^f, in two's complement modulo 2^32 (or
2^16, or 2^8), so that sums in the ring are sums of integers while the whole cohort's sum cannot
wrap. That is checked before anything is encoded: a device with a planned weight w clips each
coordinate at floor(w c 2^f) steps, whatever it has summed, and the planned weights add up to W, so
that |sum of all| <= sum of floor(w c 2^f) <= W c 2^f < 2^(ring_bits - 1).

Error of the sum if nothing was clipped (every clip is counted):

=========  =================================  ==========================
ring       rounding                           bound, for n devices
=========  =================================  ==========================
64, 32     to nearest, ties to even           n 2^-(f+1)
16, 8      stochastic, of expectation x 2^f   n 2^-f
any        stochastic, if it is coarse        n 2^-f
=========  =================================  ==========================

Worked example: 20 devices of 1,000 examples each, c = 1. W c = 20,000, so f = 16; the error of the
sum is at most 20 x 2^-17 = 1.5e-4, and of the mean 1.5e-4 / 20,000 = 7.6e-9. ``plan_encoding``
chooses the finest f, so 2^f >= 2^30 / (W c), and the error of the mean of a complete cohort is at
most n c 2^-31, whatever W is; for a cohort with a fraction s of its planned weight, 1/s of that.

Before any sum is known, no c is right for all tasks: a regression on targets of 10^6 has gradients
of 10^6 and more. The first vector of at most ``MAX_WIDE_VALUES`` is therefore summed in a ring of
64 bits with c = 2^36, whose error is at most n 2^-27.

With 16 bits c 2^f is about 2^15 / W: a device has w/W of 32,768 steps, with 8 bits w/W of 127. That
suffices only for coordinates of similar size, which is why ``common/secagg/hadamard_rotation.py``
rotates them first.

The scale and the clip bound are public. Nobody can see what a malicious device masks instead of an
update, nor whether it clips: it can move the sum to any value of the ring (out of scope, as all
poisoning is).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwater.common.errors import CountOutOfRange, NonFiniteUpdate, RingCanWrap
from headwater.common.model.vectors import all_finite

RingBits = Literal[8, 16, 32, 64]
RingVector: TypeAlias = (
    NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.uint32] | NDArray[np.uint64]
)
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}

# float32 holds 2^126 and its inverse as normal numbers, so scaling by 2^f does not round.
MAX_SCALE_BITS = 126
CHUNK = 1 << 15  # coordinates at a time: 128 KiB of float32 stay in cache

FIRST_CLIP = 2.0**8
"""c before any sum is known: a hundred times the usual coordinates of mean gradients."""
WIDE_RING: RingBits = 64
WIDE_CLIP = 2.0**36
MAX_WIDE_VALUES = 1 << 22
"""A wider ring takes 8 bytes a coordinate, once: 32 MiB here, and 2.8 GB of 350 million."""
MAX_BLIND_CLIP = 2.0**20
MIN_CLIP, MAX_CLIP = 2.0**-100, 2.0**100
"""Far above any coordinate of a mean gradient, and far below the resolution of float32.

A device refuses a session with a clip bound outside this range. ``follow_clip`` never leaves it,
whatever a malicious device does to a sum.
"""
FIRST_CLIP_ROOM = 256
MIN_CLIP_ROOM = 16
FINE_STEPS = 2**8
"""A vector whose largest coordinate has fewer is rounded stochastically."""
MAX_CLIP_ROOM = 1 << 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoding:
    """The encoding of coordinates; it can only be constructed if the cohort's sum cannot wrap.

    ``scale_bits`` is f; ``clip`` is c, the bound of a coordinate per unit of weight; ``max_weight``
    is W, the largest total weight that the round's plans allow.

    Raises:
        RingCanWrap: W c 2^f >= 2^(ring_bits - 1).
        ValueError: a clip that is not finite and positive, W < 1, or |f| > 126.
    """

    ring_bits: RingBits
    scale_bits: int
    clip: float
    max_weight: int

    def __post_init__(self) -> None:
        if self.ring_bits not in SIGNED or abs(self.scale_bits) > MAX_SCALE_BITS:
            raise ValueError(
                f"no ring of {self.ring_bits} bits with a scale of 2^{self.scale_bits}"
            )
        if not 0 < self.clip < math.inf or self.max_weight < 1:
            raise ValueError(f"c = {self.clip} and W = {self.max_weight} must be positive")
        if self._steps(self.max_weight) >= 1 << (self.ring_bits - 1):
            raise RingCanWrap(
                f"a sum of weight W = {self.max_weight:,} with coordinates up to c = {self.clip:g} "
                f"per unit, in steps of 2^{-self.scale_bits}, might reach 2^{self.ring_bits - 1}"
            )

    def bound(self, weight: int) -> int:
        """Return floor(w c 2^f), the largest integer that a device of this weight encodes."""
        return math.floor(self._steps(weight))

    def _steps(self, weight: int) -> Fraction:
        return Fraction(self.clip) * weight * Fraction(2) ** self.scale_bits


def plan_encoding(*, max_weight: int, clip: float, ring_bits: RingBits = 32) -> Encoding:
    """Return the encoding with the finest power-of-two scale that cannot wrap.

    Raises:
        ValueError: a clip that is not finite and positive, or W < 1.
        RingCanWrap: even steps of 2^126 are too fine.
    """
    if not 0 < clip < math.inf or max_weight < 1:
        raise ValueError(f"c = {clip} and W = {max_weight} must be positive")
    scale_bits = ring_bits - 1 - exponent_above(Fraction(clip) * max_weight)
    scale_bits = min(max(scale_bits, -MAX_SCALE_BITS), MAX_SCALE_BITS)
    return Encoding(ring_bits=ring_bits, scale_bits=scale_bits, clip=clip, max_weight=max_weight)


def exponent_above(value: Fraction) -> int:
    """Return the least e with value < 2^e, exactly, for a positive value."""
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if value < Fraction(2) ** exponent else exponent + 1


def encode_in_place(
    values_P: Tensor,
    *,
    weight: int,
    encoding: Encoding,
    random: np.random.Generator | None = None,
) -> tuple[RingVector, int]:
    """Overwrite the vector's memory with ring elements; return them and the number of clips.

    32-bit elements fill the memory, 16-bit elements its first half, 8-bit elements its first
    quarter; 64-bit elements are new memory, and the vector becomes zeros. A coordinate is clipped
    at ``encoding.bound(weight)`` steps, or the next smaller float32. With
    ``random`` the rounding is stochastic, as in a 16-bit or 8-bit ring always; there it is seeded
    from the system by default.

    Raises:
        NonFiniteUpdate: a NaN or an infinity; the vector is unchanged.
        CountOutOfRange: the weight is not in 0..max_weight; the vector is unchanged.
    """
    values = values_P.numpy()
    assert values.dtype == np.float32
    if not 0 <= weight <= encoding.max_weight:
        raise CountOutOfRange(
            f"an update's weight is not in the range of 0 to {encoding.max_weight:,} of the plans"
        )
    check_finite(values)
    generator = random or np.random.default_rng() if encoding.ring_bits < 32 else random
    is_wide = encoding.ring_bits == WIDE_RING
    memory = np.empty(len(values), dtype=np.int64) if is_wide else values
    signed = memory.view(SIGNED[encoding.ring_bits])[: len(values)]
    limit = _float32_not_above(encoding.bound(weight))
    scale = np.float32(2.0**encoding.scale_bits)
    scaled_C, steps_C = np.empty((2, min(CHUNK, len(values))), dtype=np.float32)
    num_clipped = 0
    for start in range(0, len(values), CHUNK):
        source = values[start : start + CHUNK]
        scaled, steps = scaled_C[: len(source)], steps_C[: len(source)]
        with np.errstate(over="ignore", under="ignore"):  # inf is clipped, underflow is 0
            np.multiply(source, scale, out=scaled)
        np.clip(scaled, -limit, limit, out=steps)
        num_clipped += int(np.count_nonzero(steps != scaled))
        _round(steps, fraction=scaled, random=generator)
        # Element i of the ring is at or before coordinate i, so it overwrites no unread value.
        np.copyto(signed[start : start + CHUNK], steps, casting="unsafe")
    if is_wide:
        values.fill(0.0)
    ring: RingVector = signed.view(UNSIGNED[encoding.ring_bits])
    return ring, num_clipped


def is_coarse(values_P: Tensor, encoding: Encoding) -> bool:
    """Whether even the largest coordinate of a vector has few steps of the ring.

    Rounded to nearest, most of its coordinates would be zero, though their sum over many devices is
    not; and a server that chooses such a ring would open the coordinates of the one larger vector.
    """
    if not values_P.numel():
        return False
    low, high = (bound.item() for bound in torch.aminmax(values_P))
    return 0 < max(high, -low) * 2.0**encoding.scale_bits < FINE_STEPS


def check_finite(values: NDArray[np.float32]) -> None:
    """Check that a vector can be encoded.

    Raises:
        NonFiniteUpdate: it has a NaN or an infinity.
    """
    if not all_finite(torch.from_numpy(values)):
        raise NonFiniteUpdate("the update has a NaN or an infinity and cannot be encoded")


def _round(
    steps: NDArray[np.float32],
    *,
    fraction: NDArray[np.float32],
    random: np.random.Generator | None,
) -> None:
    """Round in place: to nearest, or up with the probability of the fractional part.

    That probability is exact to 2^-24. ``fraction`` is scratch memory.
    """
    if random is None:
        np.rint(steps, out=steps)
        return
    np.copyto(fraction, steps)
    np.floor(steps, out=steps)
    np.subtract(fraction, steps, out=fraction)
    np.add(steps, random.random(len(steps), dtype=np.float32) < fraction, out=steps)


def _float32_not_above(bound: int) -> np.float32:
    """Return the largest float32 up to a bound; an integer, as all floats above 2^24 are."""
    limit = np.float32(bound)
    return limit if int(limit) <= bound else np.nextafter(limit, np.float32(0))


def decode(total: RingVector, encoding: Encoding) -> NDArray[np.float64]:
    """Return the sum that the ring's elements encode, exactly, in float64."""
    return np.ldexp(_signed(total).astype(np.float64), -encoding.scale_bits)


def decode_mean(
    total: RingVector, *, encoding: Encoding, weight: int, out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """Divide the cohort's sum by its weight, chunk by chunk, into float32.

    Without ``out`` the mean overwrites a 32-bit total's own memory (the total is lost), and the
    mean of any other total is new memory. Each coordinate is rounded once to float64 and once to
    float32: a relative error of 2^-24 in addition to that of the sum.

    Raises:
        ValueError: the weight is below 1.
    """
    if weight < 1:
        raise ValueError(f"a sum of weight {weight} has no mean")
    if out is None:
        fits = total.dtype == np.uint32
        out = total.view(np.float32) if fits else np.empty(len(total), dtype=np.float32)
    signed = _signed(total)
    divisor = math.ldexp(weight, encoding.scale_bits)
    for start in range(0, len(total), CHUNK):
        wide = signed[start : start + CHUNK].astype(np.float64)
        out[start : start + CHUNK] = np.divide(wide, divisor, out=wide)
    return out


def block_norms(total: RingVector, block: int) -> NDArray[np.float64]:
    """Return the Euclidean norm, in steps, of each ``block`` coordinates; the last may be fewer."""
    signed, starts = _signed(total), range(0, len(total), block)
    parts = (signed[start : start + block].astype(np.float64) for start in starts)
    return np.array([math.sqrt(np.dot(part, part)) for part in parts])


def _signed(total: RingVector) -> NDArray[np.signedinteger]:
    signed: NDArray[np.signedinteger] = total.view(total.dtype.str.replace("u", "i"))
    return signed


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipState:
    """The current clip bound, and the largest mean coordinate of all rounds so far."""

    clip: float = FIRST_CLIP
    largest_mean: float = 0.0

    @property
    def is_blind(self) -> bool:
        """Whether no sum is known yet from which a bound could follow."""
        return not self.largest_mean


def after_wide(state: ClipState, *, largest_mean: float) -> ClipState:
    """Return the bound after a sum in the wide ring: 256 to 512 times its largest coordinate.

    So a gradient may grow a hundred times in the first steps; the bound then halves each round, as
    ``follow_clip`` says. A sum of zeros tells nothing.
    """
    if not largest_mean:
        return state
    clip = math.ldexp(1, math.frexp(FIRST_CLIP_ROOM * largest_mean)[1])
    return ClipState(clip=min(max(clip, MIN_CLIP), MAX_CLIP), largest_mean=largest_mean)


def follow_clip(state: ClipState, *, largest_mean: float, num_clipped: int) -> ClipState:
    """Return the next round's clip bound, a power of two if the first was one.

    ``largest_mean`` is the largest absolute coordinate of the round's mean, ``num_clipped`` the
    number of clips. The bound halves each round, but never below 16 times the largest
    mean coordinate so far. If anything was clipped it doubles, up to 8,192 times that coordinate:
    devices that always clip, or claim to, cost a cohort of n no more accuracy than n 2^-18 of that
    coordinate. After sums of zeros only, just clips change the bound, up to 2^20. It never exceeds
    ``MAX_CLIP``.
    """
    largest = max(state.largest_mean, largest_mean)
    if not largest:
        return ClipState(clip=min(2 * state.clip, MAX_BLIND_CLIP) if num_clipped else state.clip)
    lower = math.ldexp(1, math.frexp(MIN_CLIP_ROOM * largest)[1])
    upper = lower * (MAX_CLIP_ROOM // MIN_CLIP_ROOM)
    moved = state.clip * (2 if num_clipped else 0.5)
    return ClipState(clip=min(max(moved, lower), upper, MAX_CLIP), largest_mean=largest)
