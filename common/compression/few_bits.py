"""Rounds every coordinate to 4, 2 or 1 bits, with a scale for each block of ``BLOCK`` coordinates.

A coordinate becomes a level times its block's scale s. Bits b have two sets of levels:

| levels | of b bits | used |
| --- | --- | --- |
| halves: ..., -1.5, -0.5, 0.5, 1.5, ... | 2^b of them, no zero | 1 and 2 bits |
| whole: ..., -1, 0, 1, ... | 2^b - 1 | 4 and 2 bits |

A block takes the levels and the scale that leave the smallest squared error among a few tries: from
the block's peak, from its root mean square, and between them. For the levels of a try the best
scale is <x, level> / <level, level>. With 1 bit that is the mean magnitude, and the level the sign
(Seide et al. 2014, "1-Bit Stochastic Gradient Descent"). The rounding is to nearest, and so has a
bias: it is meant to be used with error feedback.

A vector of n coordinates is the scales as float32, negative for whole levels, then the codes: n b
bits, the first coordinate in the lowest bits of the first byte. Example: 2,048 coordinates of 2
bits are 8 + 512 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headwater.common.compression.terms import BLOCK, FEW_BITS, FewBits
from headwater.common.errors import CorruptUpdate, NonFiniteUpdate
from headwater.common.model.vectors import CHUNK
from headwater.common.sums.encoded_vector import EncodedVector, Floats

Codes = NDArray[np.uint8]

LARGEST_LEVEL = 8
LEAST_SQUARE = 0.25  # of a level that is not zero
NORMAL_STEPS = {4: 0.335, 2: 0.996, 1: 1.596}
"""The steps of the least squared error for normal numbers of variance 1, by bits (Max 1960)."""


def encode_few_bits(values_P: Tensor, method: FewBits) -> bytearray:
    """Return the vector in few bits; ``values_P`` becomes what the rounding lost.

    A block with a NaN or an infinity gets a scale that is not finite, which the server refuses.
    """
    values, bits = values_P.numpy(), FEW_BITS[method]
    num_blocks = -(-len(values) // BLOCK)
    data = bytearray(4 * num_blocks + -(-len(values) * bits // 8))
    scales = np.frombuffer(data, "<f4", num_blocks)
    packed = np.frombuffer(data, np.uint8, offset=4 * num_blocks)
    for low, rows_NB in _rows(values):
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            scale_N, level_NB = _nearest(rows_NB, bits)
            rows_NB -= level_NB * np.abs(scale_N)[:, None]
            codes_NB = (level_NB - _lowest(scale_N, bits)[:, None]).astype(np.uint8)
        first = low // BLOCK
        scales[first : first + len(scale_N)] = scale_N
        own = packed_codes(codes_NB.reshape(-1), bits)
        packed[low * bits // 8 : low * bits // 8 + len(own)] = own
    return data


def decoded_few_bits(
    data: memoryview, num_values: int, method: FewBits, *, name: str
) -> EncodedVector:
    """Return a vector of few bits and scales, of as many bytes as its terms say.

    Raises:
        NonFiniteUpdate: a scale is not finite.
        CorruptUpdate: a scale is so large that its levels overflow float32, or has levels that
            such bits do not have.
    """
    bits, num_blocks = FEW_BITS[method], -(-num_values // BLOCK)
    scales = np.frombuffer(data, "<f4", num_blocks)
    packed = np.frombuffer(data, np.uint8, offset=4 * num_blocks)
    if not np.isfinite(scales).all():
        raise NonFiniteUpdate(f"{name}: a block's scale is a NaN or an infinity")
    largest = np.finfo(np.float32).max / LARGEST_LEVEL
    wrong = np.flatnonzero((np.abs(scales) > largest) | ((bits == 1) & np.signbit(scales)))
    if len(wrong):
        raise CorruptUpdate(
            f"{name}: expected scales of a magnitude up to {largest:.3g}"
            f"{', none negative,' if bits == 1 else ''} found {scales[wrong[0]]:.3g} in block "
            f"{wrong[0]:,}"
        )

    def decode(low: int, high: int) -> Floats:
        first, end = low // BLOCK, -(-high // BLOCK)
        own = scales[first:end].astype(np.float32)
        codes = unpacked_codes(packed[first * BLOCK * bits // 8 : -(-high * bits // 8)], bits)
        length = min(high, num_values) - first * BLOCK
        level = codes[:length] + np.repeat(_lowest(own, bits), BLOCK)[:length]
        decoded: Floats = level * np.repeat(np.abs(own), BLOCK)[:length]
        return decoded[low - first * BLOCK :]

    return EncodedVector(num_values, decode)


def _rows(values: Floats) -> Iterator[tuple[int, Floats]]:
    """Yield blocks [N, BLOCK] as views, each with the place of its first coordinate.

    What does not fill a block comes last, as a row of its own.
    """
    end = len(values) // BLOCK * BLOCK
    for low in range(0, end, CHUNK):
        yield low, values[low : min(low + CHUNK, end)].reshape(-1, BLOCK)
    if end < len(values):
        yield end, values[end:][None]


def _nearest(rows_NB: Floats, bits: int) -> tuple[Floats, Floats]:
    """Return each block's scale [N], negative for whole levels, and its levels [N, B]."""
    peak_N = np.max(np.abs(rows_NB), axis=1)
    unit_N = np.where(peak_N > 0, peak_N, np.float32(1)).astype(np.float32)
    unit_NB: Floats = rows_NB / unit_N[:, None]
    normal_N = NORMAL_STEPS[bits] * np.sqrt(np.mean(np.square(unit_NB), axis=1))
    normal_N[peak_N == 0] = 1
    scale_N, gain_N = np.zeros_like(peak_N), np.full_like(peak_N, -1)
    level_NB: Floats = np.zeros_like(unit_NB)
    for is_whole, step_N in _tries(normal_N, bits):
        tried_NB = _levels(unit_NB / step_N[:, None], bits, is_whole=is_whole)
        product_N = np.einsum("nb,nb->n", unit_NB, tried_NB)
        square_N = np.maximum(np.einsum("nb,nb->n", tried_NB, tried_NB), LEAST_SQUARE)
        gained_N = product_N * product_N / square_N  # the squared error is |x|^2 less this
        is_better = ~(gained_N <= gain_N)  # also of a NaN
        gain_N[is_better] = gained_N[is_better]
        own_N = peak_N * (product_N / square_N) * (-1 if is_whole else 1)
        scale_N[is_better] = own_N[is_better]
        level_NB[is_better] = tried_NB[is_better]
    return scale_N, level_NB


