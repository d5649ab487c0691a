"""``compare.json``: everything that the tables and the plot of a comparison show."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headwater.common.errors import StateError
from headwater.common.system.atomic_file import write_atomically
from headwater.simulation.compare.budget import RESOURCES
from headwater.simulation.compare.comparison import Comparison
from headwater.simulation.compare.standing import Spread, Standing, equal_amount

RECORD = "compare.json"


def write_record(
    comparison: Comparison,
    standings: Sequence[Standing],
    *,
    metric: str,
    target: float | None,
    advice: str | None,
    is_done: bool,
) -> Path:
    """Write the record; return its path.

    Raises:
        StateError: the folder cannot be written.
    """
    amounts = {resource: equal_amount(standings, resource) for resource in RESOURCES}
    record = {
        "advice": advice,
        "is_done": is_done,
        "budget": {comparison.budget.resource: comparison.budget.amount},
        "seeds": comparison.seeds,
        "metric": metric,
        "target": target,
        "equal_amounts": amounts,
        "algorithms": [_algorithm(one, target, amounts) for one in standings],
    }
    path = comparison.folder / RECORD
    try:
        write_atomically(path, json.dumps(record, indent=1).encode())
    except OSError as error:
        raise StateError(f"cannot write {path}: {error.strerror}") from error
    return path


def _algorithm(one: Standing, target: float | None, amounts: dict[Any, float | None]) -> Any:
    return {
        "name": one.candidate.name,
        "flags": None if one.rate is None else one.flags,
        "rate": one.rate,
        "search": {
            "scores": [{"rate": rate, "score": score} for rate, score in one.tried.items()],
            "cost": one.search_cost,
        },
        "num_diverged": one.num_diverged,
        "last": _numbers(one.last),
        "to_target": {
            resource: None if target is None else _numbers(one.cost_to(target, resource))
            for resource in RESOURCES
        },
        "at_equal": {
            resource: None if amount is None else _numbers(one.at(resource, amount))
            for resource, amount in amounts.items()
        },
        "runs": [
            {"values": run.values, "total": run.total}
            | {resource: [cost[resource] for cost in run.spent] for resource in RESOURCES}
            for run in one.runs
        ],
    }


def _numbers(spread: Spread | None) -> dict[str, float | None] | None:
    """Return a spread by names; an infinite end, which JSON does not know, is null."""
    if spread is None:
        return None
    return {k: v if math.isfinite(v) else None for k, v in spread._asdict().items()}
