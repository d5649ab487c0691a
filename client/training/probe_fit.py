"""How far the probe's micro-batches grow, and what their seconds and peaks come to.

Pure functions of the measured points. A doubling is tried only where its peak, foreseen from the
points before, stays short of the limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headwater.client.memory.peak_model import NOISE_BYTES, PeakLine
from headwater.common.stats.linear_fit import Line, fitted

# Of the memory limit, for what a doubling may take beyond what was foreseen. With activations of
# 4 MB and more the second pass peaks at four fifths of the highest of ten, by the heap's fragments.
SAFE_SHARE = 0.8

# In all, though sizes 1 and 2 are measured however slow the device is.
PROBE_SECONDS = 2.0

# A size is faster if an example takes this share less; three doublings without that end the probe.
# Two would end it at 8 for a transformer and a CNN that take a quarter less time at 16.
GAIN = 0.03
STALLED_DOUBLINGS = 3

# Passes that usually take so many times their least are disturbed by other work.
DISTURBED = 1.5

# As long as a micro-batch would take less than this at the pace of the best smaller one, dispatch
# may rule it, whatever its own pace: on a busy machine one example of a small model takes 0.2 ms on
# one core, and two take 30 ms when two cores wait for one another.
DISPATCH_SECONDS = 0.02

# Beside the activations kept for the backward pass, their gradients and temporaries live a while:
# measured peaks grew by 1.3 (transformer of 2 blocks) to 2.2 (CNN) times what autograd keeps.
WORKING_FACTOR = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """A micro-batch of size s takes a + b s seconds; beyond the fastest size b falls no more."""

    seconds_per_micro_batch: float
    seconds_per_example: float
    fastest_micro_batch_size: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One size, measured several times: medians, the least seconds, and the highest peak."""

    size: int
    seconds: float  # without most interruptions
    usual_seconds: float  # with what there is of them
    least_seconds: float
    peak_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Probed:
    """What a probe showed: at least one point, the sizes growing; and why it went no further."""

    points: tuple[Point, ...]
    rest_bytes: int
    kept_bytes: float
    stopped: str

    @property
    def speed(self) -> Speed:
        """The line through the seconds, and the size beyond which an example takes no less.

        Seconds without interruptions give the line its shape; by how much the usual ones lie above
        them in all, other work slows the device. The fastest size is not known where it is the last
        that was measured, nor where other work disturbs the measurement: then larger ones are to be
        taken, which lose less if it was another one.
        """
        shape = fitted([(p.size, p.seconds, 1.0) for p in self.points])
        usual = math.fsum(p.usual_seconds for p in self.points)
        line = shape.times(usual / math.fsum(p.seconds for p in self.points))
        fastest = _fastest(self.points).size
        is_known = fastest < self.points[-1].size and usual < DISTURBED * math.fsum(
            p.least_seconds for p in self.points
        )
        return Speed(
            seconds_per_micro_batch=line.base,
            seconds_per_example=max(line.each, 1e-9),
            fastest_micro_batch_size=fastest if is_known else None,
        )

    @property
    def peaks(self) -> PeakLine:
        """The line over the peaks, for the device's memory to go on from."""
        return PeakLine(
            line=peak_line(self.points, self.kept_bytes),
            least_each=self.kept_bytes,
            largest_size=self.points[-1].size,
            rest_bytes=self.rest_bytes,
        )


def reason_to_stop(
    points: Sequence[Point],
    *,
    num_examples: int,
    foreseen_bytes: float,
    limit_bytes: int | None,
    seconds: float,
) -> str | None:
    """Say why no larger size is to be measured, or None.

    ``foreseen_bytes`` is the peak of the next size, ``seconds`` is what the probe took so far. The
    next stage takes a first pass and one turn of all sizes, six times the last size's time.
    """
    last = points[-1]
    if last.size >= num_examples:
        return f"{num_examples} examples are all that there are, or that a plan asks for"
    if limit_bytes is not None and foreseen_bytes > limit_bytes * SAFE_SHARE:
        return (
            f"the next would take {foreseen_bytes / 2**20:.0f} MiB, above {SAFE_SHARE:.0%} of the "
            f"limit of {limit_bytes / 2**20:.0f} MiB"
        )
    fastest = _fastest(points)
    num_stalled = len(points) - 1 - points.index(fastest)
    at_best = min(p.least_seconds / p.size for p in points) * last.size
    if num_stalled >= STALLED_DOUBLINGS and at_best >= DISPATCH_SECONDS:
        return f"no faster than with {fastest.size}"
    if len(points) > 1 and seconds + 6 * last.seconds > PROBE_SECONDS:
        return f"it took {seconds:.1f} s"
    return None


def foreseen_bytes(
    points: Sequence[Point], size: int, kept_bytes: float, rest_bytes: float
) -> float:
    """Foresee the peak of a larger size: by the line, or by the last two points, if that is more.

    Behind a single point the other is what is resident at size 0.
    """
    last = points[-1]
    before = (points[-2].size, points[-2].peak_bytes) if points[1:] else (0, rest_bytes)
    steep = (last.peak_bytes - before[1]) / (last.size - before[0])
    return max(
        peak_line(points, kept_bytes).at(size),
        last.peak_bytes + steep * (size - last.size),
    )


def peak_line(points: Sequence[Point], kept_bytes: float) -> Line:
    """Lay a line over the peaks: none of them is above it.

    Of the slopes that the peaks allow, give or take the noise of their measurement, it has the one
    nearest to ``WORKING_FACTOR`` times what autograd keeps for an example, and at least what
    autograd keeps: a small model's bytes are there, though the allocator had them already.
    """
    each = WORKING_FACTOR * kept_bytes
    if points[1:]:
        fit = fitted([(p.size, p.peak_bytes, 1.0) for p in points]).each
        noise = NOISE_BYTES / (points[-1].size - points[0].size)
        each = max(min(max(each, fit - noise), fit + noise), kept_bytes)
    base = max(p.peak_bytes - each * p.size for p in points)
    return Line(base=max(base, 0.0), each=each)


def _fastest(points: Sequence[Point]) -> Point:
    """Return the last point that takes ``GAIN`` less per example than the fastest before it.

    The larger one has the benefit of the doubt: its least seconds count. Micro-batches that are too
    large cost a tenth or two of the pace (caches), ones that are too small a multiple (dispatch).
    """
    best = points[0]
    for point in points:
        if point.least_seconds / point.size < (1 - GAIN) * best.seconds / best.size:
            best = point
    return best
