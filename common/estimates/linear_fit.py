"""Fits a straight line: a micro-batch of s examples takes ``base + each s`` seconds, or bytes.

Seconds have a base because each micro-batch is dispatched separately, bytes because the model is in
memory already; activations and operations grow with the examples. A line is first fitted to a few
measured sizes and then updated with the measurements of each round. Least squares are relative
(each point is weighed by 1 over the square of its value), so that a micro-batch of one example
counts as much as one of a hundred.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Weight of the previous line when it is refitted: as much as one round's measurements.
PRIOR_WEIGHT = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """``base + each x size``, neither below zero."""

    base: float
    each: float

    def at(self, size: float) -> float:
        """Return the value of the line at a micro-batch of ``size`` examples."""
        return self.base + self.each * size

    def times(self, factor: float) -> Line:
        """Return the line multiplied by ``factor``."""
        return Line(base=self.base * factor, each=self.each * factor)


def fit_line(points: Sequence[tuple[float, float, float]]) -> Line:
    """Fit a line to points (size, value, weight) by relative least squares.

    A line that would be negative at size 0 goes through the origin; one that would decrease with
    the size is constant. With points of a single size the line goes through the origin. Values at
    or below zero are excluded; without points the line is zero.
    """
    return _least_squares([(x, y, w / (y * y)) for x, y, w in points if y > 0 and w > 0])


def refit_line(line: Line, measured: Mapping[float, float]) -> Line:
    """Fit a new line to the previous line and to the values that a round measured, by size.

    The previous line counts as two points, at size 1 and at the largest measured size (at least 2).
    So a round with one size moves the line there and turns it about its other end; a round with
    several sizes changes its slope. Errors are relative to the previous line, so that it follows
    increases and decreases equally. If the previous line is zero, only the measured values count.
    """
    if not measured:
        return line
    far = max(2, *measured)
    if line.at(far) <= 0:
        return fit_line([(size, value, 1.0) for size, value in measured.items()])
    prior = [(size, line.at(size), PRIOR_WEIGHT / 2) for size in (1, far)]
    weight = (1 - PRIOR_WEIGHT) / len(measured)
    points = [*prior, *((size, value, weight) for size, value in measured.items())]
    return _least_squares([(x, y, w / line.at(x) ** 2) for x, y, w in points])


def _least_squares(points: Sequence[tuple[float, float, float]]) -> Line:
    """Fit a line to points (size, value, weight) by least squares; see ``fit_line``."""
    if not points:
        return Line(base=0.0, each=0.0)
    total = sum(w for _, _, w in points)
    mean_x = sum(w * x for x, _, w in points) / total
    mean_y = sum(w * y for _, y, w in points) / total
    spread = sum(w * (x - mean_x) ** 2 for x, _, w in points)
    if spread <= 1e-12 * total * mean_x**2:
        return Line(base=0.0, each=mean_y / mean_x)
    each = sum(w * (x - mean_x) * (y - mean_y) for x, y, w in points) / spread
    if each <= 0:
        return Line(base=mean_y, each=0.0)
    base = mean_y - each * mean_x
    if base < 0:
        each = sum(w * x * y for x, y, w in points) / sum(w * x * x for x, _, w in points)
        return Line(base=0.0, each=each)
    return Line(base=base, each=each)
