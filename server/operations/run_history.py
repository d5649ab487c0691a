"""Records a run's state, devices and events in small files, for `status` and for the operator.

``state.json`` and ``devices.json`` are replaced whole, ``events.jsonl`` has a line for each event.
The rounds are in rounds.jsonl; the state repeats the last one's figures, which a health check reads
without loading torch. One thread of the server writes; other processes may read at any time. A
failure is logged once, counted and retried; no round waits for it.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.common.errors import StateError
from headwater.common.parsed_text import json_of
from headwater.common.system.atomic_file import regular, write_atomically
from headwater.common.system.json_logs import to_json_value
from headwater.server.transport.device_records import COLUMNS, DeviceRecord, DeviceRecords

if TYPE_CHECKING:
    from headwater.server.rounds.round_row import RoundRow

log = logging.getLogger(__name__)

STATE, DEVICES, EVENTS = "state.json", "devices.json", "events.jsonl"
SQLITE = "history.sqlite"
"""The file of earlier versions; its records are read until the files above exist."""
# Limits how often a large fleet's records are written.
DEVICES_PER_SECOND = 1000
# Events that may wait for a failing disk.
MAX_QUEUED = 1000
# The file has twice as many at most; then the older half is deleted.
MAX_EVENTS = 10_000
MAX_SHOWN_EVENTS = 20
DAMAGE = (ValueError, TypeError, KeyError)
"""What reading a file of wrong content raises."""

ROW_KEYS = (
    *("round", "seconds", "num_clients", "num_invited", "num_examples", "weight", "loss"),
    *("learning_rate", "bytes_up", "bytes_down", "num_aborted", "num_outliers"),
)
"""The figures of the last round that are also keys of its row in rounds.jsonl."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HistorySnapshot:
    """What was recorded of a run: its devices by name, and its latest events, newest first."""

    state: dict[str, Any]
    devices: list[DeviceRecord]
    events: list[dict[str, Any]]


class HistoryWriter:
    """Takes events from any thread; one thread writes them, the device records and the state."""

    def __init__(self, folder: Path, device_records: DeviceRecords) -> None:
        self.num_failures = 0
        """Writes that failed, and events lost to a full queue."""
        self._folder = folder
        self._device_records = device_records
        self._is_restored = False
        self._events: deque[dict[str, Any]] = deque()
        self._num_events: int | None = None
        """The lines of the file; None if it must be read, because its end may be cut off."""
        self._devices_due = 0.0
        self._written = b""
        self._is_failing = False

    def add_event(self, kind: str, detail: str = "") -> None:
        """Queue an event other than a round: started, pause, resume, drain, aborted, ended."""
        if len(self._events) < MAX_QUEUED:
            self._events.append({"at": time.time(), "kind": kind, "detail": detail})
        else:
            self.num_failures += 1

    def write(self, state: Mapping[str, Any], *, is_last: bool = False) -> None:
        """Write the queued events, the device records if they changed, then the run's state.

        The first failure ends the attempt; the next call starts with what failed.
        """
        works = [self._restore, self._write_events]
        if is_last or time.monotonic() >= self._devices_due:
            works.append(self._write_devices)
        if all(map(self.attempt, works)) and self.attempt(lambda: self._write_state(state)):
            self._is_failing = False

    def attempt(self, work: Callable[[], object]) -> bool:
        """Run disk work; count a failure, and log the first of several in a row.

        A removed folder is not logged: the run ends with an error about it.
        """
        try:
            work()
        except (OSError, StateError) as error:
            self.num_failures += 1
            if not self._is_failing and self._folder.exists():
                self._is_failing = True
                log.warning("the history in %s is not written: %s", self._folder, error)
            return False
        return True

    def _restore(self) -> None:
        """Take over the records of an earlier server; a damaged file is renamed."""
        if self._is_restored:
            return
        try:
            self._device_records.restore(_devices(self._folder))
        except DAMAGE as error:
            path, name = self._folder / DEVICES, SQLITE
            if path.exists():
                name = f"{DEVICES}.{time.time_ns()}"
                path.replace(path.with_name(name))
            self.add_event("put aside", f"{name}: {error}")
        self._is_restored = True

    def _write_events(self) -> None:
        path = self._folder / EVENTS
        while self._events:
            if self._num_events is None or self._num_events >= 2 * MAX_EVENTS:
                lines = [*map(_line, deque(events(self._folder), MAX_EVENTS))]
                write_atomically(path, b"".join(lines))
                self._num_events = len(lines)
            number, self._num_events = self._num_events, None
            with path.open("ab") as file:
                file.write(_line(self._events[0]))
            self._num_events = number + 1
            self._events.popleft()

    def _write_devices(self) -> None:
        devices = sorted(self._device_records.devices(), key=lambda one: one.name)
        fields = [
            {name: value for name in COLUMNS if (value := getattr(device, name)) is not None}
            for device in devices
        ]
        content = json.dumps(to_json_value(fields)).encode()
        if content != self._written:
            write_atomically(self._folder / DEVICES, content)
            self._written = content
        self._devices_due = time.monotonic() + len(devices) / DEVICES_PER_SECOND

    def _write_state(self, state: Mapping[str, Any]) -> None:
        content = _line({**state, "num_failures": self.num_failures})
        write_atomically(self._folder / STATE, content, is_durable=False)  # of the last second


