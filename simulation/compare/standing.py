"""How the candidates stand: medians over the seeds at equal cost, and the cost of a target."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headwater.simulation.compare.budget import Budget, Cost, Resource
from headwater.simulation.compare.candidates import Candidate
from headwater.simulation.compare.trajectory import Trajectory

TARGET_SHARE = 0.97
"""Of the way from the worst first value to the best last one, if the user names no target."""


class Spread(NamedTuple):
    """Median and range over the seeds."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """A candidate's results: the search for its rate, and the runs with the rate that was best."""

    candidate: Candidate
    tried: dict[float, float | None]
    """The rates tried, with the metric's mean over the later half of the run; None: diverged."""
    search_cost: Cost
    rate: float | None
    """The best rate; None if all diverged, or the search is not done."""
    runs: tuple[Trajectory, ...]
    """Those that have ended, one for each seed; without those that diverged."""
    num_diverged: int

    @property
    def flags(self) -> str:
        """What to type for this candidate."""
        assert self.rate is not None
        return self.candidate.flags(self.rate)

    @property
    def has_rate_at_end(self) -> bool:
        """Whether the best rate is the smallest or largest that was tried."""
        return len(self.tried) > 1 and self.rate in (min(self.tried), max(self.tried))

    @property
    def last(self) -> Spread | None:
        """The metric at the end of the budget."""
        return _spread(run.values[-1] for run in self.runs if run.values)

    def at(self, resource: Resource, amount: float) -> Spread | None:
        """Return the metric when ``amount`` of a resource had been spent; None if a seed has none.

        A seed that diverged has none, so that the median is never one of the lucky seeds alone.
        """
        found = [run.at(resource, amount) for run in self.runs]
        values = [value for value in found if value is not None]
        return _spread(values) if len(values) == len(found) and not self.num_diverged else None

    def cost_to(self, target: float, resource: Resource) -> Spread | None:
        """Return what the target cost; an end of the spread that did not reach it is infinite.

        None if half of the seeds, or more, did not reach it.
        """
        reached = [run.cost_to(target) for run in self.runs]
        costs = [math.inf if cost is None else cost[resource] for cost in reached]
        found = _spread([*costs, *[math.inf] * self.num_diverged])
        return found if found is not None and math.isfinite(found.median) else None


def derived_target(standings: Sequence[Standing], *, is_smaller_better: bool) -> float | None:
    """Return a value of the metric that the best candidate nearly ends at; None without runs.

    It is ``TARGET_SHARE`` of the way from the worst first value to the best median at the end,
    with two digits of that way, so that it reads as 0.95; it is rounded to the easier side.
    """
    firsts = [run.values[0] for one in standings for run in one.runs if run.values]
    lasts = [one.last.median for one in standings if one.last is not None]
    if not lasts:
        return None
    best, worst = min(lasts), max(firsts)
    if not is_smaller_better:
        best, worst = max(lasts), min(firsts)
    target = worst + (best - worst) * TARGET_SHARE
    if best == worst:
        return best
    digits = 1 - math.floor(math.log10(abs(best - worst)))
    scale = 10.0**digits
    easier = math.ceil(target * scale) if is_smaller_better else math.floor(target * scale)
    return round(easier / scale, max(digits, 0))


def equal_amount(standings: Sequence[Standing], resource: Resource) -> float | None:
    """Return the largest amount of a resource that every run of every candidate spent."""
    totals = [run.total[resource] for one in standings for run in one.runs]
    return min(totals) if totals else None


def ranked(standings: Sequence[Standing], target: float, budget: Budget) -> list[Standing]:
    """Return the candidates with runs, best first.

    The best reaches the target with the least of the budget's resource. Equal ones, and those that
    do not reach it, are ordered by the metric at the end.
    """

    def key(one: Standing) -> tuple[float, float]:
        cost, last = one.cost_to(target, budget.resource), one.last
        assert last is not None
        sign = 1 if one.runs[0].is_smaller_better else -1
        return math.inf if cost is None else cost.median, sign * last.median

    return sorted((one for one in standings if one.last is not None), key=key)


def _spread(values: Iterable[float]) -> Spread | None:
    listed = sorted(values)
    if not listed:
        return None
    middle = statistics.median(listed)
    # Between a finite and an infinite cost there is no middle: half of the seeds did not reach it.
    return Spread(middle, listed[0], listed[-1])
