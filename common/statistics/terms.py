"""What plans say of statistics: measure all examples in this round, or what was found before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from headwater.common.terms import SumOf, Terms

MAX_VALUES = 1 << 15
"""Of all columns together: the result is part of each plan, which is one frame of the wire."""
LARGEST = 2.0**24
"""Whole numbers up to this are exact in float32."""
COUNTS, MOMENTS = "statistics.counts", "statistics.moments"

Length = Annotated[int, Field(ge=0, le=MAX_VALUES)]


class FoundSums(BaseModel):
    """The sums over all devices."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    noise: Annotated[float, Field(ge=0, le=2.0**53, allow_inf_nan=False)] = 0.0
    """The standard deviation of the noise in each of them; 0: they are exact."""
    counts: Annotated[
        tuple[Annotated[int, Field(ge=0, le=2**53)], ...], Field(max_length=MAX_VALUES)
    ]
    moments: Annotated[
        tuple[Annotated[float, Field(ge=0, le=2.0**53, allow_inf_nan=False)], ...],
        Field(max_length=MAX_VALUES),
    ]


class StatisticsTerms(Terms):
    """A round that measures (``found`` is None), or what it has found for the rounds after it."""

    NAME: ClassVar[str] = "statistics"

    columns: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """The digest of what is measured, which device and server must have in common."""
    num_counts: Length = 0
    num_moments: Length = 0
    found: FoundSums | None = None
    scale_bits: Annotated[int, Field(ge=-64, le=48)] | None = None
    """Under noise, f: both sums are made in steps of 2^-f. None: as is exact for each."""

    @property
    def why_alone(self) -> str | None:
        return "each device measures its examples by itself (--statistics)"

    @property
    def asks_model(self) -> bool:
        return self.found is not None

    @property
    def subject(self) -> bytes | None:
        """The digest of the columns: a device gives each example to one sum of them."""
        return bytes.fromhex(self.columns) if self.found is None else None

    @property
    def tensor_bytes(self) -> int:
        return 0 if self.found is None else 8 * (self.num_counts + self.num_moments)

    def sums(self, num_values: int) -> Mapping[str, SumOf]:
        if self.found is not None:
            return {}
        lengths = {COUNTS: self.num_counts, MOMENTS: self.num_moments}
        scale_bits = {COUNTS: 0, MOMENTS: 32}
        if self.scale_bits is not None:
            scale_bits = dict.fromkeys(scale_bits, self.scale_bits)
        return {
            name: SumOf(length=length, limit=LARGEST, least=0, scale_bits=scale_bits[name])
            for name, length in lengths.items()
            if length
        }
