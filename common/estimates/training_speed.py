"""Updates the estimate of a device's training speed from round to round.

When a device connects, it reports that a micro-batch of s examples takes a + b s seconds. Each
update reports the measured seconds of its micro-batches, and the server adjusts the line. Where
examples differ in length, s counts examples of the usual length (``Step.work``). In a
masked round the device does not send its steps; it adjusts its own line and sends that.

First the level: the line is scaled by the ratio of measured to expected seconds, most of the way in
one round, so that quotas adapt within two rounds when another program starts on a laptop. The ratio
is that of the round's sums, so a device that pauses to keep to a fraction of its cores counts with
its pauses. But the round is divided into a few segments, and a segment's deviation from their
median is clipped, so that a single slow micro-batch has little effect. (The median alone varies
nearly three times as much from round to round.) Then the slope: the differences between a round's
micro-batch sizes change it (``common.estimates.linear_fit.refit_line``).
"""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any

from headwater.common.estimates.linear_fit import Line, refit_line
from headwater.common.messages import DeviceReport

# Exponent of the ratio: after a change by 5, two rounds come within 5^(0.2^2) - 1 = 7 % of it.
UPDATE_EXPONENT = 0.8
# Segments of a round; with fewer micro-batches, each is a segment.
NUM_SEGMENTS = 8
# A segment's ratio is clipped to within this factor of their median.
MAX_DEVIATION = 1.25
# The largest change in one round; a clock that jumps must not exclude a device for good.
MAX_CHANGE = 16.0
# The largest ratio of one size to the level of all sizes: it may have been measured only once.
MAX_BEND = 2.0
MAX_SECONDS = 1e9
TOLERANCE = 1e-9  # of a micro-batch's seconds: no clock resolves such a difference
MIN_SECONDS_PER_EXAMPLE = 1e-9  # a smaller claim is a rounding error, or false


def reported_line(report: DeviceReport) -> Line | None:
    """Return the line that a device reported; None if the report has none."""
    if report.seconds_per_micro_batch is None or report.seconds_per_example is None:
        return None
    return clamped_line(Line(base=report.seconds_per_micro_batch, each=report.seconds_per_example))


def is_expected(expected: Any, measured: Any) -> Any:
    """Whether a micro-batch took the expected seconds; of columns a column."""
    return abs(measured - expected) <= TOLERANCE * measured


def updated_line(line: Line, measured: Sequence[tuple[float, float]]) -> Line:
    """Return the line after a round; ``measured`` are work and seconds of its micro-batches.

    The level changes by a factor of at most MAX_CHANGE^UPDATE_EXPONENT, whatever they claim. If all
    took the expected seconds, the result is ``line`` itself. Micro-batches of zero seconds lower
    the level and keep the slope.
    """
    if all(is_expected(line.at(size), seconds) for size, seconds in measured):
        return line
    ratio = _robust_ratio(line, measured)
    factor = min(max(ratio, 1 / MAX_CHANGE), MAX_CHANGE) ** UPDATE_EXPONENT
    levelled = line.times(factor)
    if ratio <= 0:
        return clamped_line(levelled)
    bends = _bends(line, measured, ratio)
    by_size = {
        size: levelled.at(size) * min(max(bend, 1 / MAX_BEND), MAX_BEND)
        for size, bend in bends.items()
    }
    return clamped_line(refit_line(levelled, by_size))


def _bends(line: Line, measured: Sequence[tuple[float, float]], ratio: float) -> dict[float, float]:
    """Return each size's ratio divided by the ratio of all sizes."""
    if all(size == measured[0][0] for size, _ in measured):
        return {measured[0][0]: 1.0}  # the usual case
    by_size = groupby(sorted(measured, key=operator.itemgetter(0)), key=operator.itemgetter(0))
    return {size: _robust_ratio(line, list(group)) / ratio for size, group in by_size}


def _robust_ratio(line: Line, measured: Sequence[tuple[float, float]]) -> float:
    """Return measured over expected seconds, with each segment's ratio clipped near the median."""
    num_segments = min(len(measured), NUM_SEGMENTS)
    ends = [len(measured) * at // num_segments for at in range(num_segments + 1)]
    segments = [measured[start:end] for start, end in pairwise(ends)]
    expected = [math.fsum(line.at(size) for size, _ in segment) for segment in segments]
    ratios = [
        math.fsum(seconds for _, seconds in segment) / total
        for segment, total in zip(segments, expected, strict=True)
    ]
    middle = statistics.median(ratios)
    clipped = [min(max(ratio, middle / MAX_DEVIATION), middle * MAX_DEVIATION) for ratio in ratios]
    return math.fsum(map(operator.mul, clipped, expected)) / math.fsum(expected)


def clamped_line(line: Line) -> Line:
    """Return the line with both coefficients within plausible bounds for any device."""
    return Line(
        base=min(line.base, MAX_SECONDS),
        each=min(max(line.each, MIN_SECONDS_PER_EXAMPLE), MAX_SECONDS),
    )
