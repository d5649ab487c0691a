"""A round's sums: the reports of its updates as columns, and the result of adding them up."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import Tensor

from headwater.common.messages import ReportFields, Vitals
from headwater.common.model.vectors import CHUNK
from headwater.common.stats.gradient_noise import NoiseSums
from headwater.common.task import MAX_METRICS


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundSum:
    """A round's sums over its updates, in plain text or unmasked, and the mean gradient.

    ``mean_P`` is divided once, by ``weight``, which the updates sent. ``summed_weight`` is what
    their losses were summed over; it differs from ``weight`` only with dataset weighting. ``names``
    are the clients whose updates are included. ``num_refused`` counts the examples that these
    clients left out. ``num_clipped`` counts the values that a fixed-point range cut off; None
    without masking. ``bit_sum`` is the sum of the clients' bits on the clip norm with its noise;
    None if the clip norm does not follow them. ``unused`` are the places of the trained tensors
    that no client's loss used: their gradient is None in a plain loop, and not zero. ``sums`` are
    those beside the model's, in float64, by name.
    """

    names: tuple[str, ...]
    mean_P: Tensor = field(repr=False)
    weight: int
    num_examples: float
    summed_weight: float
    loss_sum: float
    metric_sums: Mapping[str, float]
    noise: NoiseSums | None
    num_refused: float = 0
    num_clipped: int | None = None
    bit_sum: float | None = None
    unused: tuple[int, ...] = ()
    sums: Mapping[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def loss(self) -> float:
        """The mean loss per unit of weight."""
        return self.loss_sum / self.weight


def in_all(sets: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the numbers that are in each of these sets, rising; none of no set."""
    first = sets[0] if sets else ()
    if all(one == first for one in sets):
        return tuple(first)
    return tuple(sorted(frozenset(first).intersection(*sets)))


def added_sums(sums: Sequence[RoundSum], times: Sequence[int]) -> RoundSum:
    """Add the sums of disjoint clients; each counts so many times in the mean, and once elsewhere.

    The mean is sum(times x weight x mean) / sum(times x weight), taken in float64 and rounded once
    to float32, in the memory of the first. A single sum is returned as it is: its factor cancels.
    """
    first, *others = sums
    if not others:
        return first
    weights = [number * one.weight for number, one in zip(times, sums, strict=True)]
    parts = [torch.split(one.mean_P, CHUNK) for one in sums]
    for chunks in zip(*parts, strict=True):
        total = sum(weight * chunk.double() for weight, chunk in zip(weights, chunks, strict=True))
        chunks[0].copy_(total / sum(weights))
    return replace(
        first,
        names=tuple(chain.from_iterable(one.names for one in sums)),
        weight=sum(one.weight for one in sums),
        num_examples=sum(one.num_examples for one in sums),
        summed_weight=sum(one.summed_weight for one in sums),
        loss_sum=math.fsum(one.loss_sum for one in sums),
        metric_sums={
            name: math.fsum(one.metric_sums.get(name, 0.0) for one in sums)
            for name in first.metric_sums
        },
        noise=None,
        num_refused=sum(one.num_refused for one in sums),
        num_clipped=sum(one.num_clipped or 0 for one in sums),
        unused=in_all([one.unused for one in sums]),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportColumns:
    """The reports of several updates as columns, with an entry for each client.

    A metric's column has NaN for a client that does not report it. ``sent_weight`` is the weight
    of an update, ``summed_weight`` the weight that its steps summed the loss over; they differ only
    with dataset weighting.
    """

    round: int
    names: Sequence[str]
    num_examples: Sequence[int]
    num_refused: Sequence[int]
    num_steps: Sequence[int]
    sent_weight: Sequence[int]
    summed_weight: Sequence[int]
    loss_sum: Sequence[float]
    metric_sums: Mapping[str, Sequence[float]]
    seconds: Sequence[float]
    vitals: Sequence[Vitals]

    @staticmethod
    def of(*reports: ReportFields) -> ReportColumns:
        """Return the columns of reports of one round; at least one report."""
        metrics = {name for report in reports for name in report.metric_sums}
        return ReportColumns(
            round=reports[0].round,
            names=[report.name for report in reports],
            num_examples=[report.num_examples for report in reports],
            num_refused=[report.num_refused for report in reports],
            num_steps=[report.num_steps for report in reports],
            sent_weight=[report.weight for report in reports],
            summed_weight=[report.summed_weight for report in reports],
            loss_sum=[report.loss_sum for report in reports],
            metric_sums={
                name: [one.metric_sums.get(name, math.nan) for one in reports]
                for name in sorted(metrics)
            },
            seconds=[report.seconds for report in reports],
            vitals=[report.vitals for report in reports],
        )


def plain_sum(
    columns: Sequence[ReportColumns],
    *,
    names: tuple[str, ...],
    mean_P: Tensor,
    weight: int,
    max_weight_per_example: int,
    noise: NoiseSums | None,
) -> RoundSum:
    """Return the result of a round in plain text."""
    return RoundSum(
        names=names,
        mean_P=mean_P,
        weight=weight,
        num_examples=sum(chain.from_iterable(part.num_examples for part in columns)),
        num_refused=sum(chain.from_iterable(part.num_refused for part in columns)),
        summed_weight=total_summed_weight(columns, max_weight_per_example=max_weight_per_example),
        loss_sum=total_loss(columns),
        metric_sums=total_metrics(columns),
        noise=noise,
    )


def total_loss(parts: Iterable[ReportColumns]) -> float:
    """Add up the losses, rounded once, so that the result does not depend on their order."""
    return math.fsum(chain.from_iterable(part.loss_sum for part in parts))


def total_metrics(parts: Sequence[ReportColumns]) -> dict[str, float]:
    """Add up each metric, rounded once."""
    numbers = Counter[str]()
    for part in parts:
        numbers.update({name: len(_told(sums)) for name, sums in part.metric_sums.items()})
    names = most_reported(numbers)
    return {
        name: math.fsum(value for part in parts for value in _told(part.metric_sums.get(name, ())))
        for name in names
    }


def _told(sums: Sequence[float]) -> Sequence[float]:
    """Return a metric's sums without those of clients that do not report it."""
    return [value for value in sums if not math.isnan(value)]


def most_reported(numbers: Mapping[str, int]) -> list[str]:
    """Return the names of metrics, sorted, given how many clients report each.

    Of more than ``MAX_METRICS`` names, those that the fewest clients report are left out: they are
    no metrics of the task.
    """
    return sorted(sorted(numbers, key=lambda name: (-numbers[name], name))[:MAX_METRICS])


def total_summed_weight(parts: Iterable[ReportColumns], *, max_weight_per_example: int) -> int:
    """Add up the weights that the losses were summed over.

    A client's claim counts up to the task's bound for its number of examples. Where its steps have
    no weight, the weight that it sent counts.
    """
    return sum(
        min(summed or sent, num_examples * max_weight_per_example)
        for part in parts
        for num_examples, sent, summed in zip(
            part.num_examples, part.sent_weight, part.summed_weight, strict=True
        )
    )
