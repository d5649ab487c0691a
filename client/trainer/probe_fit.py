"""Decides how far a probe's micro-batches grow, and fits its measured seconds and peak bytes.

Pure functions of the measured points. A size is doubled only if the peak predicted from the points
before stays below the limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headwater.client.device.interfaces import Speed
from headwater.client.memory.peak_model import NOISE_BYTES, WORKING_FACTOR, PeakModel
from headwater.common.estimates.linear_fit import Line, fit_line
from headwater.common.wording import bytes_text

# Share of the memory limit that a predicted peak may fill. With activations of 4 MB and more the
# second pass peaks at four fifths of the highest of ten passes, due to heap fragmentation.
SAFE_SHARE = 0.8

# For the whole probe, though sizes 1 and 2 are measured even if that takes longer.
PROBE_SECONDS = 2.0

# An example whose pass takes so long is measured alone. Sizes 1 and 2 would take seven times as
# long, and gain little: dispatch alone takes so long only for about a million calls of operators.
SLOW_SECONDS = 4.0

# A size is faster if an example takes this share less time; three doublings without that end the
# probe. Two would end it at 8 for a transformer and a CNN that take a quarter less time at 16.
GAIN = 0.03
STALLED_DOUBLINGS = 3

# Passes that usually take so many times their minimum are disturbed by other work.
DISTURBED = 1.5

# While a micro-batch would take less than this at the pace of the best smaller size, dispatch may
# dominate it, whatever its own pace: on a busy machine one example of a small model takes 0.2 ms on
# one core, and two take 30 ms when two cores wait for each other.
DISPATCH_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbePoint:
    """Measurements of one micro-batch size: medians, the minimum time, and the highest peak."""

    size: int
    seconds: float  # median without most interruptions
    usual_seconds: float  # median with interruptions
    least_seconds: float
    peak_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeFit:
    """A probe's result: at least one point, in growing sizes, and why the probe ended."""

    points: tuple[ProbePoint, ...]
    rest_bytes: int
    kept_bytes: float
    stopped: str

    @property
    def speed(self) -> Speed:
        """The line through the seconds, and the size above which an example takes no less time.

        Seconds without interruptions define the line's shape; it is scaled by how much longer the
        usual ones are in all, because other work slows the device. Of a slow example the fastest
        size is 1. Else it is unknown if it is the largest one measured, or if other work disturbs
        the measurement: the planner then prefers larger sizes, which lose less if it is another.
        """
        shape = fit_line([(p.size, p.seconds, 1.0) for p in self.points])
        usual = math.fsum(p.usual_seconds for p in self.points)
        line = shape.times(usual / math.fsum(p.seconds for p in self.points))
        fastest = _fastest(self.points).size
        is_slow = len(self.points) == 1 and self.points[0].seconds >= SLOW_SECONDS
        is_known = is_slow or (
            fastest < self.points[-1].size
            and usual < DISTURBED * math.fsum(p.least_seconds for p in self.points)
        )
        return Speed(
            seconds_per_micro_batch=line.base,
            seconds_per_example=max(line.each, 1e-9),
            fastest_micro_batch_size=fastest if is_known else None,
        )

    @property
    def peaks(self) -> PeakModel:
        """The line over the peaks, from which the device's memory model starts."""
        return PeakModel(
            line=peak_line(self.points, self.kept_bytes),
            least_each=self.kept_bytes,
            largest_size=self.points[-1].size,
            rest_bytes=self.rest_bytes,
        )


def reason_to_stop(
    points: Sequence[ProbePoint],
    *,
    num_examples: int,
    next_bytes: float,
    limit_bytes: int | None,
    seconds: float,
) -> str | None:
    """Return why no larger size is measured; None if the next one is.

    ``next_bytes`` is the predicted peak of the next size, ``seconds`` is the probe's time so far.
    The next stage takes a first pass and one turn of all sizes, six times the last size's time.
    """
    last = points[-1]
    if last.size >= num_examples:
        return f"the device has, or a plan asks for, no more than {num_examples} examples"
    if limit_bytes is not None and next_bytes > limit_bytes * SAFE_SHARE:
        return (
            f"the next would take {bytes_text(next_bytes)}, above {SAFE_SHARE:.0%} of the "
            f"limit of {bytes_text(limit_bytes)}"
        )
    fastest = _fastest(points)
    num_stalled = len(points) - 1 - points.index(fastest)
    at_best = min(p.least_seconds / p.size for p in points) * last.size
    if num_stalled >= STALLED_DOUBLINGS and at_best >= DISPATCH_SECONDS:
        return f"no faster than with {fastest.size}"
    if len(points) > 1 and seconds + 6 * last.seconds > PROBE_SECONDS:
        return f"it took {seconds:.1f} s"
    return None


def predicted_bytes(
    points: Sequence[ProbePoint], size: int, kept_bytes: float, rest_bytes: float
) -> float:
    """Predict a larger size's peak: by the line, or by the last two points if that is more.

    After a single point the second one is the resident memory at size 0.
    """
    last = points[-1]
    before = (points[-2].size, points[-2].peak_bytes) if points[1:] else (0, rest_bytes)
    slope = (last.peak_bytes - before[1]) / (last.size - before[0])
    return max(
        peak_line(points, kept_bytes).at(size),
        last.peak_bytes + slope * (size - last.size),
    )


def peak_line(points: Sequence[ProbePoint], kept_bytes: float) -> Line:
    """Fit a line that no measured peak exceeds.

    Of the slopes that the peaks allow within measurement noise, it has the one nearest to
    ``WORKING_FACTOR`` times what autograd keeps for an example, and at least what autograd keeps: a
    small model uses those bytes even if the allocator had them already.
    """
    each = WORKING_FACTOR * kept_bytes
    if points[1:]:
        fit = fit_line([(p.size, p.peak_bytes, 1.0) for p in points]).each
        noise = NOISE_BYTES / (points[-1].size - points[0].size)
        each = max(min(max(each, fit - noise), fit + noise), kept_bytes)
    base = max(p.peak_bytes - each * p.size for p in points)
    return Line(base=max(base, 0.0), each=each)


def _fastest(points: Sequence[ProbePoint]) -> ProbePoint:
    """Return the last point that takes ``GAIN`` less time per example than the fastest before it.

    The larger size's minimum counts, which favours it: too large a micro-batch costs a tenth or two
    of the pace (caches), too small a one costs a multiple (dispatch).
    """
    best = points[0]
    for point in points:
        if point.least_seconds / point.size < (1 - GAIN) * best.seconds / best.size:
            best = point
    return best
