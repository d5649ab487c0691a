"""One sentence of advice: which algorithm to use, what to type, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headwater.simulation.compare.budget import RESOURCES, Budget, Resource, amount_text
from headwater.simulation.compare.standing import Spread, Standing, ranked

WORTH_SAYING = 1.25
"""How many times less of another resource an algorithm must use to be named for it."""
FEWER: dict[Resource, str] = {
    "rounds": "fewer rounds",
    "bytes": "fewer bytes",
    "examples": "fewer examples",
    "seconds": "less time",
}


def advice_of(
    standings: Sequence[Standing], *, target: float, budget: Budget, metric: str
) -> str | None:
    """Return the sentence; None if no candidate has a run."""
    order = ranked(standings, target, budget)
    if not order:
        return None
    best = order[0]
    words = metric.replace("_", " ")
    cost = best.cost_to(target, budget.resource)
    if cost is None:
        assert best.last is not None
        return (
            f"Use {best.flags}: its {words} of {best.last.median:.4g} after {budget} is the best, "
            f"though no algorithm reaches {target:.4g}."
        )
    spent = amount_text(budget.resource, cost.median)
    reason = f"it reaches a {words} of {target:.4g} in {spent}"
    if len(order) > 1:
        rival = next((one for one in order[1:] if one.candidate.name == "exact"), order[1])
        if order[1] is not rival and _is_close(order[1], cost, target, budget):
            rival = order[1]
        reason += f", where {_versus(rival, cost, target, budget)}"
    return f"Use {best.flags}: {reason}{_other_resource(order, target, budget)}."


def _versus(rival: Standing, cost: Spread, target: float, budget: Budget) -> str:
    other = rival.cost_to(target, budget.resource)
    if other is None:
        return f"{rival.candidate.name} does not reach it"
    needed = f"{rival.candidate.name} needs {_bare(budget.resource, other.median)}"
    is_close = other.low <= cost.high
    return f"{needed}, which is within the spread of the seeds" if is_close else needed


def _is_close(rival: Standing, cost: Spread, target: float, budget: Budget) -> bool:
    other = rival.cost_to(target, budget.resource)
    return other is not None and other.low <= cost.high


def _other_resource(order: Sequence[Standing], target: float, budget: Budget) -> str:
    """Return which candidate needs how much less of another resource for the target, if any."""
    best, found = order[0], (WORTH_SAYING, "")
    for resource in RESOURCES:
        own = best.cost_to(target, resource)
        for other in order[1:]:
            cost = other.cost_to(target, resource)
            if resource == budget.resource or own is None or cost is None or not cost.median:
                continue
            times = own.median / cost.median
            if math.isfinite(times) and times > found[0]:
                text = f"; {other.candidate.name} uses {times:.1f} times {FEWER[resource]}"
                found = times, text
    return found[1]


def _bare(resource: Resource, amount: float) -> str:
    """Return an amount; without its noun, which the sentence has named before."""
    if resource in ("rounds", "examples"):
        return f"{round(amount):,}"
    return amount_text(resource, amount)
