"""How long the answers of an exchange are awaited.

A plan's answers are awaited to their limit: devices have unlike speed. The phases of a conversation
are short, and one member that answers each at the last moment would hold every round. So once
``enough`` have answered, the others have ``FACTOR`` times the median answer's time, and a floor: a
small device beside laptops takes several times as long to mask a large vector.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

FACTOR, FLOOR_SECONDS = 10.0, 2.0


class Patience:
    """The wait for one exchange's answers."""

    def __init__(
        self,
        limit_seconds: float | None,
        *,
        enough: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``limit_seconds`` is the longest wait, None for any; ``enough`` may shorten it."""
        self._limit = math.inf if limit_seconds is None else limit_seconds
        self._enough = math.inf if enough is None else enough
        self._clock, self._start = clock, clock()
        self._times: list[float] = []

    def note_answer(self) -> None:
        """Note that an answer has come now."""
        self._times.append(self._clock() - self._start)

    @property
    def left_seconds(self) -> float:
        """The seconds for which the next answer is awaited, at least 0."""
        wait = self._limit
        if len(self._times) >= max(self._enough, 1):
            wait = min(wait, max(FACTOR * statistics.median(self._times), FLOOR_SECONDS))
        return max(self._start + wait - self._clock(), 0.0)
