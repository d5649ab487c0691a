"""An encoded vector that is decoded part by part, so that nobody holds all of it in float32.

And the coding by which the devices of a round make one, as a plan's terms say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwater.common.model.vectors import CHUNK, squared_norm
from headwater.common.terms import Terms

Floats: TypeAlias = NDArray[np.float32]
Decode = Callable[[int, int], Floats]
"""Returns the coordinates from ``low`` (inclusive) to ``high`` (exclusive), as new memory."""


class EncodedVector:
    """A vector [P] whose coordinates are decoded where they are read; it reads as an array."""

    def __init__(self, num_values: int, decode: Decode) -> None:
        self._num_values = num_values
        self._decode = decode

    def __len__(self) -> int:
        return self._num_values

    def __getitem__(self, part: slice) -> Floats:
        low, high, _ = part.indices(self._num_values)
        return self._decode(low, max(low, high))

    def decode_into(self, values_P: Tensor) -> None:
        """Overwrite a vector of the same length with the decoded one."""
        target = values_P.numpy()
        for start in range(0, len(self), CHUNK):
            target[start : start + CHUNK] = self[start : start + CHUNK]

    def tensor(self) -> Tensor:
        """Return the whole vector, decoded: four bytes for each coordinate."""
        values_P = torch.empty(len(self))
        self.decode_into(values_P)
        return values_P

    def squared_norm(self) -> float:
        """Return |values|^2, summed in float64."""
        starts = range(0, len(self), CHUNK)
        return math.fsum(squared_norm(torch.from_numpy(self[s : s + CHUNK])) for s in starts)


Vector: TypeAlias = Tensor | EncodedVector


def whole(values: Vector) -> Tensor:
    """Return a vector as a tensor, decoded if it is encoded."""
    return values.tensor() if isinstance(values, EncodedVector) else values


def norm_squared(values: Vector) -> float:
    """Return |values|^2 of a vector, encoded or not."""
    return values.squared_norm() if isinstance(values, EncodedVector) else squared_norm(values)


class VectorCoding(Protocol):
    """How the devices of a round encode their updates."""

    def encode(self, values_P: Tensor, name: str) -> bytearray:
        """Return a client's encoded update; the vector becomes what the encoding left out."""

    def read(
        self, data: memoryview | bytes | bytearray, name: str, num_values: int
    ) -> EncodedVector:
        """Return a client's encoded update for reading; ``data`` must stay as it is meanwhile.

        Raises:
            CorruptUpdate: the data are no such encoding of a vector of this length.
            NonFiniteUpdate: the vector is not finite.
        """


def coding_in(terms: Iterable[Terms], *, run_seed: int, round_number: int) -> VectorCoding | None:
    """Return the coding that is made of the first terms that have one; None: as float32."""
    for one in terms:
        make: Any = one.CODING
        if isinstance(make, str):
            module, _, kind = make.partition(":")
            make = getattr(import_module(module), kind)
        if make is not None:
            found: VectorCoding = make(terms=one, run_seed=run_seed, round=round_number)
            return found
    return None
