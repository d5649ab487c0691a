"""How fast a device trains, followed from round to round.

A device says at joining that a micro-batch of s examples takes a + b s seconds. Every update tells
how long its micro-batches really took, and the server follows; in a masked round the device keeps
its steps to itself, follows its own pace and tells the line. The level comes first: the line is
scaled by the ratio of seen to believed, most of the way in one round, so that quotas follow within
two rounds when something else is started on a laptop. The ratio is that of the round's sums, so
that a device that is held to a share of its cores, and pauses for that now and then, counts with
its pauses; but the round is cut into a few stretches, and of one that lies far from their median
only so much counts: a single slow micro-batch moves little. (The median alone is nearly three times
as far off from round to round.) Then
the slope: what the sizes of a round say against one another bends the line
(``common.stats.linear_fit.refitted``).
"""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Sequence
from itertools import groupby, pairwise

from headwater.common.messages import DeviceReport, Step
from headwater.common.stats.linear_fit import Line, refitted

# In logarithms: after a change by 5, two rounds come within 5^(0.2^2) - 1 = 7 % of it.
WEIGHT = 0.8
# Of a round; fewer micro-batches are a stretch each.
NUM_STRETCHES = 8
# How far a stretch counts from their median.
OUTLYING = 1.25
# What one round may claim at the most; a clock that jumped must not end a device's part in the run.
LARGEST_CHANGE = 16.0
# And how far one size may lie from the level of them all: it may have been seen only once.
LARGEST_BEND = 2.0
LONGEST_SECONDS = 1e9
SAME = 1e-9  # of a micro-batch's seconds: no clock tells such a difference
LEAST_SECONDS = 1e-9  # per example; what a device claims below it is rounding, or a lie


def told(report: DeviceReport) -> Line | None:
    """Return the seconds of a micro-batch as a device told them; None if it was not asked."""
    if report.seconds_per_micro_batch is None or report.seconds_per_example is None:
        return None
    return bounded(Line(base=report.seconds_per_micro_batch, each=report.seconds_per_example))


def followed(line: Line, steps: Sequence[Step]) -> Line:
    """Return the line behind a round in which the micro-batches took what ``steps`` say.

    The level changes by a factor of at most LARGEST_CHANGE^WEIGHT, whatever the steps claim. Steps
    without examples teach nothing, nor do those that took what was believed: the line stays as it
    is. Steps of no time at all lower the level and leave the slope.
    """
    seen = [(step.num_examples, step.seconds) for step in steps if step.num_examples]
    if all(abs(seconds - line.at(size)) <= SAME * seconds for size, seconds in seen):
        return line
    ratio = _robust_ratio(line, seen)
    factor = min(max(ratio, 1 / LARGEST_CHANGE), LARGEST_CHANGE) ** WEIGHT
    levelled = line.times(factor)
    if ratio <= 0:
        return bounded(levelled)
    bends = _bends(line, seen, ratio)
    shape = {
        size: levelled.at(size) * min(max(bend, 1 / LARGEST_BEND), LARGEST_BEND)
        for size, bend in bends.items()
    }
    return bounded(refitted(levelled, shape))


def _bends(line: Line, seen: Sequence[tuple[int, float]], ratio: float) -> dict[int, float]:
    """Return the ratio of each size over that of all."""
    if all(size == seen[0][0] for size, _ in seen):
        return {seen[0][0]: 1.0}  # as most rounds are
    by_size = groupby(sorted(seen, key=operator.itemgetter(0)), key=operator.itemgetter(0))
    return {size: _robust_ratio(line, list(group)) / ratio for size, group in by_size}


def _robust_ratio(line: Line, seen: Sequence[tuple[int, float]]) -> float:
    """Return the seconds seen over those believed, without what lies far out."""
    num_stretches = min(len(seen), NUM_STRETCHES)
    ends = [len(seen) * at // num_stretches for at in range(num_stretches + 1)]
    stretches = [seen[start:end] for start, end in pairwise(ends)]
    believed = [math.fsum(line.at(size) for size, _ in stretch) for stretch in stretches]
    ratios = [
        math.fsum(seconds for _, seconds in stretch) / told
        for stretch, told in zip(stretches, believed, strict=True)
    ]
    middle = statistics.median(ratios)
    within = [min(max(ratio, middle / OUTLYING), middle * OUTLYING) for ratio in ratios]
    return math.fsum(map(operator.mul, within, believed)) / math.fsum(believed)


def bounded(line: Line) -> Line:
    """Return the line within what may be believed of any device."""
    return Line(
        base=min(line.base, LONGEST_SECONDS),
        each=min(max(line.each, LEAST_SECONDS), LONGEST_SECONDS),
    )
