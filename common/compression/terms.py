"""The terms of a round's compression, as a plan states them: the method, and the bytes it takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from headwater.common.settings.rounds import CompressionSettings
from headwater.common.terms import Terms

FewBits = Literal["int4", "int2", "int1"]
Method = Literal["bfloat16", "int8", "int4", "int2", "int1", "top-k", "random-k"]
DifferenceMethod = Literal["bfloat16", "int8", "int4", "int2", "int1"]
"""How a model is sent as a difference to another."""

FEW_BITS: Final[Mapping[FewBits, int]] = {"int4": 4, "int2": 2, "int1": 1}
BLOCK = 1024
"""Coordinates that share a scale, a float32: 0.03 bits more for each coordinate."""
SPAN = 1 << 16
"""Coordinates whose positions top-k counts together, so that each position takes 16 bits."""


class CompressionTerms(Terms):
    """How a device encodes its update; both sides compute the number of bytes from it."""

    NAME: ClassVar[str] = "compression"
    CODING: ClassVar[str | None] = "headwater.common.compression.encoding:Coding"

    method: Method
    fraction: Annotated[float, Field(gt=0, le=1)] = Field(
        0.1, description="of the coordinates that top-k and random-k send"
    )
    feedback: bool = Field(True, description="add what was not sent to the device's next update")

    @property
    def carries_state(self) -> bool:
        return self.feedback

    @property
    def is_sparse(self) -> bool:
        """Whether only a part of the coordinates is sent."""
        return self.method in ("top-k", "random-k")

    def num_sent(self, num_values: int) -> int:
        """Return how many coordinates of a vector are sent; at least one of a vector that has any.

        The same fraction as a decimal gives the same number on every machine: the product is
        rounded to nine places before it is rounded up.
        """
        if not self.is_sparse:
            return num_values
        return min(math.ceil(round(self.fraction * num_values, 9)), num_values)

    def num_bytes(self, num_values: int) -> int:
        """Return the length of the encoding of a vector; it does not depend on the values."""
        number = self.num_sent(num_values)
        match self.method:
            case "int8":
                return num_values + 4 * -(-num_values // BLOCK)
            case "int4" | "int2" | "int1":
                return few_bits_bytes(self.method, num_values)
            case "top-k":
                return 4 * -(-num_values // SPAN) + (2 + 2) * number
            case _:
                return 2 * number

    def update_bytes(self, num_values: int) -> int:
        return self.num_bytes(num_values)


def terms_of(settings: CompressionSettings) -> CompressionTerms | None:
    """Return what a plan says of compression; None if updates are sent in float32."""
    if settings.up == "off":
        return None
    return CompressionTerms(
        method=settings.up, fraction=settings.fraction, feedback=settings.feedback
    )


def update_bytes(terms: CompressionTerms | None, num_values: int) -> int:
    """Return the bytes of a plain update under these terms; None: float32."""
    return 4 * num_values if terms is None else terms.num_bytes(num_values)


def few_bits_bytes(method: FewBits, num_values: int) -> int:
    """Return the length of a vector's encoding in few bits."""
    return 4 * -(-num_values // BLOCK) + -(-num_values * FEW_BITS[method] // 8)


def planned_difference_bytes(method: DifferenceMethod, num_values: int) -> int:
    """Return the length of a difference; in int8 about that of a few rounds'."""
    match method:
        case "bfloat16":
            return 2 * num_values
        case "int8":
            return num_values
        case _:
            return few_bits_bytes(method, num_values)
