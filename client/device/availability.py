"""When a device stays away by its owner's settings: hours of the week, and bytes a day.

While it is away it holds no connection, so it costs its link nothing at all: the server may push a
model at any moment to a device that is connected, and keeps every idle stream alive besides. It
leaves in good order, and says why and until when, which the server's operator sees.

Before its hours end the device stops summing early enough to send what it has, exactly weighted
(``lead_seconds``). It begins no round that the bytes of the day do not suffice for.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from headwater.client.device.byte_quota import ByteQuota
from headwater.common.errors import (
    BytesUsedUp,
    DeviceAway,
    OutsideUploadWindow,
    SettingsError,
    WorkingHours,
)
from headwater.common.model.parameters import ModelLayout
from headwater.common.settings.schema import ClientSettings
from headwater.common.settings.weekly_hours import instant_of, next_change, wall_of, weekly

# What a round moves beside its model and its vector: plans, reports, keys and shares of a session.
ROUND_SLACK_BYTES = 64 << 10

# For the micro-batch at hand and the phases of a secure session.
LEAD_SECONDS = 60.0
MAX_LEAD_SECONDS = 1800.0
# A link is seldom as quick as it was last seen.
TIMES_AS_LONG = 2.0

ONE_SECOND = dt.timedelta(seconds=1)
ONE_DAY = dt.timedelta(days=1)
# A week, and a day for what is under way now.
LOOKED_AHEAD = dt.timedelta(days=8)


@dataclass(frozen=True, kw_only=True, slots=True)
class AwayPeriod:
    """Why the device stays away, and the instants between which it does."""

    error: DeviceAway
    since: dt.datetime
    """Before it, if that is to come, there is still time to send what was summed."""
    until: dt.datetime


def lead_seconds(vector_bytes: int, bytes_per_second: float | None) -> float:
    """Return how long before its hours end a device stops summing, to have sent its vector by then.

    A minute, and twice the time of the upload at the rate that was last seen; half an hour at most.
    A vector of 40 MB takes 200 s at 200 kB/s: seven minutes and forty seconds before.
    """
    upload = 0.0 if bytes_per_second is None else vector_bytes / bytes_per_second
    return min(LEAD_SECONDS + TIMES_AS_LONG * upload, MAX_LEAD_SECONDS)


def has_hours(chosen: ClientSettings) -> bool:
    """Whether the settings name hours in which the device is away."""
    return chosen.upload_window is not None or bool(_away_in_working_hours(chosen))


def is_working_hours(chosen: ClientSettings, wall: dt.datetime) -> bool:
    """Whether the wall clock shows a time at which the owner needs the device."""
    return chosen.working_hours is not None and weekly(chosen.working_hours).holds(wall)


def _away_in_working_hours(chosen: ClientSettings) -> str | None:
    return chosen.working_hours if chosen.working_share == 0 else None


def why_away(chosen: ClientSettings, wall: dt.datetime) -> type[DeviceAway] | None:
    """Return why the hours keep the device away at a time of the wall clock; None if not."""
    if _away_in_working_hours(chosen) and is_working_hours(chosen, wall):
        return WorkingHours
    if chosen.upload_window is not None and not weekly(chosen.upload_window).holds(wall):
        return OutsideUploadWindow
    return None


def away_by_hours(
    chosen: ClientSettings, at: dt.datetime, *, lead: float = 0.0, zone: dt.tzinfo | None = None
) -> AwayPeriod | None:
    """Return how the hours keep the device away now or within ``lead`` seconds; None if not.

    Raises:
        SettingsError: upload window and working hours leave no time at all.
    """
    away, closing = hours_change(chosen, at, zone=zone)
    if away is not None or closing is None or (closing - at).total_seconds() > lead:
        return away
    return hours_change(chosen, closing, zone=zone)[0]


def hours_change(
    chosen: ClientSettings, at: dt.datetime, *, zone: dt.tzinfo | None = None
) -> tuple[AwayPeriod | None, dt.datetime | None]:
    """Return how the hours keep the device away now, and when that changes; None is never.

    Raises:
        SettingsError: upload window and working hours leave no time at all.
    """
    if not has_hours(chosen):
        return None, None
    texts = (chosen.upload_window, _away_in_working_hours(chosen))
    clocks = {second for text in texts if text is not None for second in weekly(text).clocks()}
    change = next_change(lambda wall: why_away(chosen, wall) is not None, clocks, at, zone)
    kind = why_away(chosen, wall_of(at, zone))
    if kind is None:
        return None, change
    if change is None:
        raise SettingsError(
            f"client.upload_window ({chosen.upload_window}) and client.working_hours "
            f"({chosen.working_hours}) leave this device no time",
            remedy="let the window hold hours that are no working hours",
        )
    what = "in the working hours" if kind is WorkingHours else "outside the upload window"
    error = kind(f"{what} until {clock_text(change, zone)}")
    return AwayPeriod(error=error, since=at, until=change), change


def longest_stay_seconds(
    chosen: ClientSettings, at: dt.datetime, *, zone: dt.tzinfo | None = None
) -> float:
    """Return how long the hours of a week let the device be there at a stretch; inf is always.

    Raises:
        SettingsError: upload window and working hours leave no time at all.
    """
    longest, end = 0.0, at + LOOKED_AHEAD
    while at < end:
        away, change = hours_change(chosen, at, zone=zone)
        if change is None:
            return math.inf
        if away is None:
            longest = max(longest, (change - at).total_seconds())
        at = change
    return longest


def min_bytes_per_second(stay_seconds: float, *, down_bytes: int, up_bytes: int) -> float:
    """Return what a link must carry for a round in so long a stay: 0 if it never ends, inf if none.

    The model comes down, and the device stops ``lead_seconds`` before the end to send its vector.
    For 40 MB each way in ten minutes: 120 MB in 540 s, 222 kB/s. Training takes its time besides.
    """
    left = stay_seconds - LEAD_SECONDS
    return (down_bytes + TIMES_AS_LONG * up_bytes) / left if left > 0 else math.inf


def away_by_bytes(
    allowance: ByteQuota, at: dt.datetime, *, needed: int, zone: dt.tzinfo | None = None
) -> AwayPeriod | None:
    """Return how the bytes of the day keep the device away, which needs so many; None if not."""
    today = wall_of(at, zone).date()
    if needed <= allowance.left(today):
        return None
    midnight = dt.datetime.combine(today + dt.timedelta(days=1), dt.time())
    until = max(instant_of(midnight, zone), at + ONE_SECOND)
    used, most = allowance.used(today), allowance.bytes_per_day
    error = BytesUsedUp(
        f"{used:,} of today's {most:,} bytes are used, and {needed:,} more are needed: away until "
        f"{clock_text(until, zone)}"
    )
    return AwayPeriod(error=error, since=at, until=until)


def clock_text(at: dt.datetime, zone: dt.tzinfo | None) -> str:
    """Return an instant as this device's wall clock shows it: 2026-11-21T22:00+01:00."""
    wall = wall_of(at, zone)
    return wall.isoformat(timespec="seconds" if wall.second else "minutes")


