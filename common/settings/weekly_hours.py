"""Parses hours of the week, such as ``Mon-Fri 22:00-06:00``, and finds when they begin and end.

A text is one or more windows, separated by commas: ``[DAYS] BEGIN-END``. DAYS is a day or a range
of days (``Sat``, ``Mon-Fri``, ``Fri-Mon``); without it the window is on every day. BEGIN and END
are ``HH:MM`` or ``HH:MM:SS``, and END may be ``24:00``. BEGIN is inclusive and END exclusive. A
window whose END is before its BEGIN ends on the next day; DAYS are the days on which it begins.

The hours are those of the wall clock. On the days on which the clock is set forward or back, a
window is therefore an hour shorter or longer; an hour that occurs twice is inside twice, and an
hour that is skipped is never inside.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY_SECONDS = 86_400
WINDOW = re.compile(
    r"(?:(?P<first>[a-z]{3})(?:-(?P<last>[a-z]{3}))?\s+)?(?P<begin>[0-9:]+)\s*-\s*(?P<end>[0-9:]+)"
)
CLOCK = re.compile(r"(\d{2}):(\d{2})(?::(\d{2}))?")
EXAMPLE = "expected windows as in 22:00-06:00 or Mon-Fri 18:00-08:00, Sat-Sun 00:00-24:00"

# A week, and a day for a window that has already begun.
MAX_DAYS_AHEAD = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class WeeklyWindow:
    """One window: the days on which it begins (0 is Monday), and seconds of the wall clock."""

    days: frozenset[int]
    begin: int
    end: int

    def holds(self, wall: dt.datetime) -> bool:
        """Return whether a wall clock time is in the window."""
        second = wall.hour * 3600 + wall.minute * 60 + wall.second
        day = wall.weekday()
        if self.begin < self.end:
            return day in self.days and self.begin <= second < self.end
        if second >= self.begin:
            return day in self.days
        return second < self.end and (day - 1) % 7 in self.days


@dataclass(frozen=True, kw_only=True, slots=True)
class WeeklyHours:
    """Windows of the week; a time is inside if it is in one of them."""

    windows: tuple[WeeklyWindow, ...]

    def holds(self, wall: dt.datetime) -> bool:
        """Return whether a wall clock time is in one of the windows."""
        return any(window.holds(wall) for window in self.windows)

    def next_change(self, at: dt.datetime, zone: dt.tzinfo | None = None) -> dt.datetime | None:
        """Return the first instant after ``at`` at which the hours begin or end, to the second.

        Without a zone the clock is the machine's own. None if nothing changes in eight days.
        """
        is_inside = self.holds(wall_of(at, zone))
        for instant in self._instants(at, zone):
            if self.holds(wall_of(instant, zone)) != is_inside:
                return instant
        return None

    def _instants(self, at: dt.datetime, zone: dt.tzinfo | None) -> Iterator[dt.datetime]:
        """Yield, in order, all instants after ``at`` at which the hours can begin or end."""
        today = wall_of(at, zone).replace(
            tzinfo=None, hour=0, minute=0, second=0, microsecond=0, fold=0
        )
        clocks = {second for window in self.windows for second in (window.begin, window.end)}
        candidates = {
            instant_of((today + dt.timedelta(days=day, seconds=clock)).replace(fold=fold), zone)
            for day in range(MAX_DAYS_AHEAD + 1)
            for clock in clocks | {0}
            for fold in (0, 1)
        }
        previous = start = at.astimezone(dt.UTC)
        for instant in sorted(instant for instant in candidates if instant > start):
            if _offset(previous, zone) != _offset(instant, zone):
                yield _clock_change(previous, instant, zone)
            yield instant
            previous = instant


@lru_cache(maxsize=16)
def weekly(text: str) -> WeeklyHours:
    """Parse a text.

    Raises:
        ValueError: the text does not have the form above; the message gives an example.
    """
    return WeeklyHours(windows=tuple(_window(part.strip()) for part in text.lower().split(",")))


def _window(text: str) -> WeeklyWindow:
    match = WINDOW.fullmatch(text)
    if match is None:
        raise ValueError(EXAMPLE)
    begin, end = _clock(match["begin"]), _clock(match["end"])
    if begin in (end, DAY_SECONDS):
        raise ValueError(f"{EXAMPLE}; {text} is empty, and a whole day is 00:00-24:00")
    days = frozenset(range(7))
    if match["first"] is not None:
        first, last = (_day(match[name] or match["first"]) for name in ("first", "last"))
        days = frozenset((first + offset) % 7 for offset in range((last - first) % 7 + 1))
    return WeeklyWindow(days=days, begin=begin, end=end)


def _day(text: str) -> int:
    if text not in DAYS:
        raise ValueError(f"{EXAMPLE}; the days are {', '.join(day.title() for day in DAYS)}")
    return DAYS.index(text)


def _clock(text: str) -> int:
    match = CLOCK.fullmatch(text)
    if match is not None:
        hours, minutes, seconds = (int(part or 0) for part in match.groups())
        total = hours * 3600 + minutes * 60 + seconds
        if minutes < 60 and seconds < 60 and total <= DAY_SECONDS:
            return total
    raise ValueError(f"{EXAMPLE}; {text} is no time of the day")


def wall_of(at: dt.datetime, zone: dt.tzinfo | None) -> dt.datetime:
    """Return the wall clock time at an instant; without a zone, the machine's own."""
    return at.astimezone(zone)


def instant_of(wall: dt.datetime, zone: dt.tzinfo | None) -> dt.datetime:
    """Return the instant, in UTC, at which the wall clock shows a (naive) time.

    ``fold`` selects between two instants with the same time. A time that the clock skips is
    converted by the offset before (fold 0) or after (fold 1) the change.
    """
    return wall.replace(tzinfo=zone).astimezone(dt.UTC)


def _offset(at: dt.datetime, zone: dt.tzinfo | None) -> dt.timedelta | None:
    return wall_of(at, zone).utcoffset()


def _clock_change(low: dt.datetime, high: dt.datetime, zone: dt.tzinfo | None) -> dt.datetime:
    """Return the first whole second after ``low`` with the offset from UTC that ``high`` has."""
    old = _offset(low, zone)
    low = low.replace(microsecond=0)
    while high - low > dt.timedelta(seconds=1):
        middle = (low + (high - low) / 2).replace(microsecond=0)
        low, high = (middle, high) if _offset(middle, zone) == old else (low, middle)
    return high
