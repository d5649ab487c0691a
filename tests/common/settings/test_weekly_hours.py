"""Hours of the week follow the wall clock, also on days on which it is set forward or back."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterator
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.common.settings.weekly_hours import (
    MAX_DAYS_AHEAD,
    wall_of,
    weekly,
)

UTC = dt.UTC
MINUTE = dt.timedelta(minutes=1)
BERLIN = ZoneInfo("Europe/Berlin")
# Berlin's clock is set forward at 01:00 UTC on 29 March 2026, and back at 01:00 UTC on 25 October.
SPRING, AUTUMN = dt.datetime(2026, 3, 29, tzinfo=UTC), dt.datetime(2026, 10, 25, tzinfo=UTC)
ZONES = (
    UTC,
    BERLIN,
    ZoneInfo("America/New_York"),
    ZoneInfo("Asia/Kathmandu"),
    ZoneInfo("Australia/Lord_Howe"),  # set by half an hour
    ZoneInfo("Africa/Cairo"),  # set at midnight
)
MONDAY = dt.datetime(2026, 11, 16)


def wall(text: str) -> dt.datetime:
    """Return a time of the week in November 2026, as in "Mon 22:00"."""
    day, clock = text.split()
    days = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"]
    on = MONDAY + dt.timedelta(days=days.index(day))
    return dt.datetime.combine(on, dt.time.fromisoformat(clock))


def hours(found: dt.datetime | None, day: dt.datetime) -> float:
    assert found is not None
    return (found - day).total_seconds() / 3600


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("22:00-06:00", ["Mon 22:00", "Tue 05:59:59", "Sun 23:00"], ["Mon 06:00", "Mon 21:59:59"]),
        ("09:00-17:00", ["Sat 09:00", "Sat 16:59:59"], ["Sat 08:59:59", "Sat 17:00"]),
        (
            "Mon-Fri 18:00-08:00",
            ["Mon 18:00", "Sat 07:59"],
            ["Sat 08:00", "Mon 07:59", "Sun 20:00"],
        ),
        ("sat 00:00-24:00", ["Sat 00:00", "Sat 23:59:59"], ["Fri 23:59:59", "Sun 00:00"]),
        (
            "Fri-Mon 12:00-13:00",
            ["Fri 12:00", "Sun 12:00", "Mon 12:30"],
            ["Tue 12:00", "Thu 12:30"],
        ),
        ("Sun 22:00-02:00", ["Sun 23:00", "Mon 01:59"], ["Mon 02:00", "Mon 23:00", "Sun 01:00"]),
        ("08:00-09:00, 20:00-21:00", ["Wed 08:30", "Wed 20:30"], ["Wed 12:00", "Wed 21:00"]),
        ("06:30:10-06:30:20", ["Wed 06:30:10", "Wed 06:30:19"], ["Wed 06:30:09", "Wed 06:30:20"]),
        ("18:00-24:00", ["Wed 23:59:59"], ["Thu 00:00"]),
    ],
)
def test_a_window_includes_its_begin_and_excludes_its_end(
    text: str, inside: list[str], outside: list[str]
) -> None:
    read = weekly(text)
    assert [when for when in inside if not read.holds(wall(when))] == []
    assert [when for when in outside if read.holds(wall(when))] == []


@pytest.mark.parametrize(
    "text",
    ["", "22:00", "22-6", "25:00-06:00", "22:60-06:00", "22:00-22:00", "24:00-06:00",
     "Mo 01:00-02:00", "Mon-Fry 01:00-02:00", "01:00-02:00,", "00:00-24:01",
     "Mon Tue 01:00-02:00", "१२:00-13:00"],
)  # fmt: skip
def test_a_malformed_window_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="expected windows as in 22:00-06:00"):
        weekly(text)


def test_an_hour_that_the_clock_skips_is_in_no_window() -> None:
    night = weekly("02:00-03:00")
    change = night.next_change(SPRING - dt.timedelta(hours=2), BERLIN)
    # The day before it ended at 03:00, which is 02:00 in UTC; the next is in summer time.
    assert hours(change, SPRING) == 24.0


def test_a_night_is_an_hour_shorter_or_longer_when_the_clock_is_set() -> None:
    night = weekly("00:00-06:00")
    lengths = []
    for day in (SPRING, AUTUMN):
        begin = night.next_change(day - dt.timedelta(hours=12), BERLIN)
        assert begin is not None
        lengths.append(hours(night.next_change(begin, BERLIN), begin))
    assert lengths == [5.0, 7.0]


def test_a_window_that_ends_in_a_repeated_hour_opens_twice() -> None:
    night, at, found = weekly("01:00-02:30"), AUTUMN - dt.timedelta(hours=6), []
    for _ in range(4):
        change = night.next_change(at, BERLIN)
        assert change is not None
        at = change
        found.append(hours(at, AUTUMN))
    # 01:00 and 02:30 in summer time, and, as the clock is set back at 03:00, 02:00 and 02:30 again.
    assert found == [-1.0, 0.5, 1.0, 1.5]


def test_a_window_of_all_times_never_changes() -> None:
    always = weekly("00:00-24:00")
    assert always.next_change(SPRING, BERLIN) is None


@st.composite
def texts(draw: st.DrawFn) -> str:
    windows = []
    for _ in range(draw(st.integers(1, 3))):
        begin, end = draw(st.lists(st.integers(0, 287), min_size=2, max_size=2, unique=True))
        days = draw(st.sampled_from(["", "Sun ", "Sat-Sun ", "Mon-Fri ", "Sun-Tue "]))
        clocks = [f"{five // 12:02}:{five % 12 * 5:02}" for five in (begin, end)]
        windows.append(f"{days}{'-'.join(clocks)}")
    return ", ".join(windows)


@given(
    texts(),
    st.sampled_from(ZONES),
    st.sampled_from([SPRING, AUTUMN, dt.datetime(2026, 11, 1, tzinfo=UTC)])
    | st.datetimes(dt.datetime(2026, 1, 1), dt.datetime(2027, 1, 1)).map(
        lambda naive: naive.replace(tzinfo=UTC, microsecond=0)
    ),
    st.integers(-72, 72),
)
def test_no_change_precedes_the_next_change(
    text: str, zone: dt.tzinfo, day: dt.datetime, hour: int
) -> None:
    read, at = weekly(text), day + dt.timedelta(hours=hour)

    def is_in(instant: dt.datetime) -> bool:
        return read.holds(wall_of(instant, zone))

    change = read.next_change(at, zone)
    until = at + dt.timedelta(days=MAX_DAYS_AHEAD) if change is None else change
    # Windows and clocks change at multiples of five minutes only, so checking those is enough.
    steps = range(int((until - at) / MINUTE) + 1)
    checked = [at + MINUTE * step for step in steps if step % 5 == 0 or step == 1]
    assert {is_in(instant) for instant in checked if instant < until} <= {is_in(at)}
    if change is not None:
        assert is_in(change) != is_in(at)
        assert is_in(change - dt.timedelta(seconds=1)) == is_in(at)


@pytest.fixture
def in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set this machine's own time zone to Berlin."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("in_berlin")
@pytest.mark.parametrize("text", ["02:00-03:00", "01:00-02:30", "22:00-06:00", "Sun 00:00-12:00"])
@pytest.mark.parametrize("day", [SPRING, AUTUMN])
def test_the_machine_s_own_zone_gives_the_same_hours_as_a_named_zone(
    text: str, day: dt.datetime
) -> None:
    read = weekly(text)
    for hour in range(-30, 31):
        at = day + dt.timedelta(hours=hour)
        assert read.holds(wall_of(at, None)) == read.holds(wall_of(at, BERLIN))
        changes = [read.next_change(at, zone) for zone in (None, BERLIN)]
        assert changes[0] == changes[1]
