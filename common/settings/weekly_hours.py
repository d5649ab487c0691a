"""Times of the week by the clock on the wall, as a device's owner writes them: ``22:00-06:00``.

A text is one or more windows, with a comma between: ``[DAYS] BEGIN-END``. DAYS is a day or a range
of them (``Sat``, ``Mon-Fri``, ``Fri-Mon``), all if there are none; BEGIN and END are ``HH:MM`` or
``HH:MM:SS``, END may be ``24:00``. BEGIN belongs to the window and END does not. A window whose END
is before its BEGIN ends on the next day, and belongs to the day on which it began.

Only the wall clock is asked, so a window lasts an hour less or more on the days on which the clock
is set forward or back; an hour that comes twice is in it twice, and one that is left out never is.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY_SECONDS = 86_400
WINDOW = re.compile(
    r"(?:(?P<first>[a-z]{3})(?:-(?P<last>[a-z]{3}))?\s+)?(?P<begin>[0-9:]+)\s*-\s*(?P<end>[0-9:]+)"
)
CLOCK = re.compile(r"(\d{2}):(\d{2})(?::(\d{2}))?")
EXAMPLE = "expected windows as in 22:00-06:00 or Mon-Fri 18:00-08:00, Sat-Sun 00:00-24:00"

# A week, and a day for a window that is under way.
FARTHEST_DAYS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """One window: the days on which it begins (0 is Monday), and seconds of the wall clock."""

    days: frozenset[int]
    begin: int
    end: int

    def holds(self, wall: dt.datetime) -> bool:
        """Whether a time of the wall clock is in it."""
        second = wall.hour * 3600 + wall.minute * 60 + wall.second
        day = wall.weekday()
        if self.begin < self.end:
            return day in self.days and self.begin <= second < self.end
        if second >= self.begin:
            return day in self.days
        return second < self.end and (day - 1) % 7 in self.days


@lru_cache(maxsize=16)
def weekly(text: str) -> Weekly:
    """Read windows, as ``Weekly.parse``; a text that was read before costs nothing."""
    return Weekly.parse(text)


@dataclass(frozen=True, kw_only=True, slots=True)
class Weekly:
    """Windows of the week; a time is in it if it is in one of them."""

    windows: tuple[Window, ...]

    @classmethod
    def parse(cls, text: str) -> Weekly:
        """Read windows.

        Raises:
            ValueError: the text is not made as the module says; the message says how.
        """
        return cls(windows=tuple(_window(part.strip()) for part in text.lower().split(",")))

    def holds(self, wall: dt.datetime) -> bool:
        """Whether a time of the wall clock is in one of the windows."""
        return any(window.holds(wall) for window in self.windows)

    def clocks(self) -> set[int]:
        """Return the seconds of a day at which a window begins or ends."""
        return {
            second % DAY_SECONDS for window in self.windows for second in (window.begin, window.end)
        }


def _window(text: str) -> Window:
    found = WINDOW.fullmatch(text)
    if found is None:
        raise ValueError(EXAMPLE)
    begin, end = _clock(found["begin"]), _clock(found["end"])
    if begin in (end, DAY_SECONDS):
        raise ValueError(f"{EXAMPLE}; {text} is empty, and a whole day is 00:00-24:00")
    days = frozenset(range(7))
    if found["first"] is not None:
        first, last = (_day(found[name] or found["first"]) for name in ("first", "last"))
        days = frozenset((first + more) % 7 for more in range((last - first) % 7 + 1))
    return Window(days=days, begin=begin, end=end)


def _day(text: str) -> int:
    if text not in DAYS:
        raise ValueError(f"{EXAMPLE}; the days are {', '.join(day.title() for day in DAYS)}")
    return DAYS.index(text)


def _clock(text: str) -> int:
    found = CLOCK.fullmatch(text)
    if found is not None:
        hours, minutes, seconds = (int(part or 0) for part in found.groups())
        total = hours * 3600 + minutes * 60 + seconds
        if minutes < 60 and seconds < 60 and total <= DAY_SECONDS:
            return total
    raise ValueError(f"{EXAMPLE}; {text} is no time of the day")


def wall_of(at: dt.datetime, zone: dt.tzinfo | None) -> dt.datetime:
    """Return what the clock on the wall shows at an instant; no zone is the machine's own."""
    return at.astimezone(zone)


def instant_of(wall: dt.datetime, zone: dt.tzinfo | None) -> dt.datetime:
    """Return the instant, in UTC, at which the wall clock shows a (naive) time.

    Of a time that comes twice the one that ``fold`` says; one that is left out is taken by the
    offset before (fold 0) or behind (1) the change.
    """
    return wall.replace(tzinfo=zone).astimezone(dt.UTC)


def next_change(
    is_so: Callable[[dt.datetime], bool],
    clocks: set[int],
    at: dt.datetime,
    zone: dt.tzinfo | None = None,
) -> dt.datetime | None:
    """Return the first instant behind ``at`` at which what is said of the wall clock changes.

    ``is_so`` may change at the seconds of a day in ``clocks``, and where the wall clock itself is
    set; the answer is exact to the second. None if nothing changes within a week and a day.
    """
    was = is_so(wall_of(at, zone))
    for instant in _instants(clocks, at, zone):
        if is_so(wall_of(instant, zone)) != was:
            return instant
    return None


def _instants(clocks: set[int], at: dt.datetime, zone: dt.tzinfo | None) -> Iterator[dt.datetime]:
    """Yield, in order, all instants behind ``at`` at which something may change."""
    today = wall_of(at, zone).replace(
        tzinfo=None, hour=0, minute=0, second=0, microsecond=0, fold=0
    )
    found = {
        instant_of((today + dt.timedelta(days=day, seconds=clock)).replace(fold=fold), zone)
        for day in range(FARTHEST_DAYS + 1)
        for clock in clocks | {0}
        for fold in (0, 1)
    }
    start = at.astimezone(dt.UTC)
    before = start
    for instant in sorted(instant for instant in found if instant > start):
        if _offset(before, zone) != _offset(instant, zone):
            yield _clock_was_set(before, instant, zone)
        yield instant
        before = instant


def _offset(at: dt.datetime, zone: dt.tzinfo | None) -> dt.timedelta | None:
    return wall_of(at, zone).utcoffset()


def _clock_was_set(before: dt.datetime, behind: dt.datetime, zone: dt.tzinfo | None) -> dt.datetime:
    """Return the first whole second with the offset from UTC that ``behind`` has."""
    old = _offset(before, zone)
    low = before.replace(microsecond=0)
    while behind - low > dt.timedelta(seconds=1):
        middle = (low + (behind - low) / 2).replace(microsecond=0)
        if _offset(middle, zone) == old:
            low = middle
        else:
            behind = middle
    return behind
