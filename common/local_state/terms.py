"""SCAFFOLD in a plan: the mean control variate down, the change of the device's own one up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from headwater.common.sums.tensor_field import Values
from headwater.common.terms import SumOf, Terms

VARIATES, WEIGHTS = "control_variates", "control_variate_weights"
MAX_VALUE, MAX_WEIGHT = 2.0**24, 2.0**40


def moved_bytes(num_values: int) -> tuple[int, int]:
    """Return the bytes that SCAFFOLD adds to a model down and to an update up."""
    return 4 * num_values, 4 * (num_values + 1)


class ScaffoldTerms(Terms):
    """What a device needs to correct its local steps, and what it adds to the sums.

    The server keeps two sums over all devices that have ever taken part: of weight x control
    variate, and of weight. A device sends by how much its own part of both has changed.
    """

    NAME: ClassVar[str] = "control_variates"

    variate: Values
    """c: the mean of the devices' control variates, [P]."""
    first_round: Annotated[int, Field(ge=0)]
    """The rounds that counted when the server's sums began: an older state is of other sums."""

    @property
    def carries_state(self) -> bool:
        return True

    def sums(self, num_values: int) -> Mapping[str, SumOf]:
        return {
            VARIATES: SumOf(length=num_values, limit=MAX_VALUE),
            WEIGHTS: SumOf(length=1, limit=MAX_WEIGHT, scale_bits=0),
        }
