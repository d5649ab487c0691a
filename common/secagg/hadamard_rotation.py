"""A randomized block-Hadamard rotation, with which 16 bits, or 8, suffice for every coordinate.

The coordinates of gradients have very different sizes, for which a 16-bit ring is too small. The
vector is therefore split into blocks of 4,096; each is multiplied by public random signs and then
by H / sqrt(4096), where H is Hadamard's matrix of +1 and -1. Every rotated coordinate is a sum over
its whole block with random signs, so all are nearly normal with the block's root mean square. One
public bound per block, a few times that size, then wastes few bits. The rotation is linear and
orthogonal: the rotated sum is the sum of the rotated vectors, and rotating back does not increase
the error (Suresh et al., "Distributed Mean Estimation with Limited Communication", ICML 2017,
section 3; in blocks as in Kairouz et al., "The Distributed Discrete Gaussian Mechanism", ICML
2021).

If the length is not a multiple of the block, the last block overlaps the one before it and has its
own signs; a vector shorter than a block uses the largest power of two within it. Nothing is padded.

A rotated block is measured in steps: its bound for one unit of weight is (2^15 - 1) / W steps,
where W is the total weight that the plans allow. Each coordinate is rounded stochastically, so for
n devices of equal weight the error of the mean is about

    sqrt(n / 6) x bound / 2^15 per coordinate, and never more than n x bound / 2^15,

in the rotated vector and so, as root mean square, in the original one. With bounds of 5 times the
root mean square of the devices' own means, and devices as different as independent normal vectors
(own means sqrt(n) times as large as the cohort's), that is a relative L2 error of
5 n / (sqrt(6) x 2^15): 6.2e-4 for n = 10 and 4.0e-3 for n = 64. With 8 bits there are 2^7 - 1
steps in place of 2^15 - 1, for sessions of few members: 0.08 for n = 5.

What the server learns: nothing beyond the sum. Seed and bounds are public; the bounds depend on
past sums only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwater.common.secagg.fixed_point import (
    MAX_CLIP,
    MIN_CLIP,
    Encoding,
    RingBits,
    check_finite,
)
from headwater.common.secagg.masking import Stream, mask_in_place
from headwater.common.secagg.secret import Secret

BLOCK_SIZE = 4096
BLOCKS_PER_SPAN = 16  # 256 KiB of float32
STEPS = 2**15 - 1


def steps_of(ring_bits: RingBits) -> int:
    """Return the steps of a bound: the largest number of a ring."""
    return int(2 ** (ring_bits - 1) - 1)


FIRST_BOUND = 1.0
"""Per rotated coordinate, before any sum is known: a hundred times the usual mean gradients."""
BOUND_FACTOR = 5.0  # a normal variable exceeds five standard deviations once in 1.7 million
MIN_RMS_FRACTION = 1 / 16  # of the whole vector's root mean square: a block may grow later
MAX_CLIPPED_FRACTION = 1e-5  # of all coordinates; with BOUND_FACTOR alone fewer are clipped
MAX_GROWTH = 8.0  # times the bound that follows from the last sum


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotation:
    """A rotation of [P] with a public seed, which is new in each round.

    Raises:
        ValueError: a seed that is not 32 bytes, no coordinate, or a block that is no power of two.
    """

    seed: bytes
    num_coordinates: int
    block_size: int = BLOCK_SIZE

    def __post_init__(self) -> None:
        if len(self.seed) != 32 or self.num_coordinates < 1:
            raise ValueError(f"{len(self.seed)} bytes of seed, {self.num_coordinates} coordinates")
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ValueError(f"a block of {self.block_size} is no power of two")

    @property
    def block(self) -> int:
        """The block size, or the largest power of two in a shorter vector."""
        return min(self.block_size, 1 << (self.num_coordinates.bit_length() - 1))

    @property
    def num_blocks(self) -> int:
        """The number of blocks, each with a bound; the last may be shorter than the others."""
        return -(-self.num_coordinates // self.block)


def rotated_encoding(*, max_weight: int, ring_bits: RingBits = 16) -> Encoding:
    """Return the 16-bit or 8-bit encoding of a vector that ``rotate_in_place`` scaled to steps."""
    clip = steps_of(ring_bits) / max_weight
    return Encoding(ring_bits=ring_bits, scale_bits=0, clip=clip, max_weight=max_weight)


def rotate_in_place(
    values_P: Tensor,
    *,
    rotation: Rotation,
    bounds: NDArray[np.float32],
    max_weight: int,
    ring_bits: RingBits = 16,
) -> None:
    """Rotate a device's sum and scale each block to steps of its bound, in place.

    Extra memory: P / 8 bytes of signs and less than 1 MiB. Values near float32's maximum may
    overflow in a block's sums; encoding the vector detects that.

    Raises:
        NonFiniteUpdate: a NaN or an infinity; the vector is unchanged.
        ValueError: the lengths differ, or a bound is not finite and positive.
    """
    values = values_P.numpy()
    steps = steps_of(ring_bits) / (max_weight * _checked(values, bounds, rotation))
    check_finite(values)
    signs = _signs(rotation)
    with np.errstate(over="ignore", invalid="ignore"):
        for span in _spans(rotation):
            _flip(values[span], signs, span.start)
            _hadamard(values[span], rotation.block)
        tail = _tail(rotation)
        if tail is not None:
            _flip(values[tail], signs, rotation.num_coordinates)
            _hadamard(values[tail], rotation.block)
        _scale(values, steps, rotation)


def unrotate_in_place(
    mean_P: NDArray[np.float32],
    *,
    rotation: Rotation,
    bounds: NDArray[np.float32],
    max_weight: int,
    ring_bits: RingBits = 16,
) -> NDArray[np.float64]:
    """Rotate the decoded mean back, in place; return the RMS of each rotated block.

    Raises:
        ValueError: as ``rotate_in_place``.
    """
    bounds_B = _checked(mean_P, bounds, rotation)
    _scale(mean_P, max_weight * bounds_B / steps_of(ring_bits), rotation)
    block_rms = np.array([_rms(mean_P[span]) for span in _blocks(rotation)])
    signs = _signs(rotation)
    tail = _tail(rotation)
    if tail is not None:
        _hadamard(mean_P[tail], rotation.block)
        _flip(mean_P[tail], signs, rotation.num_coordinates)
    for span in _spans(rotation):
        _hadamard(mean_P[span], rotation.block)
        _flip(mean_P[span], signs, span.start)
    return block_rms


def block_rms(values_P: NDArray[np.float32], rotation: Rotation) -> NDArray[np.float64]:
    """Return the RMS of each block of a vector that is not rotated yet; the vector stays."""
    rotated, ones = torch.from_numpy(values_P.copy()), np.ones(rotation.num_blocks, np.float32)
    steps = steps_of(16)
    rotate_in_place(rotated, rotation=rotation, bounds=steps * ones, max_weight=1, ring_bits=16)
    return np.array([_rms(rotated.numpy()[span]) for span in _blocks(rotation)])


def first_bounds(rotation: Rotation, *, bound: float = FIRST_BOUND) -> NDArray[np.float32]:
    """Return the bounds [num_blocks] before any sum is known."""
    return np.full(rotation.num_blocks, bound, dtype=np.float32)


def device_spread(
    *, num_devices: int, squared_norms: float, weight: float, mean_norm: float
) -> float:
    """Return the ratio of the devices' own means to the cohort's mean in size, at least 1.

    It is sqrt(n x sum of |v_i|^2) / |sum of v_i|, which is exact for devices of equal weight;
    ``squared_norms`` is the sum of |v_i|^2 over their (unrotated) sums. A mean of zero gives 1.
    """
    if mean_norm <= 0 or weight <= 0:
        return 1.0
    return max(1.0, math.sqrt(num_devices * max(squared_norms, 0.0)) / (weight * mean_norm))


def follow_bounds(
    bounds: NDArray[np.float32],
    *,
    block_rms: NDArray[np.float64],
    spread: float,
    clipped: float,
    room: float = 1.0,
) -> NDArray[np.float32]:
    """Return the next round's bounds, from the RMS of each block of the mean.

    A bound is 5 x ``spread`` x the block's RMS, where a block's RMS counts as at least a sixteenth
    of the whole vector's. If more than 1e-5 of the coordinates were clipped (``clipped`` is that
    fraction), the bounds double instead, up to 8 times that. A mean of zero changes nothing.
    ``room`` is how many times larger the next sum may be.
    """
    whole = math.sqrt(float(np.mean(np.square(block_rms))))
    if not whole:
        return bounds
    target = room * BOUND_FACTOR * spread * np.maximum(block_rms, MIN_RMS_FRACTION * whole)
    if clipped > MAX_CLIPPED_FRACTION:
        target = np.clip(2.0 * bounds, target, MAX_GROWTH * target)
    return np.clip(target, MIN_CLIP, MAX_CLIP).astype(np.float32)


def _checked(
    values: NDArray[np.float32], bounds: NDArray[np.float32], rotation: Rotation
) -> NDArray[np.float64]:
    """Return the bounds in float64."""
    if len(values) != rotation.num_coordinates or len(bounds) != rotation.num_blocks:
        raise ValueError(
            f"{len(values):,} coordinates and {len(bounds):,} bounds, not "
            f"{rotation.num_coordinates:,} and {rotation.num_blocks:,}"
        )
    if not (np.isfinite(bounds) & (bounds > 0)).all():
        raise ValueError("the bounds of blocks must be finite and above zero")
    return bounds.astype(np.float64)


def _blocks(rotation: Rotation) -> Iterator[slice]:
    """Yield the range of each block."""
    for start in range(0, rotation.num_coordinates, rotation.block):
        yield slice(start, min(start + rotation.block, rotation.num_coordinates))


def _spans(rotation: Rotation) -> Iterator[slice]:
    """Yield ranges of whole blocks that are rotated at once."""
    end = rotation.num_coordinates // rotation.block * rotation.block
    length = BLOCKS_PER_SPAN * rotation.block
    for start in range(0, end, length):
        yield slice(start, min(start + length, end))


def _tail(rotation: Rotation) -> slice | None:
    """Return the overlapping last block; None if the length is a multiple of the block."""
    if rotation.num_coordinates % rotation.block == 0:
        return None
    return slice(rotation.num_coordinates - rotation.block, rotation.num_coordinates)


def _signs(rotation: Rotation) -> NDArray[np.uint8]:
    """Return public random bits, packed: one per coordinate, then one per tail coordinate."""
    num_bits = rotation.num_coordinates + rotation.block
    bits = np.zeros(-(-num_bits // 32), dtype=np.uint32)
    mask_in_place(bits, [Stream(key=Secret(rotation.seed), sign=1)])
    return bits.view(np.uint8)


def _flip(values: NDArray[np.float32], signs: NDArray[np.uint8], at: int) -> None:
    """Flip the signs of the coordinates whose bit is set, beginning with bit ``at``."""
    packed = signs[at // 8 : -(-(at + len(values)) // 8)]
    bits = np.unpackbits(packed)[at % 8 : at % 8 + len(values)]
    raw = values.view(np.uint32)
    np.bitwise_xor(raw, bits.astype(np.uint32) << np.uint32(31), out=raw)


def _hadamard(values: NDArray[np.float32], block: int) -> None:
    """Multiply each block by H / sqrt(block): H = H_rows (x) H_columns, two small products."""
    columns = 1 << (block.bit_length() - 1) // 2
    rows = block // columns
    blocks = values.reshape(-1, rows, columns)
    by_rows = np.matmul(_matrix(rows), blocks)
    np.matmul(by_rows, _matrix(columns) * np.float32(1 / math.sqrt(block)), out=blocks)


def _matrix(size: int) -> NDArray[np.float32]:
    """Return Hadamard's matrix of a power of two, by Sylvester's doubling."""
    matrix = np.ones((1, 1), dtype=np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def _scale(values: NDArray[np.float32], factors: NDArray[np.float64], rotation: Rotation) -> None:
    for span, factor in zip(_blocks(rotation), factors.astype(np.float32), strict=True):
        np.multiply(values[span], factor, out=values[span])


def _rms(values: NDArray[np.float32]) -> float:
    return math.sqrt(float(np.mean(np.square(values, dtype=np.float64))))
