"""One run as a curve: the metric after each evaluated round, by what had been spent until then."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from headwater.simulation.compare.budget import RESOURCES, Cost, Resource
from headwater.simulation.sweep.results import Result


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """A run's metric and cost; ``spent`` and ``values`` have an entry for each evaluated round."""

    spent: tuple[Cost, ...]
    values: tuple[float, ...]
    total: Cost
    """What the whole run cost."""
    is_smaller_better: bool

    def at(self, resource: Resource, amount: float) -> float | None:
        """Return the metric when at most ``amount`` had been spent; None before the first value."""
        reached = bisect.bisect_right([cost[resource] for cost in self.spent], amount)
        return self.values[reached - 1] if reached else None

    def cost_to(self, target: float) -> Cost | None:
        """Return what had been spent when the metric first was the target or better."""
        for cost, value in zip(self.spent, self.values, strict=True):
            if value <= target if self.is_smaller_better else value >= target:
                return cost
        return None


def trajectory_of(result: Result, metric: str, *, is_smaller_better: bool) -> Trajectory:
    """Return the curve of a run's result."""
    totals = {
        number: dict(zip(RESOURCES, cost, strict=True))
        for number, cost in zip(result.costs, _running_costs(result), strict=True)
    }
    curve = result.curves.get(metric, {})
    return Trajectory(
        spent=tuple(totals[number] for number in curve),
        values=tuple(curve.values()),
        total=list(totals.values())[-1] if totals else dict.fromkeys(RESOURCES, 0.0),
        is_smaller_better=is_smaller_better,
    )


def summed(costs: Iterable[Cost]) -> Cost:
    """Return the sum of several costs."""
    listed = list(costs)
    return {resource: sum(cost[resource] for cost in listed) for resource in RESOURCES}


def _running_costs(result: Result) -> Iterable[tuple[float, ...]]:
    each = (
        (1.0, float(cost.num_bytes), float(cost.num_examples), cost.seconds)
        for cost in result.costs.values()
    )
    return itertools.accumulate(
        each, lambda before, one: tuple(a + b for a, b in zip(before, one, strict=True))
    )
