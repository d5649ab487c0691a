"""Sends the coordinates of largest magnitude, top-k, each as a position and a bfloat16.

The vector is cut into spans of 65,536 coordinates. The bytes are the number of positions in each
span (uint32), then all positions within their spans in increasing order (uint16), then all values:
four bytes for each coordinate that is sent. What is not sent stays in the vector (Stich, Cordonnier
and Jaggi 2018, "Sparsified SGD with Memory", algorithm 1).

The k-th largest magnitude is found by counting: the bits of positive floats have the order of their
values, so two passes that count 16 bits each give it exactly, without sorting or copying the
vector. Of coordinates of equal magnitude the first are sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwater.common.compression.rounding import encode_bfloat16
from headwater.common.compression.terms import SPAN
from headwater.common.errors import CorruptUpdate
from headwater.common.sums.encoded_vector import EncodedVector, Floats

Bits = NDArray[np.uint32]
Positions = NDArray[np.int64]
NUM_BINS = 1 << 16


def encode_top(values_P: Tensor, number: int) -> bytearray:
    """Return the ``number`` largest coordinates; ``values_P`` becomes what was not sent."""
    values = values_P.numpy()
    num_spans = -(-len(values) // SPAN)
    data = bytearray(4 * num_spans + 4 * number)
    counts = np.frombuffer(data, "<u4", num_spans)
    positions = np.frombuffer(data, "<u2", number, offset=4 * num_spans)
    sent = memoryview(data)[4 * num_spans + 2 * number :]
    done = 0
    for span, found in enumerate(largest_in(values, number, length=SPAN)):
        part, chosen = values[span * SPAN : (span + 1) * SPAN], found - span * SPAN
        counts[span] = len(chosen)
        positions[done : done + len(chosen)] = chosen
        picked = torch.from_numpy(part[chosen])
        sent[2 * done : 2 * (done + len(chosen))] = encode_bfloat16(picked)
        part[chosen] = picked.numpy()
        done += len(chosen)
    assert done == number
    return data


def decoded_top(data: memoryview, num_values: int, number: int, *, name: str) -> EncodedVector:
    """Return a vector of which ``number`` coordinates were sent; the others are zero.

    Raises:
        CorruptUpdate: the counts do not add up, or a position is out of range, twice, or out of
            order.
    """
    num_spans = -(-num_values // SPAN)
    counts = np.frombuffer(data, "<u4", num_spans).astype(np.int64)
    positions = np.frombuffer(data, "<u2", number, offset=4 * num_spans)
    codes = np.frombuffer(data, "<u2", number, offset=4 * num_spans + 2 * number)
    if counts.sum() != number:
        raise CorruptUpdate(
            f"{name}: expected {number:,} positions, the counts of the spans add up to "
            f"{counts.sum():,}"
        )
    starts = np.concatenate([[0], np.cumsum(counts)])
    for span in range(num_spans):
        own = positions[starts[span] : starts[span + 1]].astype(np.int64)
        length = min(SPAN, num_values - span * SPAN)
        if len(own) and (own[-1] >= length or (np.diff(own) <= 0).any()):
            raise CorruptUpdate(
                f"{name}: expected increasing positions below {length:,} in span {span:,}, found "
                "one that is out of range, twice, or out of order"
            )

    def decode(low: int, high: int) -> Floats:
        decoded = np.zeros(high - low, dtype=np.float32)
        for span in range(low // SPAN, -(-high // SPAN)):
            own = slice(starts[span], starts[span + 1])
            at = positions[own].astype(np.int64) + (span * SPAN - low)
            is_within = (at >= 0) & (at < high - low)
            wide = (codes[own].astype(np.uint32) << 16).view(np.float32)
            decoded[at[is_within]] = wide[is_within]
        return decoded

    return EncodedVector(num_values, decode)


def largest_in(values: Floats, number: int, *, length: int) -> Iterator[Positions]:
    """Yield the positions of the ``number`` largest magnitudes, increasing, piece by piece."""
    threshold, num_equal = _threshold(values, number)
    for low in range(0, len(values), length):
        bits = _bits(values[low : low + length])
        equal = np.flatnonzero(bits == threshold)[:num_equal]
        num_equal -= len(equal)
        yield np.union1d(np.flatnonzero(bits > threshold), equal) + low


def _bits(values: Floats) -> Bits:
    """Return the bits of the magnitudes: as integers they have the order of the magnitudes."""
    bits: Bits = values.view(np.uint32) & np.uint32(0x7FFFFFFF)
    return bits


def _threshold(values: Floats, number: int) -> tuple[int, int]:
    """Return the bits of the ``number``-th largest magnitude, and how many of its equals are sent.

    All larger magnitudes are sent.
    """
    upper, num_left = _largest_bin((bits >> np.uint32(16) for bits in _spans(values)), number)
    within = (bits[bits >> 16 == upper] & np.uint32(0xFFFF) for bits in _spans(values))
    lower, num_left = _largest_bin(within, num_left)
    return upper << 16 | lower, num_left


def _spans(values: Floats) -> Iterator[Bits]:
    return (_bits(values[low : low + SPAN]) for low in range(0, len(values), SPAN))


def _largest_bin(parts: Iterable[Bits], number: int) -> tuple[int, int]:
    """Return the bin of the ``number``-th largest, and how many of that bin are among them."""
    totals = np.zeros(NUM_BINS, dtype=np.int64)
    for part in parts:
        totals += np.bincount(part, minlength=NUM_BINS)
    from_top = np.cumsum(totals[::-1])
    place = int(np.searchsorted(from_top, number))
    bin_number = NUM_BINS - 1 - place
    return bin_number, int(number - (from_top[place] - totals[bin_number]))
