"""The figures of many devices' plans as columns of numbers.

Devices with the same work share a plan, so each figure is read once a plan, not once a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from headwater.common.messages import Plan
from headwater.simulation.vectorised.round_columns import Floats, Ints


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlanColumns:
    """The plans of D devices: each different plan once, and which of them each device has [D]."""

    plans: Sequence[Plan]
    index: Ints

    @staticmethod
    def of(plans: Sequence[Plan]) -> PlanColumns:
        """Return the plans of some devices, each in its device's place, as columns."""
        of_ids = dict(zip(map(id, plans), plans, strict=True))
        numbers = dict(zip(of_ids, range(len(of_ids)), strict=True))
        index = np.fromiter(map(numbers.__getitem__, map(id, plans)), np.int64, len(plans))
        return PlanColumns(plans=list(of_ids.values()), index=index)

    def some(self, at: Ints) -> PlanColumns:
        """Return the plans of these devices."""
        return PlanColumns(plans=self.plans, index=self.index[at])

    def ints(self, figure: Callable[[Plan], int]) -> Ints:
        """Return a figure of each device's plan [D]."""
        return np.array([figure(plan) for plan in self.plans], dtype=np.int64)[self.index]

    def floats(self, figure: Callable[[Plan], float | None]) -> Floats:
        """Return a figure of each device's plan [D]; None becomes NaN."""
        return np.array([figure(plan) for plan in self.plans], dtype=np.float64)[self.index]

    def each(self, column: Callable[[Plan], Ints]) -> list[Ints]:
        """Return the numbers that follow from each device's plan."""
        columns = [column(plan) for plan in self.plans]
        return [columns[at] for at in self.index.tolist()]
