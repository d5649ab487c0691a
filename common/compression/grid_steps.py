"""A model's movement in whole steps of a grid, so that movements over several rounds add exactly.

Each block of ``BLOCK`` coordinates has a grid: the multiples of a power of two. The model that
devices hold lies on it, so the difference between any two of its versions is a block of whole
numbers times the finer of both steps. Such numbers add without rounding: a device that missed some
rounds gets the sum of their differences in little more than the bytes of one, and reaches the same
bits as a device that took them one by one.

A step is at most 2/15 of the block's largest movement in the round and at least 2^-23 of its
largest coordinate, so that float32 holds every multiple that occurs. A round's movement then takes
5 bits for each coordinate; a movement twice as large takes one bit more. A model is off by half a
step, and the next round's movement makes up for it.

A piece of up to ``CHUNK`` coordinates is the exponents of its blocks (int8), their widths in bits
(uint8), then each block's numbers: its bits 0, its bits 1 and so on, eight coordinates to a byte.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headwater.common.compression.terms import BLOCK
from headwater.common.errors import CorruptUpdate
from headwater.common.sums.encoded_vector import Floats

Doubles = NDArray[np.float64]
Integers = NDArray[np.int64]

LEVELS = 15
"""Steps of the largest movement in a round, at most."""
FIRST_LEVELS = 255
"""The same of the first model, which moves from zero: 9 bits for each coordinate."""
PRECISION_BITS = 23
MAX_WIDTH = 52
"""Bits of a number: float64 adds such numbers without rounding."""
MIN_EXPONENT = -126
HEAD_BYTES = 2  # of a block: its exponent and its width


def nearest_on_grid(target: Floats, base: Floats, *, levels: int) -> Floats:
    """Return the multiples of each block's step that are nearest to ``target``.

    A block in which ``target`` is ``base`` stays as it is if it is on a grid.
    """
    starts = np.arange(0, len(target), BLOCK)
    moved = np.abs(target.astype(np.float64) - base)
    largest = np.maximum.reduceat(moved, starts)
    exponents = np.where(largest > 0, np.frexp(largest / levels)[1], MIN_EXPONENT)
    bounds = np.frexp(np.maximum.reduceat(np.abs(target), starts))[1] - PRECISION_BITS
    exponents = np.maximum(np.maximum(exponents, bounds), MIN_EXPONENT)
    wide = np.repeat(exponents, BLOCK)[: len(target)]
    steps = np.rint(np.ldexp(target.astype(np.float64), -wide)) + 0.0  # no -0.0: no sum gives it
    nearest: Floats = np.ldexp(steps, wide).astype(np.float32)
    return nearest


def encode_steps(moved: Doubles) -> bytearray | None:
    """Return a movement of up to ``CHUNK`` coordinates, exactly; None if that takes too many bits.

    Two points on grids whose steps are not too far apart have a movement of few bits.
    """
    num_whole = len(moved) // BLOCK
    parts = [moved[: num_whole * BLOCK].reshape(num_whole, BLOCK)]
    if len(moved) % BLOCK:
        parts.append(moved[num_whole * BLOCK :][None])
    scaled = [_in_steps(part) for part in parts]
    exponents = np.concatenate([exponents for exponents, _, _ in scaled])
    widths = np.concatenate([widths for _, widths, _ in scaled])
    if len(widths) and (widths.max() > MAX_WIDTH or np.abs(exponents).max() > 127):
        return None
    data = bytearray(exponents.astype(np.int8).tobytes() + widths.astype(np.uint8).tobytes())
    for _, own, numbers in scaled:
        data += _packed(numbers, own)
    return data


def head_bytes(num_values: int) -> int:
    """Return the bytes before a piece's numbers, which say how many bytes follow."""
    return HEAD_BYTES * -(-num_values // BLOCK)


def piece_bytes(head: bytes | bytearray | memoryview, num_values: int) -> int:
    """Return the length of a piece that begins with this head."""
    num_blocks = -(-num_values // BLOCK)
    widths = np.frombuffer(head, np.uint8, num_blocks, offset=num_blocks).astype(np.int64)
    return head_bytes(num_values) + int((widths * _plane_bytes(num_values)).sum())


def decoded_steps(piece: bytes | bytearray | memoryview, num_values: int) -> Doubles:
    """Return the movement of a piece, of as many bytes as its head says.

    Raises:
        CorruptUpdate: a width is too large.
    """
    num_blocks, num_whole = -(-num_values // BLOCK), num_values // BLOCK
    exponents = np.frombuffer(piece, np.int8, num_blocks).astype(np.int64)
    widths = np.frombuffer(piece, np.uint8, num_blocks, offset=num_blocks).astype(np.int64)
    if num_blocks and widths.max() > MAX_WIDTH:
        raise CorruptUpdate(
            f"expected differences of at most {MAX_WIDTH} bits, found {widths.max()}"
        )
    packed = np.frombuffer(piece, np.uint8, offset=head_bytes(num_values))
    end = int(widths[:num_whole].sum()) * BLOCK // 8
    numbers = _unpacked(packed[:end], widths[:num_whole], BLOCK).reshape(-1)
    if num_whole < num_blocks:
        rest = _unpacked(packed[end:], widths[num_whole:], num_values % BLOCK).reshape(-1)
        numbers = np.concatenate([numbers, rest])
    return np.ldexp(numbers.astype(np.float64), np.repeat(exponents, BLOCK)[:num_values])


def _plane_bytes(num_values: int) -> Integers:
    """Return the bytes that one bit of every coordinate takes, for each block."""
    lengths = np.diff(np.append(np.arange(0, num_values, BLOCK), num_values))
    return -(-lengths // 8)


def _in_steps(moved: Doubles) -> tuple[Integers, Integers, Integers]:
    """Return the exponents and widths of blocks [N, n], and their coordinates in steps."""
    exponents = np.min(_lowest_bit(moved), axis=1, initial=1024)
    exponents[exponents == 1024] = 0  # the block has not moved
    numbers = np.ldexp(moved, -exponents[:, None])
    largest = np.max(np.abs(numbers), axis=1, initial=0.0)
    widths = np.where(largest > 0, np.frexp(largest)[1] + 1, 0).astype(np.int64)
    fitting = np.where(np.abs(numbers) < 2.0**MAX_WIDTH, numbers, 0.0)
    return exponents, widths, fitting.astype(np.int64)


def _lowest_bit(values: Doubles) -> Integers:
    """Return the exponent of the lowest bit that is set in each number; 1024 of zero."""
    bits = values.view(np.int64)
    mantissa = (bits & ((1 << 52) - 1)) | (1 << 52)
    trailing = np.frexp((mantissa & -mantissa).astype(np.float64))[1] - 1
    exponents = ((bits >> 52) & 0x7FF) - 1075 + trailing
    return np.where(values == 0.0, 1024, exponents)


def _packed(numbers: Integers, widths: Integers) -> bytes:
    """Return blocks [N, n] of whole numbers, each in its width of bits."""
    length = -(-numbers.shape[1] // 8)
    starts = np.concatenate([[0], np.cumsum(widths)]) * length
    packed = np.empty(starts[-1], dtype=np.uint8)
    for width in np.unique(widths[widths > 0]):
        rows = np.flatnonzero(widths == width)
        codes = numbers[rows] + (1 << (width - 1))
        planes = [np.packbits((codes >> bit & 1).astype(np.uint8), axis=1) for bit in range(width)]
        at = starts[rows][:, None] + np.arange(width * length)
        packed[at] = np.concatenate(planes, axis=1)
    return packed.tobytes()


def _unpacked(packed: NDArray[np.uint8], widths: Integers, num_values: int) -> Integers:
    """Return blocks [N, num_values] of whole numbers from their bits."""
    length = -(-num_values // 8)
    starts = np.concatenate([[0], np.cumsum(widths)]) * length
    numbers = np.zeros((len(widths), num_values), dtype=np.int64)
    for width in np.unique(widths[widths > 0]):
        rows = np.flatnonzero(widths == width)
        codes = np.full((len(rows), num_values), -(1 << (width - 1)), dtype=np.int64)
        for bit in range(width):
            at = starts[rows][:, None] + np.arange(bit * length, (bit + 1) * length)
            plane = np.unpackbits(packed[at], axis=1, count=num_values)
            codes += plane.astype(np.int64) << bit
        numbers[rows] = codes
    return numbers
