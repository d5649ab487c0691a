"""The share of its time that a device gives: less on battery, when hot or busy, or at set hours.

The share scales the device's quota: a device that gives half of its time stops at half of its
quota, and the planner, which receives the share, plans half as much the next time.
"""

from __future__ import annotations

import datetime as dt

from headwater.client.device.interfaces import TimeShare
from headwater.common.messages import StopReason, Vitals
from headwater.common.settings.schema import ClientSettings
from headwater.common.settings.weekly_hours import weekly


def is_active(chosen: ClientSettings, wall: dt.datetime) -> bool:
    """Return whether a time of this machine's clock is in the device's active hours."""
    return chosen.active_hours is None or weekly(chosen.active_hours).holds(wall)


def time_share(
    vitals: Vitals, chosen: ClientSettings, *, wall: dt.datetime | None = None
) -> TimeShare:
    """Return the smallest share that applies, and its reason; the first in this order if equal.

    | the device is | condition | share |
    | --- | --- | --- |
    | on battery | it has a battery and no mains | ``battery_share`` |
    | hot | ``hot_celsius`` or above | ``hot_share`` |
    | throttled | its clock is reduced because of heat | ``hot_share`` |
    | busy | other programs take ``busy_above`` of the cores, or more | ``busy_share`` |
    | inactive | ``wall``, its clock, is outside ``active_hours`` | ``inactive_share`` |

    A missing sensor reduces nothing, nor does a share of 1. With an inactive share of 0 the device
    is not connected outside its active hours (``headwater.client.energy.availability``).
    """
    hot, busy = vitals.temperature_celsius, vitals.busy
    is_inactive = wall is not None and chosen.inactive_share > 0 and not is_active(chosen, wall)
    rules: tuple[tuple[bool, float, StopReason], ...] = (
        (vitals.is_on_battery is True, chosen.battery_share, "on battery"),
        (hot is not None and hot >= chosen.hot_celsius, chosen.hot_share, "hot"),
        (vitals.is_throttled is True, chosen.hot_share, "throttled"),
        (busy is not None and busy >= chosen.busy_above, chosen.busy_share, "busy"),
        (is_inactive, chosen.inactive_share, "inactive hours"),
    )
    applying = (
        TimeShare(share=share, reason=reason)
        for applies, share, reason in rules
        if applies and share < 1
    )
    return min(applying, key=lambda one: one.share, default=TimeShare())
