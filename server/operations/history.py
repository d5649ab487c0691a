"""The run's history in SQLite, beside the checkpoints: rounds, devices, and what operators did.

One thread of the server writes it; anyone may read it meanwhile (WAL). It is an index to look
things up in, and never in the way of a round: rounds.jsonl and the checkpoint are what a run
resumes from, and rounds that are missing here are filled in from there.

``user_version`` counts the migrations below; a newer file than this code is left alone.
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
from headwater.common.system.json_logs import plain
from headwater.server.transport.device_records import COLUMNS, DeviceRecord

FILE = "history.sqlite"
BUSY_SECONDS = 1.0

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
)
VERSION = len(MIGRATIONS)

_values_of = attrgetter(*COLUMNS)

FIGURES = (
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
)
"""The columns of a round that are keys of its row in rounds.jsonl as well."""


class History:
    """The one writer; all calls come from one thread. sqlite3.Error and OSError are the caller's.

    A file that is damaged, or that a newer version has written, is put aside under another name.
    """

    def __init__(self, folder: Path) -> None:
        """Open the file, or make it."""
        self._path = folder / FILE
        self._written: dict[str, tuple[Any, ...]] = {}
        try:
            self._database = _open(self._path)
        except (sqlite3.DatabaseError, _TooNew) as error:
            if isinstance(error, sqlite3.OperationalError):
                raise  # locked, full or read-only: not the file's fault
            aside = self._path.with_name(f"{FILE}.{time.time_ns()}")
            self._path.rename(aside)
            for suffix in ("-wal", "-shm"):
                self._path.with_name(FILE + suffix).unlink(missing_ok=True)
            self._database = _open(self._path)
            self.event("put aside", f"{aside.name}: {error}")

    def devices(self) -> list[DeviceRecord]:
        """Return the devices that earlier servers knew."""
        return _devices(self._database)

    def begin(self, round_number: int, known: Iterable[Mapping[str, Any]]) -> None:
        """Drop what lies behind the last committed round; fill in what is missing before it."""
        with self._database as database:
            database.execute("DELETE FROM rounds WHERE round >= ?", (round_number,))
            there = {number for (number,) in database.execute("SELECT round FROM rounds")}
            for figures in known:
                if figures["round"] < round_number and figures["round"] not in there:
                    _insert(database, figures)

    def round(self, figures: Mapping[str, Any]) -> None:
        """Write a round's key figures, see ``figures_of``."""
        with self._database as database:
            _insert(database, figures)

    def write_devices(self, devices: Iterable[DeviceRecord]) -> None:
        """Write those that have changed since they were written last."""
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

    def event(self, kind: str, detail: str = "") -> None:
        """Write what happened besides rounds: started, paused, drained, aborted."""
        with self._database as database:
            database.execute("INSERT INTO events VALUES (?, ?, ?)", (time.time(), kind, detail))

    def tell(self, state: Mapping[str, Any]) -> None:
        """Write how the run stands."""
        with self._database as database:
            database.executemany(
                "INSERT OR REPLACE INTO state VALUES (?, ?)",
                [(key, json.dumps(plain(value))) for key, value in state.items()],
            )

    def close(self) -> None:
        """Close the file; what was written is in it, and no log is left beside it."""
        self._database.close()


class _TooNew(Exception):
    pass


def _open(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=BUSY_SECONDS)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        # A power cut may cost the last seconds, never the file; no round waits for the disk.
        database.execute("PRAGMA synchronous = NORMAL")
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version > VERSION:
            raise _TooNew(f"it is of version {version}, this server writes {VERSION}")
        for number in range(version, VERSION):
            steps = f"BEGIN; {MIGRATIONS[number]} PRAGMA user_version = {number + 1}; COMMIT;"
            database.executescript(steps)
    except BaseException:
        database.close()
        raise
    return database


def figures_of(row: Mapping[str, Any], *, ended_at: float | None = None) -> dict[str, Any]:
    """Return the columns of a round out of its row in rounds.jsonl."""
    steps = [client["accumulation_steps"] for client in row["clients"]]
    steps += [client["planned_steps"] for client in row.get("masked_clients", [])]
    return {
        **{name: row.get(name, 0) for name in FIGURES},
        "ended_at": ended_at,
        "wait_seconds": row["seconds_split"].get("wait", 0.0),
        "k_min": min(steps, default=None),
        "k_max": max(steps, default=None),
        "num_refused": len(row["refused"]),
        "metrics": json.dumps(plain(row["metrics"])),
    }


def _insert(database: sqlite3.Connection, figures: Mapping[str, Any]) -> None:
    names, marks = ", ".join(figures), ", ".join("?" * len(figures))
    database.execute(
        f"INSERT OR REPLACE INTO rounds ({names}) VALUES ({marks})", list(figures.values())
    )


def _devices(database: sqlite3.Connection) -> list[DeviceRecord]:
    found = database.execute(f"SELECT {', '.join(COLUMNS)} FROM devices ORDER BY name")
    devices = []
    for row in found:
        device = DeviceRecord(**dict(zip(COLUMNS, row, strict=True)))
        device.is_connected = bool(device.is_connected)
        if device.is_on_battery is not None:
            device.is_on_battery = bool(device.is_on_battery)
        devices.append(device)
    return devices


# What others read.


class HistorySnapshot:
    """What a history says at one moment."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self.devices = _devices(database)
        self.state = {
            key: json.loads(value) for key, value in database.execute("SELECT * FROM state")
        }
        cursor = database.execute("SELECT * FROM rounds ORDER BY round DESC LIMIT 1")
        names = [column[0] for column in cursor.description]
        last = cursor.fetchone()
        self.last_round: dict[str, Any] | None = None
        if last is not None:
            self.last_round = dict(zip(names, last, strict=True))
            self.last_round["metrics"] = json.loads(self.last_round["metrics"])
        self.events = [
            {"at": at, "kind": kind, "detail": detail}
            for at, kind, detail in database.execute(
                "SELECT * FROM events ORDER BY rowid DESC LIMIT 20"
            )
        ]


def read(folder: Path) -> HistorySnapshot | None:
    """Read the history in ``folder``, whether or not a server writes it; None if there is none.

    Raises:
        StateError: it cannot be read.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        with _reading(path) as database:
            database.execute("BEGIN")  # one moment for all tables
            (version,) = database.execute("PRAGMA user_version").fetchone()
            return HistorySnapshot(database) if version else None  # 0: it is being made
    except (sqlite3.Error, ValueError, TypeError) as error:
        raise StateError(
            f"{path} cannot be read: {error}",
            remedy="look as the user that the server runs as, with this server's version",
        ) from error


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    # A writer has its log beside the file. Without one nobody writes, and nothing need be made.
    is_written = path.with_name(f"{FILE}-wal").exists()
    how = "mode=ro" if is_written else "mode=ro&immutable=1"
    database = sqlite3.connect(f"{path.resolve().as_uri()}?{how}", uri=True, timeout=BUSY_SECONDS)
    try:
        yield database
    finally:
        database.close()
