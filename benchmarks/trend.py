"""The trend in a series of samples: Theil and Sen's slope, with an interval for it.

The slope is the median of the slopes between all pairs of samples (Sen, "Estimates of the
Regression Coefficient Based on Kendall's Tau", 1968): a garbage collector's spikes move it little,
where a line of least squares would follow them. The interval is Sen's: the pairs' slopes at the
ranks that Kendall's normal approximation gives. Samples that depend on their neighbours, as memory
does, make it narrower than it should be.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import sqrt

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Trend:
    """A slope, in units of the samples per unit of time, and the interval around it."""

    slope: float
    low: float
    high: float


def trend(times: Sequence[float], values: Sequence[float]) -> Trend:
    """Return the trend of values over times.

    Raises:
        ValueError: there are fewer than three samples.
    """
    if len(times) < 3:
        raise ValueError(f"a trend takes three samples, and there are {len(times)}")
    samples = list(zip(times, values, strict=True))
    slopes = sorted((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(samples, 2))
    number = len(times)
    deviation = sqrt(number * (number - 1) * (2 * number + 5) / 18)
    reach = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * deviation
    low = max(int((len(slopes) - reach) / 2), 0)
    high = min(int((len(slopes) + reach) / 2) + 1, len(slopes) - 1)
    return Trend(slope=statistics.median(slopes), low=slopes[low], high=slopes[high])
