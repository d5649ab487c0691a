"""The day's bytes are counted across restarts and clock corrections."""

from __future__ import annotations

import datetime as dt
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.client.energy.byte_quota import MAX_DAYS, ByteQuota, with_bytes_added
from headwater.common.errors import StateError

TODAY = dt.date(2026, 11, 21)
YESTERDAY = TODAY - dt.timedelta(days=1)
BEFORE_NTP = dt.date(1970, 1, 1)


def allowance(path: Path) -> ByteQuota:
    return ByteQuota(path, bytes_per_day=1000)


def test_today_s_count_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "state" / "pi.bytes.json"
    first = allowance(path)
    first.count(TODAY, 300)
    first.count(TODAY, 450)
    first.write()
    again = allowance(path)
    assert (again.used(TODAY), again.left(TODAY)) == (750, 250)
    assert again.left(TODAY + dt.timedelta(days=1)) == 1000


def test_exceeding_the_quota_leaves_zero_bytes(tmp_path: Path) -> None:
    found = allowance(tmp_path / "bytes.json")
    found.count(TODAY, 1300)
    assert (found.used(TODAY), found.left(TODAY)) == (1300, 0)


@pytest.mark.parametrize("wrong", [BEFORE_NTP, YESTERDAY, dt.date(2036, 1, 1)])
def test_a_temporarily_wrong_clock_loses_no_count(tmp_path: Path, wrong: dt.date) -> None:
    path = tmp_path / "bytes.json"
    for day, num_bytes in [(TODAY, 700), (wrong, 10), (TODAY, 100)]:
        found = allowance(path)
        found.count(day, num_bytes)
        found.write()
    assert allowance(path).used(TODAY) == 800
    assert allowance(path).used(wrong) == 10


@given(st.lists(st.tuples(st.dates(), st.integers(0, 2**40)), min_size=1, max_size=40))
def test_the_last_counted_days_are_kept(moved: list[tuple[dt.date, int]]) -> None:
    days: dict[dt.date, int] = {}
    for day, num_bytes in moved:
        before = days.get(day, 0)
        days = with_bytes_added(days, day, num_bytes)
        assert days[day] == before + num_bytes
    last = list(dict.fromkeys(day for day, _ in reversed(moved)))[:MAX_DAYS]
    assert set(days) == set(last)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"2026-11-21": -1}', '{"today": 1}', '{"2026-11-21": true}']
)
def test_an_unreadable_count_is_an_error_with_a_remedy(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bytes.json"
    path.write_text(text)
    with pytest.raises(StateError, match="cannot be read") as caught:
        allowance(path)
    assert "delete the file" in caught.value.remedy


def test_a_failing_disk_is_logged_once_and_counting_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "state").touch()  # a file where the folder should be
    path = tmp_path / "state" / "bytes.json"
    with pytest.raises(StateError):
        allowance(path)
    (tmp_path / "state").unlink()
    found = allowance(path)
    (tmp_path / "state").touch()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            found.count(TODAY, 100)
            found.write()
    assert len(caplog.records) == 1
    assert found.used(TODAY) == 300
    (tmp_path / "state").unlink()
    found.write()
    assert allowance(path).used(TODAY) == 300
