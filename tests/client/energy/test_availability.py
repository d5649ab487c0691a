"""When a device is away by its owner's settings, until when, and how early it stops training."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.client.device.owner_limits import AwayPeriod
from headwater.client.energy.availability import (
    LEAD_SECONDS,
    MAX_LEAD_SECONDS,
    ROUND_SLACK_BYTES,
    Availability,
)
from headwater.client.energy.time_share import is_active
from headwater.common.errors import BytesUsedUp, OutsideActiveHours, SettingsError
from headwater.common.settings.schema import ClientSettings
from headwater.common.settings.sources import load
from headwater.common.settings.weekly_hours import wall_of
from headwater.common.transport.wire_pb2 import ServerFrame

BERLIN = ZoneInfo("Europe/Berlin")
NIGHTS = ClientSettings(active_hours="22:00-06:00")
NOT_AT_WORK = ClientSettings(active_hours="Mon-Fri 17:00-09:00, Sat-Sun 00:00-24:00")


def away_by_hours(
    chosen: ClientSettings, now: dt.datetime, *, lead: float = 0.0
) -> AwayPeriod | None:
    """Return what a device that starts now finds."""
    started = Availability(
        chosen, name="pi", image_bytes=8, vector_bytes=8, now=lambda: now, zone=BERLIN
    )
    return started.by_hours(lead=lead)


def at(text: str) -> dt.datetime:
    """Return an instant by Berlin's clock in November 2026, as in "21 22:00"; 21 is a Saturday."""
    day, clock = text.split()
    return dt.datetime.fromisoformat(f"2026-11-{day} {clock}").replace(tzinfo=BERLIN)


@pytest.mark.parametrize(
    ("chosen", "now", "until"),
    [
        (NIGHTS, "21 12:00", "21 22:00"),
        (NIGHTS, "21 06:00", "21 22:00"),
        (NOT_AT_WORK, "20 09:00", "20 17:00"),
        (ClientSettings(active_hours="Sun 01:00-02:00"), "22 02:00", "29 01:00"),
    ],
)
def test_outside_its_active_hours_a_device_is_away_until_they_begin(
    chosen: ClientSettings, now: str, until: str
) -> None:
    away = away_by_hours(chosen, at(now))
    assert away is not None
    assert (away.since, away.until) == (at(now), at(until))
    assert f"until 2026-11-{until.replace(' ', 'T')}+01:00" in str(away.error)


@pytest.mark.parametrize(
    ("chosen", "now"),
    [
        (NIGHTS, "21 22:00"),
        (NIGHTS, "21 05:59:59"),
        (NOT_AT_WORK, "21 12:00"),
        (NOT_AT_WORK, "20 17:00"),
        (ClientSettings(), "20 12:00"),
        (ClientSettings(active_hours="17:00-09:00", inactive_share=0.25), "20 12:00"),
    ],
)
def test_in_its_active_hours_a_device_is_not_away(chosen: ClientSettings, now: str) -> None:
    assert away_by_hours(chosen, at(now)) is None


def test_before_its_hours_end_a_device_stops_early_enough_to_send() -> None:
    assert away_by_hours(NIGHTS, at("21 05:58"), lead=60) is None
    away = away_by_hours(NIGHTS, at("21 05:59"), lead=60)
    assert away is not None
    assert isinstance(away.error, OutsideActiveHours)
    assert (away.since, away.until) == (at("21 06:00"), at("21 22:00"))


def test_a_device_whose_only_hour_is_skipped_this_week_looks_again_later() -> None:
    """On 29 March 2026 Berlin's clock is set from 02:00 to 03:00."""
    skipped = ClientSettings(active_hours="Sun 02:00-03:00")
    now = dt.datetime(2026, 3, 22, 12, tzinfo=BERLIN)
    away = away_by_hours(skipped, now)
    assert away is not None
    again = away_by_hours(skipped, away.until)
    assert again is not None
    assert again.until == dt.datetime(2026, 4, 5, 2, tzinfo=BERLIN)


@given(
    st.sampled_from([NIGHTS, NOT_AT_WORK, ClientSettings(active_hours="Sun 01:00-02:00")]),
    st.datetimes(dt.datetime(2026, 1, 1), dt.datetime(2027, 1, 1)),
    st.floats(0, 3600),
)
def test_a_device_is_away_exactly_outside_its_active_hours(
    chosen: ClientSettings, naive: dt.datetime, lead: float
) -> None:
    now = naive.replace(tzinfo=dt.UTC)
    away = away_by_hours(chosen, now, lead=lead)
    is_outside = not is_active(chosen, wall_of(now, BERLIN))
    if away is None:
        assert not is_outside
        return
    assert now <= away.since < away.until
    assert (away.since - now).total_seconds() <= lead
    assert not is_active(chosen, wall_of(away.since, BERLIN))
    assert is_active(chosen, wall_of(away.until, BERLIN))


@given(st.lists(st.integers(-200_000, 200_000), min_size=1, max_size=20), st.floats(0, 3600))
def test_cached_hours_equal_hours_computed_at_each_time(seconds: list[int], lead: float) -> None:
    clock = [dt.datetime(2026, 3, 28, 12, tzinfo=dt.UTC)]
    hours = "Mon-Sat 22:00-06:30, Sun 22:00-02:30, Sun 05:00-06:30"
    both = ClientSettings(active_hours=hours)
    absence = Availability(
        both, name="pi", image_bytes=8, vector_bytes=8, now=lambda: clock[0], zone=BERLIN
    )
    for step in seconds:
        clock[0] += dt.timedelta(seconds=step)
        found = absence.by_hours(lead=lead), away_by_hours(both, clock[0], lead=lead)
        periods = [away and (repr(away.error), away.since, away.until) for away in found]
        assert periods[0] == periods[1]


