"""When the owner's settings keep the device away: active hours of the week, and bytes per day.

A device that is away holds no connection and costs its link nothing: a server may send a model at
any moment to a connected device, and keeps every idle stream alive. The device disconnects in good
order and says why and until when, which the server's operator sees.

Before its active hours end the device stops training early enough to send the sum so far, with its
exact weight (``lead_seconds``). It begins no round if the day's remaining bytes do not suffice.
"""

from __future__ import annotations

import datetime as dt
import logging
import math
from collections.abc import Callable
from dataclasses import replace

from headwater.client.device.owner_limits import AwayPeriod, OwnerLimits
from headwater.client.energy.byte_quota import ByteQuota
from headwater.client.energy.time_share import is_active
from headwater.common.errors import BytesUsedUp, OutsideActiveHours, SettingsError
from headwater.common.model.layout import ModelLayout
from headwater.common.settings.schema import ClientSettings
from headwater.common.settings.weekly_hours import instant_of, wall_of, weekly
from headwater.common.transport.wire_pb2 import ServerFrame

log = logging.getLogger(__name__)

# A round's bytes besides model and vector: plans, reports, keys and shares of a session.
ROUND_SLACK_BYTES = 64 << 10
MOST_COMPRESSED = 8
"""The first model takes at least about 9 of 32 bits, and a device may hold it from earlier."""

# For the current micro-batch and the phases of a secure session.
LEAD_SECONDS = 60.0
MAX_LEAD_SECONDS = 1800.0
# The link is rarely as fast as in its last measurement.
UPLOAD_FACTOR = 2.0

ONE_SECOND = dt.timedelta(seconds=1)
ONE_DAY = dt.timedelta(days=1)
# A week, and a day for the window that is open now.
LOOK_AHEAD = dt.timedelta(days=8)


def has_inactive_hours(chosen: ClientSettings) -> bool:
    """Return whether the settings name hours outside of which the device leaves."""
    return chosen.active_hours is not None and chosen.inactive_share == 0


def hours_change(
    chosen: ClientSettings, at: dt.datetime, *, zone: dt.tzinfo | None = None
) -> tuple[AwayPeriod | None, dt.datetime | None]:
    """Return how the hours keep the device away now, and when that changes; None if never.

    An hour that daylight saving time skips may be a device's only one in a week. ``until`` is then
    the time at which to look again.
    """
    if chosen.active_hours is None or not has_inactive_hours(chosen):
        return None, None
    change = weekly(chosen.active_hours).next_change(at, zone)
    if is_active(chosen, wall_of(at, zone)):
        return None, change
    until = change or at + LOOK_AHEAD
    error = OutsideActiveHours(f"outside its active hours until {clock_text(until, zone)}")
    return AwayPeriod(error=error, since=at, until=until), until


def clock_text(at: dt.datetime, zone: dt.tzinfo | None) -> str:
    """Return an instant as this device's clock shows it: 2026-11-21T22:00+01:00."""
    wall = wall_of(at, zone)
    return wall.isoformat(timespec="seconds" if wall.second else "minutes")


def utc_now() -> dt.datetime:
    """Return the machine's time."""
    return dt.datetime.now(dt.UTC)


