"""How fast each device trains, followed from round to round.

A device says at joining that a micro-batch of s examples takes a + b s seconds. Every update tells
how long its micro-batches really took, and the line is scaled by the median ratio of the two, most
of the way in one round: quotas follow within two rounds when something else is started on a laptop,
and one slow micro-batch moves nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from common.update import DeviceReport, Step

# In logarithms: after a change by 5, two rounds come within 5^(0.2^2) - 1 = 7 % of it.
WEIGHT = 0.8
# What one round may claim at the most; a clock that jumped must not end a device's part in the run.
LARGEST_CHANGE = 16.0
LONGEST_SECONDS = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """A micro-batch of s examples takes ``per_micro_batch`` + ``per_example`` s seconds."""

    per_micro_batch: float
    per_example: float

    def seconds(self, num_examples: int) -> float:
        """Return the seconds of one micro-batch."""
        return self.per_micro_batch + self.per_example * num_examples


def told(report: DeviceReport) -> Pace | None:
    """Return the pace that a device told at joining; None if it was not asked."""
    if report.seconds_per_micro_batch is None or report.seconds_per_example is None:
        return None
    return Pace(
        per_micro_batch=report.seconds_per_micro_batch, per_example=report.seconds_per_example
    )


def followed(pace: Pace, steps: Sequence[Step]) -> Pace:
    """Return the pace behind a round in which the micro-batches took what ``steps`` say.

    Steps without examples, and a pace of zero, teach nothing.
    """
    ratios = [
        step.seconds / pace.seconds(step.num_examples)
        for step in steps
        if step.num_examples and pace.seconds(step.num_examples) > 0
    ]
    ratio = statistics.median(ratios) if ratios else 1.0
    factor = min(max(ratio, 1 / LARGEST_CHANGE), LARGEST_CHANGE) ** WEIGHT
    return Pace(
        per_micro_batch=min(pace.per_micro_batch * factor, LONGEST_SECONDS),
        per_example=min(pace.per_example * factor, LONGEST_SECONDS),
    )


def at_pace(report: DeviceReport, pace: Pace) -> DeviceReport:
    """Return a device's report with its pace as it is now known."""
    return report.model_copy(
        update={
            "seconds_per_micro_batch": pace.per_micro_batch,
            "seconds_per_example": pace.per_example,
        }
    )