def test_the_lead_grows_with_the_upload_time_up_to_a_maximum() -> None:
    device = Availability(ClientSettings(), name="pi", image_bytes=8, vector_bytes=40_000_000)
    assert device.lead_seconds(None) == LEAD_SECONDS
    assert device.lead_seconds(200_000.0) == LEAD_SECONDS + 2 * 200
    assert device.lead_seconds(1.0) == MAX_LEAD_SECONDS


def with_quota(folder: Path, clock: list[dt.datetime], zone: ZoneInfo) -> Availability:
    """Return the availability of a device with 100,000 bytes per day and a clock for the test."""
    chosen = ClientSettings(bytes_per_day=100_000, state=folder)
    return Availability(
        chosen, name="pi", image_bytes=8, vector_bytes=8, now=lambda: clock[0], zone=zone
    )


@pytest.mark.parametrize(
    ("used", "is_away"),
    [(0, False), (30_000, False), (30_001, True), (99_999, True), (200_000, True)],
)
def test_a_round_begins_only_if_the_day_s_bytes_suffice(
    tmp_path: Path, used: int, is_away: bool
) -> None:
    clock = [at("21 23:00")]
    device = with_quota(tmp_path, clock, BERLIN)
    device.count(used)
    away = device.by_bytes(70_000)
    assert (away is not None) == is_away
    if away is not None:
        assert isinstance(away.error, BytesUsedUp)
        assert away.until == at("22 00:00")
    clock[0] = at("22 00:00")
    assert device.by_bytes(70_000) is None


@pytest.mark.parametrize(
    ("zone", "now", "midnight"),
    [
        ("Africa/Cairo", "2026-04-23 12:00", "2026-04-24 01:00"),  # there is no midnight
        ("Europe/Berlin", "2026-10-25 12:00", "2026-10-26 00:00"),  # a day of 25 hours
    ],
)
def test_the_day_ends_at_the_wall_clock_s_midnight(
    tmp_path: Path, zone: str, now: str, midnight: str
) -> None:
    place = ZoneInfo(zone)
    clock = [dt.datetime.fromisoformat(now).replace(tzinfo=place)]
    device = with_quota(tmp_path, clock, place)
    device.count(100_000)
    away = device.by_bytes(1)
    assert away is not None
    assert away.until == dt.datetime.fromisoformat(midnight).replace(tzinfo=place)
    clock[0] = away.until - dt.timedelta(seconds=1)
    assert device.by_bytes(1) is not None
    clock[0] = away.until
    assert device.by_bytes(1) is None


def test_a_model_that_has_come_before_its_instruction_counts_once(tmp_path: Path) -> None:
    """An idle device looks at its bytes now and then, also between the two."""
    model = 200_000
    used = 3 * model  # a round, and the next one's model
    chosen = ClientSettings(bytes_per_day=used + model + ROUND_SLACK_BYTES, state=tmp_path)
    device = Availability(chosen, name="pi", image_bytes=model, vector_bytes=model)
    assert device.reason_to_leave(None, is_idle=True) is None
    device.count(2 * model)
    announced = ServerFrame(image={"num_bytes": model})
    assert device.reason_to_decline(announced, lambda head: model) is None
    device.count(model)
    assert device.reason_to_leave(None, is_idle=True) is None
    told = ServerFrame(instruction={"message_type": "train"})
    assert device.reason_to_decline(told, lambda head: model) is None
    device.count(model)
    assert device.reason_to_leave(None, is_idle=True) is not None  # no third round


def test_a_byte_quota_below_any_round_is_a_settings_error(tmp_path: Path) -> None:
    least = 200 // 8 + ROUND_SLACK_BYTES
    for bytes_per_day in (least, least - 1):
        chosen = ClientSettings(bytes_per_day=bytes_per_day, state=tmp_path)
        if bytes_per_day == least:
            assert Availability(chosen, name="pi", image_bytes=200, vector_bytes=200).is_set
        else:
            with pytest.raises(SettingsError, match="this model takes at least 65,561"):
                Availability(chosen, name="pi", image_bytes=200, vector_bytes=200)


def test_a_day_s_bytes_suffice_for_the_rounds_that_a_run_compresses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A model of 4 MB in float32 in 3 MB a day: a round in int8 takes about 2."""
    chosen = ClientSettings(bytes_per_day=3_000_000, state=tmp_path)
    device = Availability(chosen, name="pi", image_bytes=4_000_000, vector_bytes=4_000_000)
    assert "takes part only in runs that compress it" in caplog.text
    assert device.by_bytes(device.round_bytes) is None
    device.expect_model(900_000)
    device.expect_update(1_000_000)
    assert device.round_bytes == 1_900_000 + ROUND_SLACK_BYTES
    assert device.by_bytes(device.round_bytes) is None
    device.expect_update(4_000_000)  # another run does not compress
    away = device.by_bytes(device.round_bytes)
    assert away is not None
    assert "no day's bytes suffice: allow more" in str(away.error)


def test_without_settings_a_device_is_never_away(tmp_path: Path) -> None:
    absence = Availability(
        ClientSettings(state=tmp_path), name="pi", image_bytes=10**9, vector_bytes=10**9
    )
    absence.count(2**50)
    absence.write()
    assert not absence.is_set
    assert absence.by_hours(lead=MAX_LEAD_SECONDS) is None
    assert absence.by_bytes(absence.round_bytes) is None
    assert list(tmp_path.iterdir()) == []


def test_hours_that_cannot_be_parsed_are_a_settings_error() -> None:
    with pytest.raises(SettingsError, match=r"active_hours.*expected windows as in 22:00-06:00"):
        load(None, {"client.active_hours": "nights"})
