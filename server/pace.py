"""How fast each device trains, followed from round to round.

A device says at joining that a micro-batch of s examples takes a + b s seconds. Every update tells
how long its micro-batches really took. The level comes first: the line is scaled by the median
ratio of seen to believed, most of the way in one round, so that quotas follow within two rounds
when something else is started on a laptop, and one slow micro-batch moves nothing. Then the slope:
what the sizes of a round say against one another bends the line (``common.line.refitted``).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from common.line import Line, medians, refitted
from common.update import DeviceReport, Step

# In logarithms: after a change by 5, two rounds come within 5^(0.2^2) - 1 = 7 % of it.
WEIGHT = 0.8
# What one round may claim at the most; a clock that jumped must not end a device's part in the run.
LARGEST_CHANGE = 16.0
# And how far one size may lie from the level of them all: it may have been seen only once.
LARGEST_BEND = 2.0
LONGEST_SECONDS = 1e9
LEAST_SECONDS = 1e-9  # per example; what a device claims below it is rounding, or a lie


def told(report: DeviceReport) -> Line | None:
    """Return the seconds of a micro-batch as a device told them; None if it was not asked."""
    if report.seconds_per_micro_batch is None or report.seconds_per_example is None:
        return None
    return bounded(Line(base=report.seconds_per_micro_batch, each=report.seconds_per_example))


def followed(line: Line, steps: Sequence[Step]) -> Line:
    """Return the line behind a round in which the micro-batches took what ``steps`` say.

    The level changes by a factor of at most LARGEST_CHANGE^WEIGHT, whatever the steps claim. Steps
    without examples teach nothing; steps of no time at all lower the level and leave the slope.
    """
    seen = [(step.num_examples, step.seconds) for step in steps if step.num_examples]
    if not seen:
        return line
    ratio = statistics.median(seconds / line.at(size) for size, seconds in seen)
    factor = min(max(ratio, 1 / LARGEST_CHANGE), LARGEST_CHANGE) ** WEIGHT
    levelled = line.times(factor)
    if ratio <= 0:
        return bounded(levelled)
    bends = {size: value / line.at(size) / ratio for size, value in medians(seen).items()}
    shape = {
        size: levelled.at(size) * min(max(bend, 1 / LARGEST_BEND), LARGEST_BEND)
        for size, bend in bends.items()
    }
    return bounded(refitted(levelled, shape))


def bounded(line: Line) -> Line:
    """Return the line within what may be believed of any device."""
    return Line(
        base=min(line.base, LONGEST_SECONDS),
        each=min(max(line.each, LEAST_SECONDS), LONGEST_SECONDS),
    )
