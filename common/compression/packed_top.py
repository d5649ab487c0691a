"""Sends the coordinates of largest magnitude, top-k, each as 12 bits of position and few of value.

The vector is cut into spans of 4,096 coordinates. The bytes are the number of positions in each
span (uint16), then all positions within their spans in increasing order, two in three bytes, then
all values as ``few_bits`` has them. With 2 bits and one coordinate of a hundred sent, a coordinate
takes 14.4 bits; as a position in 16 bits and a bfloat16 (``top_coordinates``) it takes 32.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwater.common.compression.few_bits import decoded_few_bits, encode_few_bits
from headwater.common.compression.terms import SHORT_SPAN, FewBits, few_bits_bytes, packed_bytes
from headwater.common.compression.top_coordinates import largest_in
from headwater.common.errors import CorruptUpdate
from headwater.common.model.vectors import CHUNK
from headwater.common.sums.encoded_vector import EncodedVector, Floats

Positions = NDArray[np.int64]


def encode_packed_top(values_P: Tensor, number: int, method: FewBits) -> bytearray:
    """Return the ``number`` largest coordinates; ``values_P`` becomes what was not sent."""
    values = values_P.numpy()
    positions = np.concatenate([*largest_in(values, number, length=CHUNK)])
    picked = torch.from_numpy(values[positions])
    sent = encode_few_bits(picked, method)
    values[positions] = picked.numpy()
    spans, within = np.divmod(positions, SHORT_SPAN)
    counts = np.bincount(spans, minlength=-(-len(values) // SHORT_SPAN)).astype("<u2")
    return bytearray(counts.tobytes()) + _packed(within) + sent


def decoded_packed_top(
    data: memoryview, num_values: int, number: int, method: FewBits, *, name: str
) -> EncodedVector:
    """Return a vector of which ``number`` coordinates were sent; the others are zero.

    Raises:
        CorruptUpdate: the counts do not add up, or a position is out of range, twice, or out of
            order; see ``decoded_few_bits`` for the values.
        NonFiniteUpdate: see ``decoded_few_bits``.
    """
    num_spans = -(-num_values // SHORT_SPAN)
    counts = np.frombuffer(data, "<u2", num_spans).astype(np.int64)
    if counts.sum() != number:
        raise CorruptUpdate(
            f"{name}: expected {number:,} positions, the counts of the spans add up to "
            f"{counts.sum():,}"
        )
    end = 2 * num_spans + packed_bytes(number)
    within = _unpacked(np.frombuffer(data, np.uint8, end - 2 * num_spans, 2 * num_spans), number)
    positions = within + np.repeat(np.arange(num_spans) * SHORT_SPAN, counts)
    is_in_order = (np.diff(positions) > 0).all() if number else True
    if not is_in_order or (number and positions[-1] >= num_values):
        raise CorruptUpdate(
            f"{name}: expected increasing positions below {num_values:,}, found one that is out of "
            "range, twice, or out of order"
        )
    values = decoded_few_bits(
        data[end : end + few_bits_bytes(method, number)], number, method, name=name
    )

    def decode(low: int, high: int) -> Floats:
        decoded = np.zeros(high - low, dtype=np.float32)
        first, last = np.searchsorted(positions, (low, high)).tolist()
        if first < last:
            decoded[positions[first:last] - low] = values[first:last]
        return decoded

    return EncodedVector(num_values, decode)


def _packed(within: Positions) -> bytearray:
    """Return numbers of 12 bits, two in three bytes; of the last one alone half a byte is zero."""
    pairs = np.zeros((-(-len(within) // 2), 2), dtype=np.int64)
    pairs.reshape(-1)[: len(within)] = within
    joined = pairs[:, 0] | pairs[:, 1] << 12
    packed = np.stack([joined & 255, joined >> 8 & 255, joined >> 16], axis=1).astype(np.uint8)
    return bytearray(packed.tobytes())[: packed_bytes(len(within))]


def _unpacked(packed: NDArray[np.uint8], number: int) -> Positions:
    filled = np.zeros(-(-number // 2) * 3, dtype=np.int64)
    filled[: len(packed)] = packed
    triples = filled.reshape(-1, 3)
    joined = triples[:, 0] | triples[:, 1] << 8 | triples[:, 2] << 16
    return np.stack([joined & 4095, joined >> 12], axis=1).reshape(-1)[:number]