def utc_now() -> dt.datetime:
    """Return the machine's time."""
    return dt.datetime.now(dt.UTC)


class Availability:
    """The owner's settings, the clock, and the bytes that the device has moved."""

    def __init__(
        self,
        chosen: ClientSettings,
        *,
        name: str,
        image_bytes: int,
        vector_bytes: int,
        now: Callable[[], dt.datetime] = utc_now,
        zone: dt.tzinfo | None = None,
    ) -> None:
        """Take the settings, and what a round moves: a model down and a vector up.

        Raises:
            SettingsError: the settings leave the device no time, or no round.
            StateError: what was counted of the day's bytes cannot be read back.
        """
        self.update_bytes = vector_bytes + ROUND_SLACK_BYTES
        self.round_bytes = image_bytes + self.update_bytes
        self._chosen = chosen
        self._vector_bytes = vector_bytes
        self._now = now
        self._zone = zone
        self._allowance: ByteQuota | None = None
        if chosen.bytes_per_day is not None:
            if chosen.bytes_per_day < self.round_bytes:
                raise SettingsError(
                    f"client.bytes_per_day is {chosen.bytes_per_day:,}, and one round of this "
                    f"model takes up to {self.round_bytes:,}",
                    remedy="allow more, or train a smaller model",
                )
            path = chosen.state_folder / f"{name}.bytes.json"
            self._allowance = ByteQuota(path, bytes_per_day=chosen.bytes_per_day)
        self._away: AwayPeriod | None = None
        self._closing: dt.datetime | None = None
        self._found_at = self._holds_until = now()  # nothing was found so far
        self.by_hours()  # do they leave any time?

    @property
    def is_set(self) -> bool:
        """Whether any setting could ever keep the device away."""
        return self._allowance is not None or has_hours(self._chosen)

    def used_today(self) -> int:
        """Return the bytes that were moved today, 0 where they are not counted."""
        return 0 if self._allowance is None else self._allowance.used(self._today())

    def lead_seconds(self, bytes_per_second: float | None) -> float:
        """Return how long before its hours end the device stops, with its link as last seen."""
        return lead_seconds(self._vector_bytes, bytes_per_second)

    def longest_stay_seconds(self) -> float:
        """Return how long the hours let the device be there at a stretch; inf is always."""
        return longest_stay_seconds(self._chosen, self._now(), zone=self._zone)

    def least_bytes_per_second(self) -> float:
        """Return what the link must carry for a round in its longest stay."""
        return min_bytes_per_second(
            self.longest_stay_seconds(),
            down_bytes=self.round_bytes - self.update_bytes,
            up_bytes=self.update_bytes,
        )

    def by_hours(self, *, lead: float = 0.0) -> AwayPeriod | None:
        """Return how the hours keep the device away now, or within ``lead`` seconds.

        Asked each second, so what was found holds until it changes, or the clock is set back.
        """
        now = self._now()
        if not self._found_at <= now < self._holds_until:
            self._away, self._closing = hours_change(self._chosen, now, zone=self._zone)
            self._found_at, self._holds_until = now, self._closing or now + ONE_DAY
        if self._away is not None:
            return replace(self._away, since=now)
        if self._closing is None or (self._closing - now).total_seconds() > lead:
            return None
        return hours_change(self._chosen, self._closing, zone=self._zone)[0]

    def by_bytes(self, needed: int) -> AwayPeriod | None:
        """Return how the bytes of the day keep a device away that needs so many more."""
        if self._allowance is None:
            return None
        return away_by_bytes(self._allowance, self._now(), needed=needed, zone=self._zone)

    def seconds_until(self, instant: dt.datetime) -> float:
        """Return how long it is until an instant, 0 if it is past."""
        return max((instant - self._now()).total_seconds(), 0.0)

    def count(self, num_bytes: int) -> None:
        """Count bytes that were sent or received."""
        if self._allowance is not None:
            self._allowance.count(self._today(), num_bytes)

    def write(self) -> None:
        """Have what was counted on disk."""
        if self._allowance is not None:
            self._allowance.write()

    def _today(self) -> dt.date:
        return wall_of(self._now(), self._zone).date()


def availability_of(chosen: ClientSettings, name: str, layout: ModelLayout) -> Availability:
    """Return the absence of a device that trains a model of this layout.

    Raises:
        SettingsError, StateError: see ``Absence``.
    """
    vector_bytes = 4 * layout.num_parameters
    return Availability(chosen, name=name, image_bytes=layout.num_bytes, vector_bytes=vector_bytes)
