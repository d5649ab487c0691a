"""What a device holds back by its owner's settings: on battery, hot or throttled, busy, at work.

The share counts on the device's quota: a device that gives half of its time stops at half of what
it was asked for, and the planner, which is told the share, asks for half as much the next time.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator

from headwater.client.device.availability import is_working_hours
from headwater.client.device.interfaces import TimeShare
from headwater.common.messages import StopReason, Vitals
from headwater.common.settings import schema as settings


def time_share(
    vitals: Vitals, chosen: settings.ClientSettings, *, wall: dt.datetime | None = None
) -> TimeShare:
    """Return the least share that applies, and why; of equal ones the first in this order.

    | the device is | when | it gives |
    | --- | --- | --- |
    | on battery | it has one and no mains | ``battery_share`` |
    | hot | at ``hot_celsius`` or above | ``hot_share`` |
    | throttled | its clock is held down against heat | ``hot_share`` |
    | busy | others take ``busy_above`` of the cores, or more | ``busy_share`` |
    | needed by its owner | the clock on the wall shows ``working_hours`` | ``working_share`` |

    What there is no sensor for restrains nothing; neither does a share of 1. With a working share
    of 0 it is not here in those hours (``headwater.client.device.hardware.availability``).
    """
    claims = _applying(vitals, chosen, wall)
    return min(claims, key=lambda one: one.share, default=TimeShare())


def _applying(
    vitals: Vitals, chosen: settings.ClientSettings, wall: dt.datetime | None
) -> Iterator[TimeShare]:
    hot, busy = vitals.temperature_celsius, vitals.busy
    is_needed = wall is not None and is_working_hours(chosen, wall) and chosen.working_share > 0
    claims: tuple[tuple[bool, float, StopReason], ...] = (
        (vitals.is_on_battery is True, chosen.battery_share, "on battery"),
        (hot is not None and hot >= chosen.hot_celsius, chosen.hot_share, "hot"),
        (vitals.is_throttled is True, chosen.hot_share, "throttled"),
        (busy is not None and busy >= chosen.busy_above, chosen.busy_share, "busy"),
        (is_needed, chosen.working_share, "working hours"),
    )
    for applies, share, reason in claims:
        if applies and share < 1:
            yield TimeShare(share=share, reason=reason)
