"""The tables of a comparison: the metric at equal cost, and the cost of the target."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from headwater.common.system.printable import printable_name
from headwater.common.wording import bytes_text
from headwater.simulation.compare.budget import RESOURCES, Budget, amount_text
from headwater.simulation.compare.standing import Spread, Standing, equal_amount


def equal_table(standings: Sequence[Standing], *, metric: str) -> Table:
    """Return the metric's median and range when each algorithm had spent the same.

    The amount of each resource is the largest that every run spent.
    """
    amounts = {resource: equal_amount(standings, resource) for resource in RESOURCES}
    table = _table(f"{metric.replace('_', ' ')} at equal cost: median (range over the seeds)")
    table.add_column("after", overflow="fold")
    for resource, amount in amounts.items():
        title = resource if amount is None else amount_text(resource, amount)
        table.add_column(title, justify="right", overflow="fold")
    for one in standings:
        cells = [
            _metric_text(None if amount is None else one.at(resource, amount))
            for resource, amount in amounts.items()
        ]
        table.add_row(escape(one.candidate.name), *cells)
    return table


def target_table(
    standings: Sequence[Standing], *, metric: str, target: float, budget: Budget
) -> Table:
    """Return each algorithm's rate, its metric at the end, and what the target cost it."""
    words = metric.replace("_", " ")
    table = _table(f"until {words} {target:.4g}: medians (range of {budget.resource})")
    for title in ("algorithm", "rate", "at the end", *RESOURCES):
        side = "left" if title == "algorithm" else "right"
        table.add_column(title, justify=side, overflow="fold")  # type: ignore[arg-type]
    for one in standings:
        name, rate = escape(one.candidate.name), "-" if one.rate is None else f"{one.rate:g}"
        last = "diverged" if one.num_diverged and one.last is None else _metric_text(one.last)
        cells = []
        for resource in RESOURCES:
            cost = one.cost_to(target, resource)
            text = _cost_text(resource, cost) if one.runs or one.num_diverged else "-"
            if resource == budget.resource and cost is not None and len(one.runs) > 1:
                text += f" ({_bare(resource, cost.low)} to {_bare(resource, cost.high)})"
            cells.append(text)
        table.add_row(name, rate, last, *cells)
    return table


def search_line(standings: Sequence[Standing]) -> str:
    """Return what the searches for the rates cost, all together."""
    num_runs = sum(len(one.tried) for one in standings)
    spent = [
        amount_text(resource, sum(one.search_cost[resource] for one in standings))
        for resource in RESOURCES
    ]
    return f"{num_runs} short runs chose the rates, and cost {', '.join(spent)}"


def _table(title: str) -> Table:
    return Table(
        box=None, pad_edge=False, title=escape(printable_name(title)), title_justify="left"
    )


def _metric_text(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    if spread.low == spread.high:
        return f"{spread.median:.4g}"
    return f"{spread.median:.4g} ({spread.low:.4g} to {spread.high:.4g})"


def _cost_text(resource: str, cost: Spread | None) -> str:
    return "not reached" if cost is None else _bare(resource, cost.median)


def _bare(resource: str, amount: float) -> str:
    if amount == float("inf"):
        return "never"
    if resource == "bytes":
        return bytes_text(amount)
    return f"{amount:.3g}" if resource == "seconds" and amount < 100 else f"{amount:,.0f}"
