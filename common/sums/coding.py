"""How the devices of a round encode their updates, as a plan's terms say."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any, Protocol

from torch import Tensor

from headwater.common.sums.encoded_vector import EncodedVector
from headwater.common.terms import Terms


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
