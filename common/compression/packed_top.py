"""Sends the coordinates of largest magnitude, top-k, with few bits for position and value of each.

The bytes are the positions (``sorted_positions``), then the values as ``few_bits`` has them. With 2
bits, a coordinate takes 10.6 bits if one of a hundred is sent, and 7.3 if one of ten is; as a
position in 16 bits and a bfloat16 (``top_coordinates``) it takes 32.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headwater.common.compression.few_bits import decoded_few_bits, encode_few_bits
from headwater.common.compression.sorted_positions import (
    decoded_positions,
    encode_positions,
    positions_bytes,
)
from headwater.common.compression.terms import FewBits
from headwater.common.compression.top_coordinates import largest_in
from headwater.common.model.vectors import CHUNK
from headwater.common.sums.encoded_vector import EncodedVector, Floats


def encode_packed_top(values_P: Tensor, number: int, method: FewBits) -> bytearray:
    """Return the ``number`` largest coordinates; ``values_P`` becomes what was not sent."""
    values = values_P.numpy()
    positions = np.concatenate([*largest_in(values, number, length=CHUNK)])
    picked = torch.from_numpy(values[positions])
    sent = encode_few_bits(picked, method)
    values[positions] = picked.numpy()
    return encode_positions(positions, len(values)) + sent


def decoded_packed_top(
    data: memoryview, num_values: int, number: int, method: FewBits, *, name: str
) -> EncodedVector:
    """Return a vector of which ``number`` coordinates were sent; the others are zero.

    Raises:
        CorruptUpdate: see ``decoded_positions``, and ``decoded_few_bits`` for the values.
        NonFiniteUpdate: see ``decoded_few_bits``.
    """
    positions = decoded_positions(data, number, num_values, name=name)
    sent = data[positions_bytes(number, num_values) :]
    values = decoded_few_bits(sent, number, method, name=name)

    def decode(low: int, high: int) -> Floats:
        decoded = np.zeros(high - low, dtype=np.float32)
        first, last = np.searchsorted(positions, (low, high)).tolist()
        if first < last:
            decoded[positions[first:last] - low] = values[first:last]
        return decoded

    return EncodedVector(num_values, decode)
