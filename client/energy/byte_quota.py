"""The bytes that the device has moved today, kept over restarts, and its owner's limit per day.

Days are those of the wall clock. The last few days are kept: a machine without a battery-backed
clock starts with an old date and is corrected a moment later, and neither loses today's count nor
gets a second quota. A power cut loses the count of the last ``WRITE_SECONDS``.
"""

from __future__ import annotations

import datetime as dt
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path

from headwater.common.errors import StateError
from headwater.common.parsed_text import json_of
from headwater.common.system.atomic_file import OWNER_ONLY, make_private_folder, write_atomically

log = logging.getLogger(__name__)

WRITE_SECONDS = 5.0
MAX_DAYS = 8

Days = Mapping[dt.date, int]


def with_bytes_added(days: Days, day: dt.date, num_bytes: int) -> dict[dt.date, int]:
    """Return the bytes of each day with more on ``day``; only the last MAX_DAYS are kept."""
    others = {other: count for other, count in days.items() if other != day}
    recent = list(others.items())[1 - MAX_DAYS :]
    return {**dict(recent), day: days.get(day, 0) + num_bytes}


class ByteQuota:
    """The bytes of the last days, in memory and in a file, and the limit per day."""

    def __init__(self, path: Path, *, bytes_per_day: int) -> None:
        """Read the file if it exists.

        Raises:
            StateError: it exists and cannot be read.
        """
        self.bytes_per_day = bytes_per_day
        self._path = path
        self._days = _read(path)
        self._is_written = True
        self._is_failing = False
        self._written_at = -WRITE_SECONDS

    def used(self, day: dt.date) -> int:
        """Return the bytes moved on a day."""
        return self._days.get(day, 0)

    def left(self, day: dt.date) -> int:
        """Return the bytes that may still be moved on a day."""
        return max(self.bytes_per_day - self.used(day), 0)

    def count(self, day: dt.date, num_bytes: int) -> None:
        """Count bytes; they are on disk within ``WRITE_SECONDS`` if counting continues."""
        self._days = with_bytes_added(self._days, day, num_bytes)
        self._is_written = False
        if time.monotonic() - self._written_at >= WRITE_SECONDS:
            self.write()

    def write(self) -> None:
        """Write the counts if they changed; a failure is logged once."""
        if self._is_written:
            return
        self._written_at = time.monotonic()
        counts = {day.isoformat(): used for day, used in self._days.items()}
        try:
            make_private_folder(self._path.parent)
            write_atomically(self._path, json.dumps(counts).encode(), mode=OWNER_ONLY)
        except OSError as error:
            if not self._is_failing:
                log.warning(
                    "%s cannot be written (%s): a restart would lose today's count of bytes",
                    self._path,
                    error.strerror,
                )
            self._is_failing = True
        else:
            self._is_written, self._is_failing = True, False


def _read(path: Path) -> dict[dt.date, int]:
    try:
        counts = json_of(path.read_text(encoding="utf-8"))
        days = {dt.date.fromisoformat(day): used for day, used in counts.items()}
        if not all(type(used) is int and used >= 0 for used in days.values()):
            raise ValueError("a count is not a whole number of 0 or more")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise StateError(
            f"today's count of bytes cannot be read from {path}: {error}",
            remedy="delete the file: the device then counts today's bytes from zero",
        ) from error
    return days
