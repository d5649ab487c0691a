"""Encodes a vector by any of the methods, and reads an encoded one; checks what arrived.

The draws of stochastic rounding follow from the run's seed, the round and the client's name, so a
run gives the same bits on every engine.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from headwater.common.compression.few_bits import decoded_few_bits, encode_few_bits
from headwater.common.compression.low_rank import (
    SharedFactors,
    decoded_factors,
    encode_factors,
)
from headwater.common.compression.packed_top import decoded_packed_top, encode_packed_top
from headwater.common.compression.random_coordinates import (
    SharedPositions,
    decoded_random,
    encode_random,
)
from headwater.common.compression.rounding import (
    decoded_bfloat16,
    decoded_int8,
    encode_bfloat16,
    encode_int8,
)
from headwater.common.compression.terms import CompressionTerms
from headwater.common.compression.top_coordinates import decoded_top, encode_top
from headwater.common.errors import CorruptUpdate
from headwater.common.messages import Plan
from headwater.common.sums.encoded_vector import EncodedVector


@dataclass(frozen=True, kw_only=True, slots=True)
class Coding:
    """How the devices of a round encode their updates: the terms, and what fixes the draws."""

    terms: CompressionTerms
    run_seed: int
    round: int

    def encode(self, values_P: Tensor, name: str) -> bytearray:
        """Return a client's encoded update; the vector becomes what the encoding left out."""
        match self.terms.method:
            case "bfloat16":
                return encode_bfloat16(values_P)
            case "int8":
                text = f"rounding {self.run_seed} {self.round} {name}".encode()
                seed = int.from_bytes(hashlib.sha256(text).digest()[:16], "little")
                return encode_int8(values_P, np.random.Generator(np.random.Philox(seed)))
            case "int4" | "int2" | "int1" as few:
                return encode_few_bits(values_P, few)
            case "top-k":
                number, values = self.terms.num_sent(values_P.numel()), self.terms.values
                if values == "bfloat16":
                    return encode_top(values_P, number)
                return encode_packed_top(values_P, number, values)
            case "random-k":
                return encode_random(values_P, self.positions(values_P.numel()))
            case "low-rank":
                return encode_factors(values_P, self._factors(values_P.numel()), self.terms.values)

    def read(
        self, data: memoryview | bytes | bytearray, name: str, num_values: int
    ) -> EncodedVector:
        """Return a client's encoded update for reading; ``data`` must stay as it is meanwhile.

        Raises:
            CorruptUpdate: the length is not that of the terms; or see ``rounding.decoded_int8``,
                ``few_bits.decoded_few_bits`` and ``top_coordinates.decoded_top``.
            NonFiniteUpdate: see the same. A NaN among bfloat16 values is found where the vector is
                checked.
        """
        memory, expected = memoryview(data), self.terms.num_bytes(num_values)
        method = self.terms.method
        if len(memory) != expected:
            raise CorruptUpdate(
                f"{name}: an update in {method} of {len(memory):,} bytes, expected {expected:,}"
            )
        match method:
            case "bfloat16":
                return decoded_bfloat16(memory, num_values)
            case "int8":
                return decoded_int8(memory, num_values, name=name)
            case "int4" | "int2" | "int1":
                return decoded_few_bits(memory, num_values, method, name=name)
            case "top-k":
                number, values = self.terms.num_sent(num_values), self.terms.values
                if values == "bfloat16":
                    return decoded_top(memory, num_values, number, name=name)
                return decoded_packed_top(memory, num_values, number, values, name=name)
            case "random-k":
                return decoded_random(memory, self.positions(num_values))
            case "low-rank":
                return decoded_factors(
                    memory, self._factors(num_values), self.terms.values, name=name
                )

    def projection(self, num_values: int) -> SharedPositions | SharedFactors:
        """Return what all devices of the round send of a vector: it adds up, also under masks."""
        if self.terms.method == "low-rank":
            return self._factors(num_values)
        return self.positions(num_values)

    def _factors(self, num_values: int) -> SharedFactors:
        return SharedFactors(self.terms, num_values)

    def positions(self, num_values: int) -> SharedPositions:
        """Return the positions that random-k sends in the round."""
        number = self.terms.num_sent(num_values)
        return SharedPositions(num_values, number, run_seed=self.run_seed, round_number=self.round)


def coding_of(plan: Plan) -> Coding:
    """Return how the updates of a plan with such terms are encoded."""
    terms = plan.of(CompressionTerms)
    assert terms is not None
    return Coding(terms=terms, run_seed=plan.run_seed, round=plan.round)
