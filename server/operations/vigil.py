"""For whom a round has been waiting, told at doubling intervals.

A device that stays connected and does not answer holds its round until the deadline, and for ever
where there is none. Nothing tells it from one that is slow; so who is awaited is said aloud, and
the operator, who knows the devices, decides.
"""

from __future__ import annotations

from collections.abc import Sequence

FIRST_SECONDS = 300.0
MOST_NAMED = 5

UNITS = (("d", 86_400), ("h", 3_600), ("min", 60))


class LongWaitNotice:
    """When it is time to speak: after FIRST_SECONDS of waiting, after twice as long, and so on."""

    def __init__(self) -> None:
        self._next_seconds = FIRST_SECONDS

    def is_due(self, waited_seconds: float) -> bool:
        """Whether this is to be told now; each interval is told once, a shorter wait is a new one.

        | waited | before | due |
        | --- | --- | --- |
        | 299 s | | no |
        | 300 s, 599 s | 299 s, 300 s | yes, no |
        | 600 s | 599 s | yes |
        | 1 s, 300 s | 600 s, 1 s | no, yes |
        """
        if waited_seconds < FIRST_SECONDS:
            self._next_seconds = FIRST_SECONDS
            return False
        if waited_seconds < self._next_seconds:
            return False
        while self._next_seconds <= waited_seconds:
            self._next_seconds *= 2
        return True


def names_text(names: Sequence[str], number: int) -> str:
    """Name the first few of so many: a, b, c, d, e and 12 more."""
    shown = ", ".join(names[:MOST_NAMED])
    more = number - len(names[:MOST_NAMED])
    return f"{shown} and {more} more" if more else shown


def duration_text(seconds: float) -> str:
    """Say a length of time to one figure that matters: 12 s, 3 min, 5 h, 2 d."""
    for unit, size in UNITS:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