def _tries(normal_N: Floats, bits: int) -> Iterator[tuple[bool, Floats]]:
    """Yield sets of levels with the steps to try, of blocks whose peak is 1."""
    if bits == 1:
        yield False, normal_N
    elif bits == 2:
        yield False, normal_N
        for step in (normal_N, np.sqrt(normal_N)):
            yield True, step
    else:
        widest = np.full_like(normal_N, 1 / (2 ** (bits - 1) - 1))
        for step in (normal_N, np.sqrt(normal_N * widest), widest):
            yield True, step


def _levels(steps_NB: Floats, bits: int, *, is_whole: bool) -> Floats:
    most = 2 ** (bits - 1)
    if is_whole:
        return np.clip(np.rint(steps_NB), 1 - most, most - 1)
    return np.clip(np.floor(steps_NB), -most, most - 1) + np.float32(0.5)


def _lowest(scale_N: Floats, bits: int) -> Floats:
    """Return the level of code 0 in each block: by the sign of its scale."""
    most = 2 ** (bits - 1)
    return np.where(np.signbit(scale_N), np.float32(1 - most), np.float32(0.5 - most))


def packed_codes(codes: Codes, bits: int) -> Codes:
    """Return codes in as few bytes as hold them; the last one is filled up with zeros."""
    per_byte = 8 // bits
    filled = np.zeros(-(-len(codes) // per_byte) * per_byte, dtype=np.uint8)
    filled[: len(codes)] = codes
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    packed: Codes = np.bitwise_or.reduce(filled.reshape(-1, per_byte) << shifts, axis=1)
    return packed


def unpacked_codes(packed: Codes, bits: int) -> Codes:
    """Return the codes of whole bytes."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes: Codes = (packed[:, None] >> shifts & np.uint8(2**bits - 1)).reshape(-1)
    return codes
