"""The model as a difference to the one that devices hold, in bfloat16 or int8.

The server keeps one broadcast model b for all devices, as they hold it, to the bit. For each
version x of its own model it sends q, the rounded difference x - b, and both sides add the same q
to the same b. What the rounding lost is in the next difference, so b follows x with the error of
one difference only. A device that holds another model is sent b whole.

A difference is the encodings of its pieces of ``CHUNK`` coordinates, one after another, so that a
device adds each piece as it arrives and holds no more than one. The sum is checked by the SHA-256
of the model that results; on a mismatch the server sends the model whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from headwater.common.compression.encoding import Coding
from headwater.common.compression.rounding import encode_bfloat16, encode_int8
from headwater.common.compression_terms import CompressionTerms
from headwater.common.model.layout import ModelLayout
from headwater.common.model.vectors import CHUNK

DifferenceMethod = Literal["bfloat16", "int8"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDifference:
    """What turns one model into another; both are named by the SHA-256 of their vectors, in hex."""

    base_id: str
    image_id: str
    method: DifferenceMethod
    data: bytearray = field(repr=False)


class SentModel(Protocol):
    """A model as it is sent to devices: the server's own, or the one that follows it."""

    @property
    def layout(self) -> ModelLayout: ...
    @property
    def digest(self) -> bytes:
        """The SHA-256 of the vector and of the frozen part's digest."""
        ...

    @property
    def difference(self) -> ModelDifference | None:
        """What devices need that hold the version before; None: the whole model."""
        ...

    def buffer(self) -> memoryview:
        """Return the memory of the trainable parameters."""
        ...


def difference_bytes(method: DifferenceMethod, num_values: int) -> int:
    """Return the length of a difference; it does not depend on the values."""
    whole, rest = divmod(num_values, CHUNK)
    terms = CompressionTerms(method=method)
    return whole * terms.num_bytes(CHUNK) + terms.num_bytes(rest)


def move_towards(base_P: Tensor, target_P: Tensor, method: DifferenceMethod) -> bytearray:
    """Add the rounded difference to ``target_P`` to a vector in place; return the difference."""
    data = bytearray()
    reader = DifferenceReader(base_P.numpy().data.cast("B"), method)
    for low in range(0, len(base_P), CHUNK):
        part = target_P[low : low + CHUNK] - base_P[low : low + CHUNK]
        # To nearest: what is lost comes with the next difference, and chance would only add to it.
        piece = encode_bfloat16(part) if method == "bfloat16" else encode_int8(part, random=None)
        reader.add(piece)
        data += piece
    return data


class DifferenceReader:
    """Adds a difference that arrives in parts of any length to a model's memory."""

    def __init__(self, memory: memoryview, method: DifferenceMethod) -> None:
        self._values_P = torch.frombuffer(memory, dtype=torch.float32)
        terms = CompressionTerms(method=method)
        self._coding = Coding(terms=terms, run_seed=0, round=0)
        self._piece = bytearray()
        self._low = 0

    @property
    def is_complete(self) -> bool:
        """Whether every coordinate has its difference."""
        return self._low == len(self._values_P) and not self._piece

    def add(self, data: bytes | bytearray) -> None:
        """Take the next bytes.

        Raises:
            CorruptUpdate, NonFiniteUpdate: see ``Coding.read``; the memory is then no model's.
        """
        at = 0
        while at < len(data):
            part = self._values_P[self._low : self._low + CHUNK].numpy()
            needed = self._coding.terms.num_bytes(len(part)) - len(self._piece)
            if not needed:
                self._coding.read(data[at:], "the server", 0)  # beyond the end: its length is wrong
            self._piece += data[at : at + needed]
            at += needed
            if len(self._piece) == self._coding.terms.num_bytes(len(part)):
                decoded = self._coding.read(self._piece, "the server", len(part))
                np.add(part, decoded[:], out=part)
                self._low += len(part)
                self._piece = bytearray()
