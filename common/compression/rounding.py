"""Rounds every coordinate: to bfloat16 (two bytes), or to int8 with a scale for each block.

bfloat16 keeps float32's exponent and 8 of its 24 bits: a coordinate is rounded to nearest, with a
relative error of at most 2^-9, and what is left is exact in float32.

int8 divides each block of ``BLOCK`` coordinates by a scale s = max |x| / 127 and rounds x / s
stochastically, up with the probability of its fractional part: the rounding has no bias (Alistarh
et al. 2017, "QSGD", section 3.1), and an error below s. All scales come first, then all integers.
Example: a block whose largest coordinate is 0.5 has steps of 0.0039.

Both overwrite the vector with what the encoding lost, chunk by chunk, in the vector's own memory.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headwater.common.compression.terms import BLOCK
from headwater.common.errors import CorruptUpdate, NonFiniteUpdate
from headwater.common.model.vectors import CHUNK
from headwater.common.sums.encoded_vector import EncodedVector, Floats

STEPS = 127
assert CHUNK % BLOCK == 0


def encode_bfloat16(values_P: Tensor) -> bytearray:
    """Return the vector in bfloat16; ``values_P`` becomes what the rounding lost, exactly."""
    data = bytearray(2 * values_P.numel())
    if not data:
        return data
    target = torch.frombuffer(data, dtype=torch.bfloat16)
    for part, rounded in zip(torch.split(values_P, CHUNK), torch.split(target, CHUNK), strict=True):
        rounded.copy_(part)
        part.sub_(rounded.float())
    return data


def decoded_bfloat16(data: memoryview, num_values: int) -> EncodedVector:
    """Return a vector of bfloat16, of as many bytes as its terms say."""
    codes = np.frombuffer(data, "<u2", num_values)

    def decode(low: int, high: int) -> Floats:
        return (codes[low:high].astype(np.uint32) << 16).view(np.float32)

    return EncodedVector(num_values, decode)


def encode_int8(values_P: Tensor, random: np.random.Generator | None) -> bytearray:
    """Return the vector in int8; ``values_P`` becomes what the rounding lost.

    Without ``random`` it is rounded to nearest.

    What is lost is computed in float32, whose rounding is below 2^-24 of the block's largest
    coordinate. A block with a NaN or an infinity gets a scale that is not finite, which the server
    refuses.
    """
    values = values_P.numpy()
    num_blocks = -(-len(values) // BLOCK)
    data = bytearray(4 * num_blocks + len(values))
    scales = np.frombuffer(data, "<f4", num_blocks)
    codes = np.frombuffer(data, np.int8, len(values), offset=4 * num_blocks)
    for low in range(0, len(values), CHUNK):
        part = values[low : low + CHUNK]
        starts = np.arange(0, len(part), BLOCK)
        own = scales[low // BLOCK : low // BLOCK + len(starts)]
        np.divide(np.maximum.reduceat(np.abs(part), starts), STEPS, out=own, casting="same_kind")
        wide = _spread(own, len(part))
        with np.errstate(divide="ignore", invalid="ignore"):
            steps = part / wide
        steps[wide == 0] = 0.0
        steps += 0.5 if random is None else random.random(len(part), dtype=np.float32)
        np.floor(steps, out=steps)
        np.clip(steps, -STEPS, STEPS, out=steps)
        with np.errstate(invalid="ignore"):
            codes[low : low + CHUNK] = steps.astype(np.int8)
            part -= codes[low : low + CHUNK] * wide
    return data


def decoded_int8(data: memoryview, num_values: int, *, name: str) -> EncodedVector:
    """Return a vector of int8 and scales, of as many bytes as its terms say.

    Raises:
        NonFiniteUpdate: a scale is not finite.
        CorruptUpdate: a scale is negative, or so large that its steps overflow float32.
    """
    num_blocks = -(-num_values // BLOCK)
    scales = np.frombuffer(data, "<f4", num_blocks)
    codes = np.frombuffer(data, np.int8, num_values, offset=4 * num_blocks)
    if not np.isfinite(scales).all():
        raise NonFiniteUpdate(f"{name}: a block's scale is a NaN or an infinity")
    largest = np.finfo(np.float32).max / 128
    wrong = np.flatnonzero((scales < 0) | (scales > largest))
    if len(wrong):
        raise CorruptUpdate(
            f"{name}: expected scales from 0 to {largest:.3g}, found {scales[wrong[0]]:.3g} in "
            f"block {wrong[0]:,}"
        )

    def decode(low: int, high: int) -> Floats:
        first = low // BLOCK
        own = _spread(scales[first : -(-high // BLOCK)], (-(-high // BLOCK) - first) * BLOCK)
        decoded: Floats = codes[low:high] * own[low - first * BLOCK : high - first * BLOCK]
        return decoded

    return EncodedVector(num_values, decode)


def _spread(scales: Floats, num_values: int) -> Floats:
    """Return each coordinate's scale."""
    spread: Floats = np.repeat(scales.astype(np.float32, copy=False), BLOCK)[:num_values]
    return spread
