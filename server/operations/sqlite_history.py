"""A run's history in SQLite: its rounds, its devices and the operator's orders.

One thread of the server writes it; other processes may read it at any time (WAL). It is an index
for queries and never delays a round: a run resumes from rounds.jsonl and the checkpoint, and rounds
that are missing here are filled in from rounds.jsonl.

``user_version`` counts the migrations below; a file that a newer version wrote is not changed.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from headwater.common.errors import StateError
from headwater.common.parsed_text import json_of
from headwater.common.system.json_logs import to_json_value
from headwater.server.transport.device_records import COLUMNS, DeviceRecord

FILE = "history.sqlite"
BUSY_SECONDS = 1.0
# Older rounds and events are deleted: a run may have no last round.
MAX_ROUNDS, MAX_EVENTS = 200_000, 10_000

MIGRATIONS = (
    """
    CREATE TABLE rounds (
        round INTEGER PRIMARY KEY,
        ended_at REAL,
        seconds REAL NOT NULL,
        wait_seconds REAL NOT NULL,
        num_clients INTEGER NOT NULL,
        num_invited INTEGER NOT NULL,
        num_examples INTEGER NOT NULL,
        weight INTEGER NOT NULL,
        loss REAL,
        learning_rate REAL,
        k_min INTEGER,
        k_max INTEGER,
        bytes_up INTEGER NOT NULL,
        bytes_down INTEGER NOT NULL,
        num_aborted INTEGER NOT NULL,
        num_refused INTEGER NOT NULL,
        metrics TEXT NOT NULL
    ) STRICT;
    CREATE TABLE devices (
        name TEXT PRIMARY KEY,
        first_seen REAL,
        last_seen REAL,
        is_connected INTEGER NOT NULL,
        last_round INTEGER,
        accumulation_steps INTEGER,
        micro_batch_size INTEGER,
        quota INTEGER,
        seconds REAL,
        peak_bytes INTEGER,
        memory_limit_bytes INTEGER,
        temperature_celsius REAL,
        battery REAL,
        is_on_battery INTEGER,
        bytes_up INTEGER NOT NULL,
        bytes_down INTEGER NOT NULL,
        refused_at REAL,
        refusal_code TEXT,
        refusal_text TEXT
    ) STRICT;
    CREATE TABLE events (at REAL NOT NULL, kind TEXT NOT NULL, detail TEXT NOT NULL) STRICT;
    CREATE TABLE state (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
    """,
    "ALTER TABLE rounds ADD COLUMN num_outliers INTEGER NOT NULL DEFAULT 0;",
    "ALTER TABLE devices ADD COLUMN task TEXT;",
)
VERSION = len(MIGRATIONS)

_values_of = attrgetter(*COLUMNS)

ROW_KEYS = (
    "round",
    "seconds",
    "num_clients",
    "num_invited",
    "num_examples",
    "weight",
    "loss",
    "learning_rate",
    "bytes_up",
    "bytes_down",
    "num_aborted",
    "num_outliers",
)
"""The columns of a round that are also keys of its row in rounds.jsonl."""


class History:
    """Writes the history, from one thread; its methods raise sqlite3.Error and OSError.

    A file that is damaged, or that a newer version wrote, is renamed and a new one begun.
    """

    def __init__(self, folder: Path) -> None:
        """Open or create the file."""
        self._path = folder / FILE
        self._written: dict[str, tuple[Any, ...]] = {}
        try:
            self._database = _open(self._path)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise  # the file is locked, full or read-only, not damaged
            aside = self._path.with_name(f"{FILE}.{time.time_ns()}")
            self._path.rename(aside)
            for suffix in ("-wal", "-shm"):
                self._path.with_name(FILE + suffix).unlink(missing_ok=True)
            self._database = _open(self._path)
            try:
                self.add_event("put aside", f"{aside.name}: {error}")
            except BaseException:
                self._database.close()
                raise

    def devices(self) -> list[DeviceRecord]:
        """Return the device records that earlier servers wrote."""
        return _devices(self._database)

    def sync_rounds(self, round_number: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Delete rounds from ``round_number`` on; insert missing earlier ones from ``rows``."""
        with self._database as database:
            database.execute("DELETE FROM rounds WHERE round >= ?", (round_number,))
            present = {number for (number,) in database.execute("SELECT round FROM rounds")}
            for columns in rows:
                if columns["round"] < round_number and columns["round"] not in present:
                    _insert(database, columns)

    def add_round(self, columns: Mapping[str, Any]) -> None:
        """Write a round's columns, see ``round_columns``; the last ``MAX_ROUNDS`` rounds stay."""
        with self._database as database:
            _insert(database, columns)
            database.execute(
                "DELETE FROM rounds WHERE round <= ?", (columns["round"] - MAX_ROUNDS,)
            )

    def write_devices(self, devices: Iterable[DeviceRecord]) -> None:
        """Write the records that have changed since they were last written."""
        changed = {
            device.name: values
            for device in devices
            if self._written.get(device.name) != (values := _values_of(device))
        }
        if not changed:
            return
        marks = ", ".join("?" * len(COLUMNS))
        with self._database as database:
            database.executemany(
                f"INSERT OR REPLACE INTO devices VALUES ({marks})", changed.values()
            )
        self._written |= changed

    def add_event(self, kind: str, detail: str = "") -> None:
        """Write an event other than a round: started, pause, resume, drain, aborted, ended.

        The last ``MAX_EVENTS`` stay.
        """
        with self._database as database:
            event = (time.time(), kind, detail)
            row = database.execute("INSERT INTO events VALUES (?, ?, ?)", event).lastrowid or 0
            database.execute("DELETE FROM events WHERE rowid <= ?", (row - MAX_EVENTS,))

    def write_state(self, state: Mapping[str, Any]) -> None:
        """Write the run's current state."""
        with self._database as database:
            database.executemany(
                "INSERT OR REPLACE INTO state VALUES (?, ?)",
                [(key, json.dumps(to_json_value(value))) for key, value in state.items()],
            )

    def close(self) -> None:
        """Close the file; SQLite merges its write-ahead log into it."""
        self._database.close()


def _open(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=BUSY_SECONDS)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        # A power cut may lose the last seconds but not the file; no write waits for the disk.
        database.execute("PRAGMA synchronous = NORMAL")
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version > VERSION:
            raise sqlite3.DatabaseError(f"it has version {version}, this server writes {VERSION}")
        for number in range(version, VERSION):
            steps = f"BEGIN; {MIGRATIONS[number]} PRAGMA user_version = {number + 1}; COMMIT;"
            database.executescript(steps)
    except BaseException:
        database.close()
        raise
    return database


def round_columns(row: Mapping[str, Any], *, ended_at: float | None = None) -> dict[str, Any]:
    """Return a round's columns from its row in rounds.jsonl."""
    from headwater.server.rounds.round_row import column_of  # not for a health check

    steps = [*column_of(row["clients"], "accumulation_steps")]
    steps += [client["planned_steps"] for client in row.get("masked_clients", [])]
    return {
        **{name: row.get(name, 0) for name in ROW_KEYS},
        "ended_at": ended_at,
        "wait_seconds": row["seconds_split"].get("wait", 0.0),
        "k_min": min(steps, default=None),
        "k_max": max(steps, default=None),
        "num_refused": len(row["refused"]),
        "metrics": json.dumps(to_json_value(row["metrics"])),
    }


def _insert(database: sqlite3.Connection, columns: Mapping[str, Any]) -> None:
    names, marks = ", ".join(columns), ", ".join("?" * len(columns))
    database.execute(
        f"INSERT OR REPLACE INTO rounds ({names}) VALUES ({marks})", list(columns.values())
    )


def _devices(database: sqlite3.Connection) -> list[DeviceRecord]:
    rows = database.execute(f"SELECT {', '.join(COLUMNS)} FROM devices ORDER BY name")
    devices = []
    for row in rows:
        device = DeviceRecord(**dict(zip(COLUMNS, row, strict=True)))
        device.is_connected = bool(device.is_connected)
        if device.is_on_battery is not None:
            device.is_on_battery = bool(device.is_on_battery)
        devices.append(device)
    return devices


class HistorySnapshot:
    """The contents of a history at one moment."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self.devices = _devices(database)
        self.state = {key: json_of(value) for key, value in database.execute("SELECT * FROM state")}
        cursor = database.execute("SELECT * FROM rounds ORDER BY round DESC LIMIT 1")
        names = [column[0] for column in cursor.description]
        last = cursor.fetchone()
        self.last_round: dict[str, Any] | None = None
        if last is not None:
            self.last_round = dict(zip(names, last, strict=True))
            self.last_round["metrics"] = json_of(self.last_round["metrics"])
        self.events = [
            {"at": at, "kind": kind, "detail": detail}
            for at, kind, detail in database.execute(
                "SELECT * FROM events ORDER BY rowid DESC LIMIT 20"
            )
        ]


def read(folder: Path) -> HistorySnapshot | None:
    """Read the history in ``folder``, also while a server writes it; None if there is none.

    Raises:
        StateError: it cannot be read.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        with _connection(path) as database:
            database.execute("BEGIN")  # all tables as of one moment
            (version,) = database.execute("PRAGMA user_version").fetchone()
            return HistorySnapshot(database) if version else None  # 0: it is being created
    except (sqlite3.Error, ValueError, TypeError) as error:
        raise StateError(
            f"{path} cannot be read: {error}",
            remedy="run the command as the server's user, and with the server's version",
        ) from error


@contextlib.contextmanager
def _connection(path: Path) -> Iterator[sqlite3.Connection]:
    # A server that writes has a -wal file. Without one, immutable avoids creating any file.
    is_written = path.with_name(f"{FILE}-wal").exists()
    mode = "mode=ro" if is_written else "mode=ro&immutable=1"
    database = sqlite3.connect(f"{path.resolve().as_uri()}?{mode}", uri=True, timeout=BUSY_SECONDS)
    try:
        yield database
    finally:
        database.close()