def round_figures(row: RoundRow | Mapping[str, Any], *, ended_at: float | None) -> dict[str, Any]:
    """Return what the state has of a round, from its row or from its line in rounds.jsonl."""
    from headwater.server.rounds.round_row import field_of, figure_of  # not for a health check

    steps = figure_of(row, "accumulation_steps")
    return {
        **{name: field_of(row, name) for name in ROW_KEYS},
        "ended_at": ended_at,
        "wait_seconds": (field_of(row, "seconds_split") or {}).get("wait", 0.0),
        "k_min": min(steps, default=None),
        "k_max": max(steps, default=None),
        "num_refused": len(field_of(row, "refused") or ()),
        "metrics": field_of(row, "metrics"),
    }


def read(folder: Path) -> HistorySnapshot:
    """Read the files in ``folder``, also while a server writes them; all is empty without any.

    Raises:
        StateError: one cannot be read.
    """
    try:
        if not (path := folder / STATE).exists():
            return _of_sqlite(folder / SQLITE)
        return HistorySnapshot(
            state=dict(json_of(regular(path).read_bytes())),
            devices=_devices(folder),
            events=[*deque(events(folder), MAX_SHOWN_EVENTS)][::-1],
        )
    except (OSError, *DAMAGE) as error:
        raise StateError(
            f"the history in {folder} cannot be read: {error}",
            remedy="run the command as the server's user, and with the server's version",
        ) from error


def _line(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(to_json_value(dict(fields)), allow_nan=False).encode() + b"\n"


def _devices(folder: Path) -> list[DeviceRecord]:
    if (folder / DEVICES).exists():
        return [_record(fields) for fields in json_of(regular(folder / DEVICES).read_bytes())]
    return _of_sqlite(folder / SQLITE).devices


def _record(fields: Mapping[str, Any]) -> DeviceRecord:
    return DeviceRecord(**{name: fields[name] for name in COLUMNS if name in fields})


def events(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield all events, oldest first; a line that a full disk or a crash cut off is skipped."""
    if not (folder / EVENTS).exists():
        return
    with regular(folder / EVENTS).open("rb") as lines:
        for line in lines:
            try:
                event = json_of(line)
                yield {name: event[name] for name in ("at", "kind", "detail")}
            except DAMAGE:
                log.debug("%s: an incomplete line is skipped", folder / EVENTS)


def _of_sqlite(path: Path) -> HistorySnapshot:
    """Read the history of a server of an earlier version, if there is one."""
    import sqlite3

    if not path.exists():
        return HistorySnapshot(state={}, devices=[], events=[])
    # A server that was killed leaves a -wal file. Without one, immutable avoids creating any file.
    mode = "" if path.with_name(f"{SQLITE}-wal").exists() else "&immutable=1"
    try:
        uri = f"{path.resolve().as_uri()}?mode=ro{mode}"
        with closing(sqlite3.connect(uri, uri=True)) as database:
            database.row_factory = sqlite3.Row
            rounds, devices, states, events = (
                [dict(row) for row in database.execute(f"SELECT * FROM {what}")]
                for what in (
                    "rounds ORDER BY round DESC LIMIT 1",
                    "devices ORDER BY name",
                    "state",
                    f"events ORDER BY rowid DESC LIMIT {MAX_SHOWN_EVENTS}",
                )
            )
    except sqlite3.Error as error:
        raise ValueError(error) from error
    state = {one["key"]: json_of(one["value"]) for one in states}
    for last in rounds:
        state["last_round"] = {**last, "metrics": json_of(last["metrics"])}
    for one in devices:
        flags = {"is_connected", "is_on_battery"} & one.keys()
        one |= {name: bool(one[name]) for name in flags if one[name] is not None}
    return HistorySnapshot(state=state, devices=[*map(_record, devices)], events=events)
