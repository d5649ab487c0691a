"""The columns on which all devices of a round project their matrices, in 4 bits a number.

What counts of columns is the space that they span. So they are sent as whole numbers from -7 to 7
without a scale, and both sides make them orthonormal. Whatever numbers a server sends, a projection
on the columns takes away from a matrix and adds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from headwater.common.compression.few_bits import Codes, packed_codes, unpacked_codes
from headwater.common.sums.encoded_vector import Floats

BITS, LARGEST = 4, 7

Shape: TypeAlias = tuple[int, int]


def columns_bytes(shapes: Sequence[Shape]) -> int:
    """Return the length of matrices of columns."""
    return -(-sum(rows * columns for rows, columns in shapes) * BITS // 8)


def encode_columns(columns: Sequence[Floats]) -> bytes:
    """Return matrices of columns [n, r], rounded: each column by its largest number."""
    codes = [_codes(one) for one in columns]
    return packed_codes(np.concatenate(codes), BITS).tobytes()


@lru_cache(maxsize=2)
def orthonormal_columns(data: bytes, shapes: tuple[Shape, ...]) -> tuple[Floats, ...]:
    """Return matrices of these shapes, [n, r], whose columns are orthonormal.

    ``data`` is as long as ``columns_bytes`` says.
    """
    codes = unpacked_codes(np.frombuffer(data, np.uint8), BITS).astype(np.float64) - LARGEST - 1
    ends = np.cumsum([rows * columns for rows, columns in shapes])
    return tuple(
        np.linalg.qr(part.reshape(shape))[0].astype(np.float32)
        for part, shape in zip(np.split(codes, ends)[: len(shapes)], shapes, strict=True)
    )


def _codes(columns_NR: Floats) -> Codes:
    largest_R = np.abs(columns_NR).max(axis=0)
    steps_NR = columns_NR / np.where(largest_R > 0, largest_R, 1) * LARGEST
    codes: Codes = (np.rint(steps_NR) + LARGEST + 1).astype(np.uint8).reshape(-1)
    return codes
