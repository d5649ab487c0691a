"""Finds the clients whose loss or metrics are far beyond the others': they are in no mean.

Such a figure moves no model, and costs no client its update (a norm does). But it would end a run
(``--stop-when``), choose its best round (``--best``), and be what people look at. So a figure, per
unit of weight, counts

* up to ten thousand times the median of the round's clients, and in any case up to 1, a loss up to
  100: a client whose targets are a hundred times as large has as many times the squared errors;
* if it is a part of the examples by its name (accuracy, recall ...), up to 2;
* of one or two clients, whose median says nothing, up to the largest that a masked round has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headwater.common.data.metric_direction import is_part
from headwater.common.estimates.gradient_noise import NoiseSums

if TYPE_CHECKING:
    from headwater.server.aggregation.round_reports import ReportColumns

MULTIPLE, LEAST, LEAST_LOSS = 10_000.0, 1.0, 100.0
NOISE_MULTIPLE = 100.0
MOST_PART = 2.0
"""A part of the examples is at most 1; their weights may be less than their number."""
MOST = 2.0**60
"""Of a figure per unit of weight, as under masks (``common.secagg.masked_numbers``)."""
LEAST_CLIENTS = 3


def false_figures(parts: Sequence[ReportColumns]) -> dict[str, str]:
    """Return the clients whose figures are beyond belief, with the first such figure of each."""
    sums = {"loss": _column([part.loss_sum for part in parts])}
    for metric in dict.fromkeys(name for part in parts for name in part.metric_sums):
        sums[metric] = _column([_sums_of(part, metric) for part in parts])
    names = [name for part in parts for name in part.names]
    return beyond_belief(names, _column([part.sent_weight for part in parts]), sums)


def beyond_belief(
    names: Sequence[str],
    weights: NDArray[np.float64],
    sums: Mapping[str, NDArray[np.float64]],
) -> dict[str, str]:
    """Return the clients with a sum too large for its weight, with the first such sum of each.

    ``sums`` are the clients' sums of the loss (by the name "loss") and of each metric; NaN is the
    sum of a client that does not report it.
    """
    found: dict[str, str] = {}
    for what, column in sums.items():
        each = np.abs(column) / np.maximum(weights, 1.0)
        each = np.where(np.isnan(each), 0.0, each)
        least = LEAST_LOSS if what == "loss" else LEAST
        if not len(each) or each.max() <= least:  # as nearly always
            continue
        median, limit = 0.0, MOST
        if len(each) >= LEAST_CLIENTS:
            median = _median(each)
            limit = max(MULTIPLE * median, least)
            if median <= 1 and what != "loss" and is_part(what):
                limit = MOST_PART
        than = f"where others have {median:.3g}"
        if len(each) < LEAST_CLIENTS:
            than = f"and at most {limit:.3g} is believed of so few devices"
        for at in np.flatnonzero(each > limit).tolist():
            found.setdefault(names[at], f"{what} {each[at]:.3g}, {than}")
    return found


def believed_noise(parts: Sequence[NoiseSums]) -> Sequence[NoiseSums]:
    """Return the devices' parts of the noise sums; one far beyond the others counts as unmeasured.

    Its gradient norms are its own word, and one of 10^40 would be in the scale for thousands of
    rounds.
    """
    measured = [one for one in parts if one.measured_weight > 0]
    if len(measured) < LEAST_CLIENTS:
        return parts
    each = np.array([(one.variance, one.squared_gradient) for one in measured])
    each = np.abs(each) / np.array([[one.measured_weight] for one in measured])
    limits = NOISE_MULTIPLE * np.median(each, axis=0)
    if not limits.all() or (each <= limits).all():
        return parts
    false = {id(one) for one, row in zip(measured, each, strict=True) if (row > limits).any()}
    return [NoiseSums(weight=one.weight) if id(one) in false else one for one in parts]


def _median(each: NDArray[np.float64]) -> float:
    """Return the median; of a count that is 0 on most devices, the median of where it is not.

    Above 0 must be a third of them, and three: else what few clients say would be its own measure.
    """
    counted = each[each > 0]
    if len(counted) >= max(LEAST_CLIENTS, len(each) / 3):
        return float(np.median(counted))
    return float(np.median(each))


def _column(parts: Sequence[NDArray[Any]]) -> NDArray[np.float64]:
    return np.concatenate([np.asarray(part, np.float64) for part in parts] or [np.zeros(0)])


def _sums_of(part: ReportColumns, metric: str) -> NDArray[np.float64]:
    """Return the clients' sums of a metric; NaN for those that do not report it."""
    sums = part.metric_sums.get(metric)
    return np.full(len(part.names), np.nan) if sums is None else sums


def without_figures(parts: Sequence[ReportColumns], names: Sequence[str]) -> list[ReportColumns]:
    """Return the columns with the figures of these clients in the place that the others' mean has.

    So each mean is that of the others, NaN if there are none, and the weights stay as they are.
    """
    left_out = set(names)
    kept = [[name not in left_out for name in part.names] for part in parts]
    weights = _column([part.sent_weight for part in parts])
    is_kept = np.array([one for part in kept for one in part], dtype=bool)
    whole = float(weights[is_kept].sum())

    def mean_of(columns: Sequence[NDArray[Any]]) -> float:
        return float(np.nansum(_column(columns)[is_kept])) / whole if whole else math.nan

    def replaced(values: NDArray[np.float64], at: int, mean: float) -> NDArray[np.float64]:
        return np.where(kept[at], values, mean * parts[at].sent_weight)

    loss = mean_of([part.loss_sum for part in parts])
    metrics = dict.fromkeys(name for part in parts for name in part.metric_sums)
    means = {name: mean_of([_sums_of(part, name) for part in parts]) for name in metrics}
    return [
        replace(
            part,
            loss_sum=replaced(part.loss_sum, at, loss),
            metric_sums={
                name: replaced(sums, at, means[name]) for name, sums in part.metric_sums.items()
            },
        )
        for at, part in enumerate(parts)
    ]
