"""What an owner's settings may ask of a connected device: to leave, to decline, to count bytes.

Without such settings nothing does. ``headwater.client.energy.availability`` implements them.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass

from headwater.common.errors import DeviceAway
from headwater.common.transport.wire_pb2 import ServerFrame


@dataclass(frozen=True, kw_only=True, slots=True)
class AwayPeriod:
    """Why the device is away, from which instant, and until which."""

    error: DeviceAway
    since: dt.datetime
    """If it is in the future, there is still time until then to send the sum."""
    until: dt.datetime


class OwnerLimits:
    """The limits of a device whose owner sets none."""

    is_set = False
    """Whether any setting can keep the device away."""

    def reason_to_leave(
        self, upload_bytes_per_second: float | None, *, is_idle: bool
    ) -> AwayPeriod | None:
        """Return why the device must leave at this link rate; it is idle between two rounds."""
        return None

    def reason_to_decline(
        self, frame: ServerFrame, update_bytes: Callable[[str], int]
    ) -> AwayPeriod | None:
        """Return why the device may not take the transfer or round that a frame begins.

        ``update_bytes`` returns the bytes of a plan's update.
        """
        return None

    def seconds_until(self, instant: dt.datetime) -> float:
        """Return the seconds until an instant; 0 if it is past."""
        return 0.0

    def count(self, num_bytes: int) -> None:
        """Count bytes sent or received."""

    def write(self) -> None:
        """Write the counted bytes to disk."""
