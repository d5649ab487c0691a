"""Writes increasing positions in few bits, by the coding of Elias and Fano.

The lower bits of each position are written as they are, ``low_bits`` of them. The upper bits are
written together, as a row of bits: position i sets the bit ``(position >> low_bits) + i``, so each
zero is a step of the upper bits. If one position of a hundred is in the set it takes 8.6 bits, and
one of ten 5.3; no coding of sets can take less than 8.1 and 4.7. The length does not depend on the
positions (Elias 1974, "Efficient Storage and Retrieval by Content and Address of Static Files").
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headwater.common.errors import CorruptUpdate

Positions = NDArray[np.int64]

CHUNK_POSITIONS = 1 << 16
"""Positions whose lower bits are spread out at a time; of 8, so that a chunk ends with a byte."""


def positions_bytes(number: int, num_values: int) -> int:
    """Return the length of so many positions below ``num_values``."""
    low_bits = _low_bits(number, num_values)
    return -(-number * low_bits // 8) + -(-_upper_length(number, num_values, low_bits) // 8)


def encode_positions(positions: Positions, num_values: int) -> bytearray:
    """Return increasing positions below ``num_values``, encoded."""
    low_bits = _low_bits(len(positions), num_values)
    lower = bytearray()
    for start in range(0, len(positions), CHUNK_POSITIONS):
        chunk = positions[start : start + CHUNK_POSITIONS, None]
        lower += np.packbits(chunk >> np.arange(low_bits) & 1, bitorder="little").tobytes()
    upper = np.zeros(_upper_length(len(positions), num_values, low_bits), dtype=np.uint8)
    upper[(positions >> low_bits) + np.arange(len(positions))] = 1
    return lower + np.packbits(upper, bitorder="little").tobytes()


def decoded_positions(data: memoryview, number: int, num_values: int, *, name: str) -> Positions:
    """Return positions that are increasing and below ``num_values``.

    Raises:
        CorruptUpdate: there are more or fewer, or one is out of range, twice, or out of order.
    """
    low_bits = _low_bits(number, num_values)
    lower_bytes = -(-number * low_bits // 8)
    length = _upper_length(number, num_values, low_bits)
    upper = np.frombuffer(data, np.uint8, -(-length // 8), lower_bytes)
    set_bits = np.flatnonzero(np.unpackbits(upper, bitorder="little"))
    if len(set_bits) != number:
        raise CorruptUpdate(f"{name}: expected {number:,} positions, found {len(set_bits):,}")
    positions = (set_bits - np.arange(number)) << low_bits
    weights = 1 << np.arange(low_bits)
    for start in range(0, number, CHUNK_POSITIONS):
        chunk = positions[start : start + CHUNK_POSITIONS]
        num_bits = len(chunk) * low_bits
        lower = np.frombuffer(data, np.uint8, -(-num_bits // 8), start * low_bits // 8)
        bits = np.unpackbits(lower, count=num_bits, bitorder="little")
        chunk += bits.reshape(len(chunk), low_bits) @ weights
    if number and ((np.diff(positions) <= 0).any() or positions[-1] >= num_values):
        raise CorruptUpdate(
            f"{name}: expected increasing positions below {num_values:,}, found one that is out of "
            "range, twice, or out of order"
        )
    return positions


def _low_bits(number: int, num_values: int) -> int:
    """Return how many bits of each position are written as they are: those of the mean gap."""
    return (num_values // number).bit_length() - 1 if number else 0


def _upper_length(number: int, num_values: int, low_bits: int) -> int:
    """Return the length of the row of bits: a one for each position, a zero for each step."""
    return number + (num_values - 1 >> low_bits) if number else 0
