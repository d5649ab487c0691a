"""A short search for each algorithm's learning rate, on a ladder of rates: 0.01, 0.03, 0.1, 0.3.

Three rates come first. While the best is at the end of those tried, the next one beyond it is tried
too, up to five. Every algorithm gets the same search, so that none wins by a better-tuned rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

NUM_FIRST, MAX_RATES = 3, 5


def first_rates(around: float) -> tuple[float, ...]:
    """Return the rung nearest to a rate, and its neighbours, the smallest first."""
    middle = round(2 * math.log10(around))
    return tuple(_rung(middle + offset) for offset in range(-(NUM_FIRST // 2), NUM_FIRST // 2 + 1))


def next_rate(scores: Mapping[float, float | None]) -> float | None:
    """Return the rate to try after these; None if the search is done.

    ``scores`` are larger where the rate is better, and None where the run diverged.
    """
    if len(scores) >= MAX_RATES:
        return None
    best, lowest, highest = best_rate(scores), min(scores), max(scores)
    if best is None or best == lowest:
        return _rung(round(2 * math.log10(lowest)) - 1)
    return _rung(round(2 * math.log10(highest)) + 1) if best == highest else None


def best_rate(scores: Mapping[float, float | None]) -> float | None:
    """Return the rate with the largest score, of equal ones the smallest; None if all diverged."""
    finite = {rate: score for rate, score in scores.items() if score is not None}
    return min(finite, key=lambda rate: (-finite[rate], rate)) if finite else None


def score(values: Sequence[float], *, is_smaller_better: bool) -> float | None:
    """Return the mean of the later half of a run's values, the larger the better.

    The last value alone would depend on the luck of one round.
    """
    later = values[len(values) // 2 :]
    if not later:
        return None
    mean = math.fsum(later) / len(later)
    return -mean if is_smaller_better else mean


def _rung(number: int) -> float:
    """Return the rate of a rung: 0 is 1, 1 is 3, 2 is 10; -1 is 0.3."""
    exponent, is_three = divmod(number, 2)
    return float(f"{3 if is_three else 1}e{exponent}")
