"""Writes the run's history in the background, and retries while the disk fails.

A failure is logged once, counted, and retried; the run continues without its history meanwhile.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from headwater.server.operations.sqlite_history import History
from headwater.server.transport.device_records import DeviceRecords

log = logging.getLogger(__name__)

# Limits how often a large fleet's records are written.
DEVICES_PER_SECOND = 1000
# Entries that may wait for a failing disk; lost rounds are filled in at the next start.
MAX_QUEUED = 1000


class HistoryWriter:
    """Queues entries from any thread; one thread writes them."""

    def __init__(self, folder: Path, device_records: DeviceRecords) -> None:
        self.num_failures = 0
        """Writes that failed, and entries lost to a full queue."""
        self._folder = folder
        self._device_records = device_records
        self._history: History | None = None
        self._queue: deque[Callable[[History], None]] = deque()
        self._devices_due = 0.0
        self._is_failing = False

    def add(self, write: Callable[[History], None]) -> None:
        """Queue an entry."""
        if len(self._queue) < MAX_QUEUED:
            self._queue.append(write)
        else:
            self.num_failures += 1

    def add_event(self, kind: str, detail: str = "") -> None:
        """Queue an event."""
        self.add(lambda history: history.add_event(kind, detail))

    def write(self, state: Mapping[str, Any], *, is_last: bool = False) -> None:
        """Write the queued entries, the changed device records and the run's state.

        The first failure ends the attempt; the next call starts with the entry that failed.
        """
        if not self.attempt(self._open):
            return
        history = self._history
        assert history is not None
        while self._queue:
            if not self.attempt(partial(self._queue[0], history)):
                return
            self._queue.popleft()
        if is_last or time.monotonic() >= self._devices_due:
            devices = self._device_records.devices()
            self._devices_due = time.monotonic() + len(devices) / DEVICES_PER_SECOND
            self.attempt(lambda: history.write_devices(devices))
        if self.attempt(lambda: history.write_state({**state, "num_failures": self.num_failures})):
            self._is_failing = False

    def close(self) -> None:
        """Close the history."""
        if self._history is not None:
            self.attempt(self._history.close)

    def attempt(self, work: Callable[[], object]) -> bool:
        """Run disk work; count a failure, and log the first of several in a row."""
        try:
            work()
        except (sqlite3.Error, OSError) as error:
            self.num_failures += 1
            if not self._is_failing:
                self._is_failing = True
                log.warning("the history in %s is not written: %s", self._folder, error)
            return False
        return True

    def _open(self) -> None:
        if self._history is None:
            self._history = History(self._folder)
            self._device_records.restore(self._history.devices())
