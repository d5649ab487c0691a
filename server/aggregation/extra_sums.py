"""Adds up the sums beside the model's, and divides each once.

They are added as integers, as the model's is (``cohort_sum``): the order of the updates changes no
bit. The scale is the one that the terms name, so that a sum does not depend on earlier rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headwater.common.terms import SumOf
from headwater.server.aggregation.cohort_sum import CohortSum


@dataclass(frozen=True, slots=True)
class _Length:
    """What a cohort sum needs of a layout: one tensor of this length."""

    num_parameters: int

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        return ((0, self.num_parameters),)


class ExtraSums:
    """The named sums of one round."""

    def __init__(self, asked: Mapping[str, SumOf]) -> None:
        self.asked = asked
        self._sums: dict[str, CohortSum] = {}
        for key, one in asked.items():
            self._sums[key] = CohortSum(_Length(one.length))
            self._sums[key].open(num_clients=1, planned_weight=1, scale_bits=one.scale_bits)

    def add(self, sums: Mapping[str, Tensor], *, weight: int, times: int) -> None:
        """Add those of one update; its plan may ask for fewer.

        In a mean it counts ``times``, as in the model's; a plain sum is of what was sent.
        """
        for key, values in sums.items():
            factor = times if self.asked[key].is_mean else 1
            self._sums[key].fold(values, weight, times=factor)

    def close(self) -> dict[str, Tensor]:
        """Return each sum in float64; a mean is divided by the weight of its updates."""
        found = {}
        for key, total in self._sums.items():
            part = total.part()
            values = part.integers_P.astype(np.float64) * 2.0 ** -part.scale_bits[0]
            if self.asked[key].is_mean:
                values /= max(total.weight, 1)  # of no weight there is no mean, but zeros
            found[key] = torch.from_numpy(values)
        return found
