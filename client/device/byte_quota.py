"""How many bytes a device has moved today, kept over restarts, against what its owner allows.

Days are those of the wall clock. The last few are kept, so that a machine without a clock of its
own, which wakes up in the past and is set right a moment later, neither forgets what it used today
nor gets today's bytes twice. What a power cut forgets is what was moved in the last
``WRITE_SECONDS``.
"""

from __future__ import annotations

import datetime as dt
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path

from headwater.common.errors import StateError
from headwater.common.system.atomic_file import write_whole

log = logging.getLogger(__name__)

WRITE_SECONDS = 5.0
MAX_DAYS = 8

Days = Mapping[dt.date, int]


def with_bytes_added(days: Days, day: dt.date, num_bytes: int) -> dict[dt.date, int]:
    """Return the bytes of each day, with more on one: of the days the last that were counted on."""
    rest = {other: before for other, before in days.items() if other != day}
    kept = list(rest.items())[1 - MAX_DAYS :]
    return {**dict(kept), day: days.get(day, 0) + num_bytes}


class ByteQuota:
    """The bytes of the last days, in memory and in a file."""

    def __init__(self, path: Path, *, bytes_per_day: int) -> None:
        """Take up what the file has; there need be none.

        Raises:
            StateError: it is there, and cannot be read back.
        """
        self.bytes_per_day = bytes_per_day
        self._path = path
        self._days = _read(path)
        self._is_written = True
        self._is_failing = False
        self._written_at = -WRITE_SECONDS

    def used(self, day: dt.date) -> int:
        """Return the bytes that were moved on a day."""
        return self._days.get(day, 0)

    def left(self, day: dt.date) -> int:
        """Return the bytes that may still be moved on a day."""
        return max(self.bytes_per_day - self.used(day), 0)

    def count(self, day: dt.date, num_bytes: int) -> None:
        """Count bytes; they are on disk within ``WRITE_SECONDS`` if counting goes on."""
        self._days = with_bytes_added(self._days, day, num_bytes)
        self._is_written = False
        if time.monotonic() - self._written_at >= WRITE_SECONDS:
            self.write()

    def write(self) -> None:
        """Write what was counted since the last time; a disk that does not take it is told of."""
        if self._is_written:
            return
        self._written_at = time.monotonic()
        told = {day.isoformat(): used for day, used in self._days.items()}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, json.dumps(told).encode())
        except OSError as error:
            if not self._is_failing:
                log.warning(
                    "%s cannot be written (%s): a restart would forget the bytes of today",
                    self._path,
                    error.strerror,
                )
            self._is_failing = True
        else:
            self._is_written, self._is_failing = True, False


def _read(path: Path) -> dict[dt.date, int]:
    try:
        told = json.loads(path.read_text())
        days = {dt.date.fromisoformat(day): used for day, used in told.items()}
        if not all(type(used) is int and used >= 0 for used in days.values()):
            raise ValueError("a count that is no count")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise StateError(
            f"the bytes that were moved today cannot be read from {path}: {error}",
            remedy="delete the file: the device then counts today's bytes from zero",
        ) from error
    return days
