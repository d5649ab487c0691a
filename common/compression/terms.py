"""The terms of a round's compression, as a plan states them: the method, and the bytes it takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from headwater.common.compression.sorted_positions import positions_bytes
from headwater.common.settings.rounds import CompressionSettings
from headwater.common.sums.tensor_field import Bytes
from headwater.common.terms import Terms

FewBits = Literal["int4", "int2", "int1"]
Method = Literal["bfloat16", "int8", "int4", "int2", "int1", "top-k", "random-k", "low-rank"]
Precision = Literal["bfloat16", "int4", "int2", "int1"]
DifferenceMethod = Literal["bfloat16", "int8", "int4", "int2", "int1"]
"""How a model is sent as a difference to another."""

Side = Literal["left", "right"]
Place = Annotated[int, Field(ge=0, le=2**48)]
Length = Annotated[int, Field(ge=1, le=2**40)]
MAX_MATRICES = 1 << 16

FEW_BITS: Final[Mapping[FewBits, int]] = {"int4": 4, "int2": 2, "int1": 1}
BLOCK = 1024
"""Coordinates that share a scale, a float32: 0.03 bits more for each coordinate."""
SPAN = 1 << 16
"""Coordinates whose positions top-k counts together, so that each position takes 16 bits."""


class Matrix(NamedTuple):
    """A matrix in the vector, row by row from the coordinate ``start``."""

    start: Place
    rows: Length
    columns: Length

    @property
    def end(self) -> int:
        """The coordinate behind its last one."""
        return self.start + self.rows * self.columns

    def rank(self, most: int) -> int:
        """Return the rank of its factors, which have at most ``most``."""
        return min(most, self.rows, self.columns)

    def shape_of_columns(self, terms: CompressionTerms) -> tuple[int, int]:
        """Return the shape of the columns that all devices share."""
        return (self.columns if terms.side == "right" else self.rows), self.rank(terms.rank)

    def length_of_factor(self, terms: CompressionTerms) -> int:
        """Return the number of values that are sent of it."""
        return self.rank(terms.rank) * (self.rows if terms.side == "right" else self.columns)


class CompressionTerms(Terms):
    """How a device encodes its update; both sides compute the number of bytes from it."""

    NAME: ClassVar[str] = "compression"
    CODING: ClassVar[str | None] = "headwater.common.compression.encoding:Coding"

    method: Method
    fraction: Annotated[float, Field(gt=0, le=1)] = Field(
        0.1, description="of the coordinates that top-k and random-k send"
    )
    feedback: bool = Field(True, description="add what was not sent to the device's next update")
    values: Precision = Field("bfloat16", description="how top-k and low-rank send their values")
    rank: Annotated[int, Field(ge=1, le=4096)] = Field(
        1, description="the columns of a factor in low-rank, at most"
    )
    matrices: Annotated[tuple[Matrix, ...], Field(max_length=MAX_MATRICES)] = Field(
        (), description="the matrices of which low-rank sends a factor, in the vector's order"
    )
    side: Side | None = Field(None, description="of the matrices the shared columns of low-rank")
    columns: Bytes | None = Field(None, description="those columns, of one matrix after another")

    @model_validator(mode="after")
    def _check_low_rank(self) -> Self:
        if self.method == "low-rank" and (self.side is None or self.columns is None):
            raise ValueError("low-rank needs a side and columns")
        return self

    @property
    def why_alone(self) -> str | None:
        return "each device encodes its own vector (--compress)"

    @property
    def carries_state(self) -> bool:
        return self.feedback

    @property
    def is_sparse(self) -> bool:
        """Whether only a part of the coordinates is sent."""
        return self.method in ("top-k", "random-k")

    @property
    def sent_share(self) -> float:
        """The least share that is sent of a coordinate, or of a matrix."""
        if self.method != "low-rank":
            return self.fraction if self.is_sparse else 1.0
        shares = (one.length_of_factor(self) / (one.rows * one.columns) for one in self.matrices)
        return min(shares, default=1.0)

    def num_sent(self, num_values: int) -> int:
        """Return how many coordinates of a vector are sent; at least one of a vector that has any.

        The same fraction as a decimal gives the same number on every machine: the product is
        rounded to nine places before it is rounded up.
        """
        if self.method == "low-rank":
            saved = (one.rows * one.columns - one.length_of_factor(self) for one in self.matrices)
            return max(num_values - sum(saved), 0)
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
            case "top-k" if self.values != "bfloat16":
                positions = positions_bytes(number, num_values)
                return positions + few_bits_bytes(self.values, number)
            case "top-k":
                return 4 * -(-num_values // SPAN) + (2 + 2) * number
            case "low-rank" if self.values != "bfloat16":
                return few_bits_bytes(self.values, number)
            case _:
                return 2 * number

    def update_bytes(self, num_values: int) -> int:
        return self.num_bytes(num_values)

    @property
    def tensor_bytes(self) -> int:
        return len(self.columns or b"")


def terms_of(settings: CompressionSettings) -> CompressionTerms | None:
    """Return what a plan says of compression; None if updates are sent in float32, or low-rank.

    Of the latter a run's rounds say more (``server.compression.low_rank_rounds``).
    """
    if settings.up in ("off", "low-rank"):
        return None
    return CompressionTerms(
        method=settings.up,
        fraction=settings.fraction,
        feedback=settings.feedback,
        values=settings.values,
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