class Availability(OwnerLimits):
    """Decides by the owner's settings, the clock and the bytes used whether the device is away."""

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
        """Take the settings, and the bytes that a round moves: a model down and a vector up.

        A run may send less of both (``expect_model``, ``expect_update``), which the device learns
        from its plan. If the bytes per day suffice for compressed rounds alone, it begins with the
        least that such a round may take.

        Raises:
            SettingsError: the bytes per day do not suffice for one round of any run.
            StateError: the file of the day's bytes cannot be read.
        """
        self._chosen = chosen
        self._model_bytes, self._vector_bytes = image_bytes, vector_bytes
        self.whole_round_bytes = self.round_bytes
        """The bytes of a round without compression."""
        self._now = now
        self._zone = zone
        self._quota: ByteQuota | None = None
        if chosen.bytes_per_day is not None:
            least = image_bytes // MOST_COMPRESSED + ROUND_SLACK_BYTES
            if chosen.bytes_per_day < least:
                raise SettingsError(
                    f"client.bytes_per_day is {chosen.bytes_per_day:,}, and one round of this "
                    f"model takes at least {least:,}, however a run compresses it",
                    remedy="allow more, or train a smaller model",
                )
            if chosen.bytes_per_day < self.whole_round_bytes:
                log.warning(
                    "client.bytes_per_day is %s, and one round of this model takes up to %s: "
                    "this device takes part only in runs that compress it (docs/bytes.md)",
                    f"{chosen.bytes_per_day:,}",
                    f"{self.whole_round_bytes:,}",
                )
                self._model_bytes, self._vector_bytes = image_bytes // MOST_COMPRESSED, 0
            path = chosen.state_folder / f"{name}.bytes.json"
            self._quota = ByteQuota(path, bytes_per_day=chosen.bytes_per_day)
        self.is_set = self._quota is not None or has_inactive_hours(chosen)
        self._has_next_model = False
        """Whether the model of the next round has been announced, and its instruction has not."""
        self._away: AwayPeriod | None = None
        self._change: dt.datetime | None = None
        self._computed_at = self._valid_until = now()  # nothing is computed yet

    @property
    def update_bytes(self) -> int:
        """The bytes of an update, with all that a round needs besides vectors."""
        return self._vector_bytes + ROUND_SLACK_BYTES

    @property
    def round_bytes(self) -> int:
        """The bytes of a round: of the model as it was sent last, and of an update."""
        return self._model_bytes + self.update_bytes

    def reason_to_leave(
        self, upload_bytes_per_second: float | None, *, is_idle: bool
    ) -> AwayPeriod | None:
        """See ``OwnerLimits``.

        During a round the device must leave when its hours are about to end, or when no byte of the
        day is left; between two rounds also when the bytes do not suffice for another round.
        """
        by_hours = self.by_hours(lead=self.lead_seconds(upload_bytes_per_second))
        # The model of the next round may have come before its instruction, and is counted.
        next_bytes = self.update_bytes if self._has_next_model else self.round_bytes
        return by_hours or self.by_bytes(next_bytes if is_idle else 1)

    def reason_to_decline(
        self, frame: ServerFrame, update_bytes: Callable[[str], int]
    ) -> AwayPeriod | None:
        """See ``OwnerLimits``: it would exceed the day's bytes."""
        match frame.WhichOneof("kind"):
            case "image" if frame.image.is_frozen:
                return self.by_bytes(frame.image.num_bytes + self.update_bytes)
            case "image":
                self.expect_model(frame.image.num_bytes)
                self._has_next_model = True
                return self.by_bytes(self.round_bytes)
            case "instruction":
                self._has_next_model = False
                is_plan = frame.instruction.message_type == "train"
                if is_plan:
                    self.expect_update(update_bytes(frame.instruction.head_json))
                if frame.small_image:
                    self.expect_model(len(frame.small_image))
                    return self.by_bytes(self.round_bytes)
                return self.by_bytes(self.update_bytes) if is_plan else None
            case _:
                return None

    def expect_model(self, num_bytes: int) -> None:
        """Take the bytes of the model that the server announces: all of it, or a difference."""
        self._model_bytes = num_bytes

    def expect_update(self, vector_bytes: int) -> None:
        """Take the bytes of an update as the run's plan has it encoded."""
        self._vector_bytes = vector_bytes

    def used_today(self) -> int:
        """Return the bytes moved today; 0 if they are not counted."""
        return 0 if self._quota is None else self._quota.used(self._today())

    def lead_seconds(self, bytes_per_second: float | None) -> float:
        """Return how long before its hours end the device stops training, to send its vector.

        One minute plus twice the upload time at the rate last measured; at most half an hour. A
        vector of 40 MB takes 200 s at 200 kB/s: seven minutes and forty seconds before.
        """
        upload = 0.0 if bytes_per_second is None else self._vector_bytes / bytes_per_second
        return min(LEAD_SECONDS + UPLOAD_FACTOR * upload, MAX_LEAD_SECONDS)

    def longest_stay_seconds(self) -> float:
        """Return the longest stretch of active hours in a week; inf if it never ends."""
        longest, at = 0.0, self._now()
        end = at + LOOK_AHEAD
        while at < end:
            away, change = hours_change(self._chosen, at, zone=self._zone)
            if change is None:
                return math.inf
            if away is None:
                longest = max(longest, (change - at).total_seconds())
            at = change
        return longest

    def min_bytes_per_second(self) -> float:
        """Return the link rate that a round needs in the longest stay.

        0 if the stay never ends, inf if it is too short. The device receives the model, and stops
        ``lead_seconds`` before the end to send its vector. For 40 MB each way in ten minutes: 120
        MB in 540 s, 222 kB/s. Training takes additional time.
        """
        left = self.longest_stay_seconds() - LEAD_SECONDS
        needed = self._model_bytes + UPLOAD_FACTOR * self.update_bytes
        return needed / left if left > 0 else math.inf

    def by_hours(self, *, lead: float = 0.0) -> AwayPeriod | None:
        """Return how the hours keep the device away now, or within ``lead`` seconds.

        Called every second, so the result is kept until it changes, or the clock is set back.
        """
        now = self._now()
        if not self._computed_at <= now < self._valid_until:
            self._away, self._change = hours_change(self._chosen, now, zone=self._zone)
            self._computed_at, self._valid_until = now, self._change or now + ONE_DAY
        if self._away is not None:
            return replace(self._away, since=now)
        if self._change is None or (self._change - now).total_seconds() > lead:
            return None
        return hours_change(self._chosen, self._change, zone=self._zone)[0]

    def by_bytes(self, needed: int) -> AwayPeriod | None:
        """Return how the day's bytes keep away a device that needs ``needed`` more; None if not."""
        quota = self._quota
        if quota is None:
            return None
        today, now = self._today(), self._now()
        if needed <= quota.left(today):
            return None
        midnight = dt.datetime.combine(today + dt.timedelta(days=1), dt.time())
        until = max(instant_of(midnight, self._zone), now + ONE_SECOND)
        hint = "" if needed <= quota.bytes_per_day else "; no day's bytes suffice: allow more"
        error = BytesUsedUp(
            f"{quota.used(today):,} of today's {quota.bytes_per_day:,} bytes are used, and "
            f"{needed:,} more are needed: away until {clock_text(until, self._zone)}{hint}"
        )
        return AwayPeriod(error=error, since=now, until=until)

    def seconds_until(self, instant: dt.datetime) -> float:
        """See ``OwnerLimits``."""
        return max((instant - self._now()).total_seconds(), 0.0)

    def count(self, num_bytes: int) -> None:
        """See ``OwnerLimits``."""
        if self._quota is not None:
            self._quota.count(self._today(), num_bytes)

    def write(self) -> None:
        """See ``OwnerLimits``."""
        if self._quota is not None:
            self._quota.write()

    def _today(self) -> dt.date:
        return wall_of(self._now(), self._zone).date()


def availability_of(chosen: ClientSettings, name: str, layout: ModelLayout) -> Availability:
    """Return the availability of a device that trains a model of this layout.

    Raises:
        SettingsError, StateError: see ``Availability``.
    """
    vector_bytes = 4 * layout.num_parameters
    return Availability(chosen, name=name, image_bytes=layout.num_bytes, vector_bytes=vector_bytes)
