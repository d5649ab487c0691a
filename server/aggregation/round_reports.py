"""What a round's updates tell beside their vectors, in columns, and what it adds up to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from headwater.common.messages import Reported
from headwater.server.planning.target_batch import Gathered


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """What several devices tell: an entry for each in every column, of a metric for who has it.

    ``sent_weight`` is what an update weighs, ``summed_weight`` what its loss was summed over, as
    its steps tell it; another only with dataset weighting.
    """

    round: int
    names: Sequence[str]
    num_examples: Sequence[int]
    num_steps: Sequence[int]
    sent_weight: Sequence[int]
    summed_weight: Sequence[int]
    loss_sum: Sequence[float]
    metric_sums: Mapping[str, Sequence[float]]
    seconds: Sequence[float]

    @staticmethod
    def of(*reports: Reported) -> Told:
        """Return what some devices tell, all of one round; at least one of them."""
        names = {name for report in reports for name in report.metric_sums}
        return Told(
            round=reports[0].round,
            names=[report.name for report in reports],
            num_examples=[report.num_examples for report in reports],
            num_steps=[report.num_steps for report in reports],
            sent_weight=[report.weight for report in reports],
            summed_weight=[report.summed_weight for report in reports],
            loss_sum=[report.loss_sum for report in reports],
            metric_sums={
                name: [one.metric_sums[name] for one in reports if name in one.metric_sums]
                for name in sorted(names)
            },
            seconds=[report.seconds for report in reports],
        )


def loss_sum(parts: Iterable[Told]) -> float:
    """Add up the losses, rounded once, so that the order of arrival cannot matter."""
    return math.fsum(chain.from_iterable(part.loss_sum for part in parts))


def metric_sums(parts: Sequence[Told]) -> dict[str, float]:
    """Add up the metrics likewise, by name."""
    names = sorted({name for part in parts for name in part.metric_sums})
    return {
        name: math.fsum(chain.from_iterable(part.metric_sums.get(name, ()) for part in parts))
        for name in names
    }


def gathered(parts: Iterable[Told], *, max_weight_per_example: int) -> Gathered:
    """Sum what a round's updates hold.

    The steps tell what was summed; what they claim beyond the task's bound does not count. Where
    an update has none, what was sent stands for it.
    """
    num_examples = sent = summed = 0
    for part in parts:
        num_examples += sum(part.num_examples)
        sent += sum(part.sent_weight)
        columns = (part.num_examples, part.sent_weight, part.summed_weight)
        for number, own, told in zip(*columns, strict=True):
            summed += min(told or own, number * max_weight_per_example)
    return Gathered(num_examples=num_examples, summed_weight=summed, sent_weight=sent)
