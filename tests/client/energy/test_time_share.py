"""The share of its time that a device gives, by its owner's settings and its sensors."""

from __future__ import annotations

import datetime as dt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.client.device.interfaces import TimeShare
from headwater.client.energy.time_share import time_share
from headwater.common.messages import Vitals
from headwater.common.settings.schema import ClientSettings

CHOSEN = ClientSettings(
    battery_share=0.5, hot_celsius=80, hot_share=0.25, busy_above=0.75, busy_share=0.75
)


@pytest.mark.parametrize(
    ("vitals", "expected"),
    [
        (Vitals(), TimeShare()),
        (Vitals(is_on_battery=True), TimeShare(share=0.5, reason="on battery")),
        (Vitals(is_on_battery=False, battery=0.01), TimeShare()),
        (Vitals(temperature_celsius=80), TimeShare(share=0.25, reason="hot")),
        (Vitals(temperature_celsius=79.9), TimeShare()),
        (Vitals(is_throttled=True), TimeShare(share=0.25, reason="throttled")),
        (Vitals(is_throttled=False), TimeShare()),
        (Vitals(busy=0.75), TimeShare(share=0.75, reason="busy")),
        (Vitals(busy=0.74), TimeShare()),
    ],
)
def test_each_sensor_has_a_setting_of_its_own(vitals: Vitals, expected: TimeShare) -> None:
    assert time_share(vitals, CHOSEN) == expected


def test_the_smallest_of_several_shares_applies() -> None:
    vitals = Vitals(is_on_battery=True, temperature_celsius=90, is_throttled=True, busy=1.0)
    assert time_share(vitals, CHOSEN) == TimeShare(share=0.25, reason="hot")


def test_a_share_of_one_limits_nothing() -> None:
    chosen = ClientSettings(battery_share=1.0, hot_share=1.0, busy_share=1.0)
    vitals = Vitals(is_on_battery=True, temperature_celsius=90, is_throttled=True, busy=1.0)
    assert time_share(vitals, chosen) == TimeShare()


EVENINGS = ClientSettings(active_hours="17:00-09:00", inactive_share=0.25, battery_share=0.5)


@pytest.mark.parametrize(
    ("hour", "chosen", "expected"),
    [
        (12, EVENINGS, TimeShare(share=0.25, reason="inactive hours")),
        (17, EVENINGS, TimeShare()),
        (12, ClientSettings(active_hours="17:00-09:00", inactive_share=1.0), TimeShare()),
        # With a share of 0 the device is not connected, and reports nothing.
        (12, ClientSettings(active_hours="17:00-09:00"), TimeShare()),
    ],
)
def test_outside_its_active_hours_a_device_gives_its_inactive_share(
    hour: int, chosen: ClientSettings, expected: TimeShare
) -> None:
    wall = dt.datetime(2026, 11, 20, hour)
    assert time_share(Vitals(), chosen, wall=wall) == expected


@given(
    st.builds(
        Vitals,
        is_on_battery=st.none() | st.booleans(),
        temperature_celsius=st.none() | st.floats(-100, 1000),
        is_throttled=st.none() | st.booleans(),
        busy=st.none() | st.floats(0, 1),
    ),
    st.builds(
        ClientSettings,
        battery_share=st.floats(0.001, 1),
        hot_share=st.floats(0.001, 1),
        busy_share=st.floats(0.001, 1),
    ),
)
def test_the_share_is_one_of_the_settings_or_all(vitals: Vitals, chosen: ClientSettings) -> None:
    found = time_share(vitals, chosen)
    assert found.share in {1.0, chosen.battery_share, chosen.hot_share, chosen.busy_share}
    assert (found.share == 1.0) == (found.reason == "quota")
