"""A straight line in the micro-batch size: s examples take ``base + each s`` seconds, or bytes.

Seconds have a base because each micro-batch is dispatched anew, bytes because the model is there
already; activations and operations grow with the examples. A line is first laid through a few
measured sizes and then follows what each round showed. Least squares are relative (each point is
weighed by 1 over the square of its value), so that a micro-batch of one example counts as much as
one of a hundred.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# What was believed weighs as much as what one round showed.
BELIEVED = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """``base + each x size``, neither below zero."""

    base: float
    each: float

    def at(self, size: float) -> float:
        """Return what a micro-batch of ``size`` examples takes."""
        return self.base + self.each * size

    def times(self, factor: float) -> Line:
        """Return the line of what takes ``factor`` times as much."""
        return Line(base=self.base * factor, each=self.each * factor)


def fitted(points: Sequence[tuple[float, float, float]]) -> Line:
    """Lay a line through points (size, value, weight) by relative least squares.

    A line that would fall below zero at size 0 goes through the origin, one that would sink as the
    size grows is flat. Points of a single size say nothing of the base: the line goes through the
    origin. Values at or below zero are left out; without points the line is zero.
    """
    return _laid([(x, y, w / (y * y)) for x, y, w in points if y > 0 and w > 0])


def refitted(line: Line, seen: Mapping[int, float]) -> Line:
    """Lay the line anew through what was believed and the values that a round showed.

    What was believed stands for two points, at size 1 and at the largest of the sizes seen (2 at
    the least). So a round with one size moves the line there and turns it about its other end, and
    a round with several bends its slope. Errors are relative to what was believed, so that the line
    follows a value that rose as far as one that fell. A believed line of zero teaches nothing of
    how to weigh: what was seen counts alone.
    """
    if not seen:
        return line
    far = max(2, *seen)
    if line.at(far) <= 0:
        return fitted([(size, value, 1.0) for size, value in seen.items()])
    believed = [(size, line.at(size), BELIEVED / 2) for size in (1, far)]
    weight = (1 - BELIEVED) / len(seen)
    points = [*believed, *((size, value, weight) for size, value in seen.items())]
    return _laid([(x, y, w / line.at(x) ** 2) for x, y, w in points])


def _laid(points: Sequence[tuple[float, float, float]]) -> Line:
    """Lay a line through points (size, value, weight) by least squares, see ``fitted``."""
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
