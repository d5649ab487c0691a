"""How a model's figures differ from device to device, where that betrays nobody.

A mean hides devices that the model fails. These are figures of devices, each counted once, and no
means over examples. With few devices, or under masks, there are none: the worst tenth would be one
device, and masks hide each device's figures from the server itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headwater.common.data.metric_direction import Direction, direction_of
from headwater.common.evaluation.terms import OTHER
from headwater.common.messages import UpdateReport
from headwater.common.task import LOSS


@dataclass(frozen=True, kw_only=True)
class Spread:
    """One figure over all devices."""

    median: float
    worst_tenth: float | None
    """A tenth of the devices, rounded up, have this value or a worse one; None: it is not known
    which values are worse."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """On how many devices a model has a lower loss than the other one."""

    num_better: int
    num_worse: int
    num_equal: int


def spread_of(reports: Sequence[UpdateReport]) -> dict[str, Spread]:
    """Return the spread of the loss and of each metric, by name; devices that weigh 0 have none."""
    rows = [_figures(report) for report in reports if report.weight]
    names = [name for name in (rows[0] if rows else ()) if all(name in row for row in rows)]
    return {name: _spread(name, [row[name] for row in rows]) for name in names}


def compared(reports: Sequence[UpdateReport]) -> Comparison:
    """Count the devices on which the first model is better than the other, by the loss."""
    pairs = [(one.loss_sum, one.metric_sums[OTHER + LOSS]) for one in reports]
    return Comparison(
        num_better=sum(loss < other for loss, other in pairs),
        num_worse=sum(loss > other for loss, other in pairs),
        num_equal=sum(loss == other for loss, other in pairs),
    )


def why_none(num_devices: int, *, least: int, is_masked: bool) -> str | None:
    """Return why there is no spread; None if there is one."""
    if is_masked:
        return "masks hide each device's own figures"
    if num_devices < least:
        return (
            f"{num_devices} devices are fewer than {least} (device_test.spread_devices), and the "
            "figures would be those of single ones"
        )
    return None


def _figures(report: UpdateReport) -> Mapping[str, float]:
    sums = {LOSS: report.loss_sum} | report.metric_sums
    return {n: value / report.weight for n, value in sums.items() if not n.startswith(OTHER)}


def _spread(name: str, values: Sequence[float]) -> Spread:
    direction: Direction | None = "min" if name == LOSS else direction_of(name)
    place = -(-len(values) // 10) - 1
    worst_first = sorted(values, reverse=direction == "min")
    return Spread(
        median=statistics.median(values),
        worst_tenth=None if direction is None else worst_first[place],
    )
