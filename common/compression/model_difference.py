"""The model as a difference to the one that a device holds, in bfloat16 or in 8 bits or fewer.

The server keeps one broadcast model b for all devices, as they hold it, to the bit. For each
version x of its own model it moves b towards x and sends how far: both sides add the same numbers
to the same b. What the rounding lost is in the next difference, so b follows x with the error of
one difference only.

- bfloat16, int4, int2, int1: the difference to the version before, rounded. A device that missed
  rounds is sent their differences one after another, while these are shorter than the model; one
  that holds nothing is sent the model whole.
- int8: b lies on a grid (``grid_steps``), and its differences are whole steps of the grid. They add
  exactly over several rounds, and a device that holds nothing gets the difference to zero.

A difference is the encodings of its pieces of ``CHUNK`` coordinates, one after another, so that a
device adds each piece as it arrives and holds no more than one. The sum is checked by the SHA-256
of the model that results; on a mismatch the server sends the model again, to a device that holds
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, get_args

import numpy as np
import torch
from torch import Tensor

from headwater.common.compression.few_bits import decoded_few_bits, encode_few_bits
from headwater.common.compression.grid_steps import (
    FIRST_LEVELS,
    LEVELS,
    Doubles,
    decoded_steps,
    encode_steps,
    head_bytes,
    nearest_on_grid,
    piece_bytes,
)
from headwater.common.compression.rounding import decoded_bfloat16, encode_bfloat16
from headwater.common.compression.terms import DifferenceMethod, planned_difference_bytes
from headwater.common.errors import CorruptUpdate, ProtocolMismatch
from headwater.common.model.vectors import CHUNK
from headwater.common.sums.encoded_vector import Floats

METHODS: Final[dict[str, DifferenceMethod]] = {one: one for one in get_args(DifferenceMethod)}


def checked_method(method: str, num_bytes: int, num_values: int) -> DifferenceMethod:
    """Return a method by its name, if it has differences of such a length.

    Raises:
        ProtocolMismatch: there is no such method, or the length is not that of its differences.
    """
    if method not in METHODS:
        raise ProtocolMismatch(f"the server sent a model in {method[:20]!r}")
    found, most = METHODS[method], 4 * num_values
    one = None if found == "int8" else planned_difference_bytes(found, num_values)
    if num_bytes > most or (one is not None and (not num_bytes or num_bytes % one)):
        many = "" if one is None else f", in differences of {one:,} each"
        raise ProtocolMismatch(
            f"the server's difference has {num_bytes:,} bytes, expected at most {most:,}{many}"
        )
    return found


def adds_exactly(method: DifferenceMethod) -> bool:
    """Whether the sum of differences is a difference, and so is the one from zero."""
    return method == "int8"


def move_towards(
    base_P: Tensor, target_P: Tensor, method: DifferenceMethod, *, is_first: bool = False
) -> bytearray | None:
    """Add the rounded difference to ``target_P`` to a vector in place; return the difference.

    None if it takes too many bits: a device then needs the vector whole. In int8 the vector is on
    a grid afterwards; ``is_first`` takes finer steps, as it moves all the way from zero.
    """
    data: bytearray | None = bytearray()
    levels = FIRST_LEVELS if is_first else LEVELS
    for low in range(0, len(base_P), CHUNK):
        base, target = base_P[low : low + CHUNK], target_P[low : low + CHUNK]
        piece: bytearray | None
        if method == "int8":
            moved = nearest_on_grid(target.numpy(), base.numpy(), levels=levels)
            piece = encode_steps(moved.astype(np.float64) - base.numpy())
            base.numpy()[:] = moved
        else:
            moved_P = target - base
            if method == "bfloat16":
                piece = encode_bfloat16(moved_P)
            else:
                piece = encode_few_bits(moved_P, method)
            _add_piece(piece, base.numpy(), method)
        data = None if data is None or piece is None else data + piece
    return data


def movement(differences: Sequence[bytearray], num_values: int) -> bytearray | None:
    """Return the sum of differences in int8 that follow one another; None as ``move_towards``."""
    data = bytearray()
    readers = [_pieces(one, num_values) for one in differences]
    for parts in zip(*readers, strict=True):
        piece = encode_steps(np.sum(parts, axis=0))
        if piece is None:
            return None
        data += piece
    return data


def movement_from_zero(values_P: Tensor) -> bytearray | None:
    """Return the difference in int8 from zero to a vector; None if no sum gives its bits."""
    data = bytearray()
    for part in torch.split(values_P, CHUNK):
        values = part.numpy()
        has_negative_zero = bool((np.signbit(values) & (values == 0)).any())
        piece = encode_steps(values.astype(np.float64))
        if piece is None or has_negative_zero:
            return None
        data += piece
    return data


def _pieces(data: bytearray, num_values: int) -> Iterator[Doubles]:
    """Yield a whole difference in int8, piece by piece."""
    memory, at = memoryview(data), 0
    for low in range(0, num_values, CHUNK):
        length = min(CHUNK, num_values - low)
        end = at + piece_bytes(memory[at:], length)
        yield decoded_steps(memory[at:end], length)
        at = end


class DifferenceReader:
    """Adds differences, which arrive in parts of any length, to a model's memory in turn."""

    def __init__(self, memory: memoryview, method: DifferenceMethod) -> None:
        self._values = np.frombuffer(memory, dtype=np.float32)
        self._method = method
        self._piece = bytearray()
        self._low = 0

    @property
    def is_complete(self) -> bool:
        """Whether every coordinate has its difference."""
        return self._low == len(self._values) and not self._piece

    def add(self, data: bytes | bytearray) -> None:
        """Take the next bytes.

        Raises:
            CorruptUpdate: they are no difference, or more than one; the memory is no model's then.
        """
        at = 0
        while at < len(data):
            if self.is_complete and not adds_exactly(self._method):
                self._low = 0  # the next round's
            part = self._values[self._low : self._low + CHUNK]
            if not len(part):
                raise CorruptUpdate(f"the difference is {len(data) - at:,} bytes too long")
            missing = _length(self._piece, len(part), self._method) - len(self._piece)
            self._piece += data[at : at + missing]
            at += missing
            if len(self._piece) == _length(self._piece, len(part), self._method):
                _add_piece(self._piece, part, self._method)
                self._low += len(part)
                self._piece = bytearray()


def _length(piece: bytearray, num_values: int, method: DifferenceMethod) -> int:
    """Return the bytes of a piece that begins so, as far as that says."""
    if not adds_exactly(method):
        return planned_difference_bytes(method, num_values)
    head = head_bytes(num_values)
    return head if len(piece) < head else piece_bytes(piece, num_values)


def _add_piece(piece: bytearray, values: Floats, method: DifferenceMethod) -> None:
    """Add a whole piece to the coordinates that it belongs to, in place."""
    match method:
        case "int8":
            values[:] = values + decoded_steps(piece, len(values))  # in float64: exact on a grid
        case "bfloat16":
            values += decoded_bfloat16(memoryview(piece), len(values))[:]
        case _:
            values += decoded_few_bits(memoryview(piece), len(values), method, name="the server")[:]
