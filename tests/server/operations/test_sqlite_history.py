"""The history in SQLite: contents, resumed runs, and files of other versions."""

from __future__ import annotations

import math
import sqlite3
from dataclasses import asdict
from pathlib import Path

import pytest

from headwater.common.errors import StateError
from headwater.server.operations.sqlite_history import (
    FILE,
    MIGRATIONS,
    VERSION,
    History,
    read,
    round_columns,
)
from headwater.server.transport.device_records import DeviceRecord
from tests.round_rows import masked, row


def rounds_in(folder: Path) -> list[int]:
    database = sqlite3.connect(folder / FILE)
    try:
        return [number for (number,) in database.execute("SELECT round FROM rounds ORDER BY round")]
    finally:
        database.close()


def test_a_round_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    history = History(tmp_path)
    fields = asdict(row(1, "a", loss=math.nan, masked_clients=[masked("b")]))
    history.add_round(round_columns(fields, ended_at=5.0))
    found = read(tmp_path)
    history.close()
    assert found is not None
    assert found.last_round is not None
    shown = {key: found.last_round[key] for key in ("round", "ended_at", "loss", "k_min", "k_max")}
    # SQLite has no NaN.
    assert shown == {"round": 1, "ended_at": 5.0, "loss": None, "k_min": 2, "k_max": 5}
    assert found.last_round["wait_seconds"] == 1.0
    assert found.last_round["metrics"] == {"test_accuracy": 0.75}


def test_a_resumed_run_drops_rounds_after_its_checkpoint_and_fills_gaps(tmp_path: Path) -> None:
    history = History(tmp_path)
    for number in (1, 3, 4, 5):
        history.add_round(round_columns(asdict(row(number, "a"))))
    known = [round_columns(asdict(row(number, "a"))) for number in (1, 2, 3)]
    history.sync_rounds(4, known)
    assert rounds_in(tmp_path) == [1, 2, 3]
    history.add_round(round_columns(asdict(row(4, "a"))))
    history.close()
    assert rounds_in(tmp_path) == [1, 2, 3, 4]


def test_devices_are_read_back_and_only_changed_ones_are_written(tmp_path: Path) -> None:
    history = History(tmp_path)
    device = DeviceRecord(name="pi", battery=0.5, is_on_battery=True, bytes_up=2**53)
    history.write_devices([device, DeviceRecord(name="other")])
    before = history._database.total_changes
    history.write_devices([device, DeviceRecord(name="other")])
    assert history._database.total_changes == before
    device.refusal_code = "LateUpdate"
    history.write_devices([device, DeviceRecord(name="other")])
    assert history._database.total_changes == before + 1
    history.close()
    again = History(tmp_path)
    assert again.devices() == [DeviceRecord(name="other"), device]
    again.close()


def test_events_are_read_newest_first_with_the_latest_state(tmp_path: Path) -> None:
    history = History(tmp_path)
    for kind in ("started", "paused"):
        history.add_event(kind, "because")
    history.write_state({"round": 1})
    history.write_state({"round": 2, "stands": "paused"})
    found = read(tmp_path)
    history.close()
    assert found is not None
    assert [event["kind"] for event in found.events] == ["paused", "started"]
    assert found.state == {"round": 2, "stands": "paused"}


def test_a_closed_history_is_one_file_also_after_it_was_read(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.add_event("started")
    read(tmp_path)
    history.close()
    assert read(tmp_path) is not None
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_a_history_of_a_newer_version_is_renamed_and_kept(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / FILE)
    database.execute(f"PRAGMA user_version = {VERSION + 1}")
    database.close()
    history = History(tmp_path)
    found = read(tmp_path)
    history.close()
    assert found is not None
    assert [event["kind"] for event in found.events] == ["put aside"]
    assert len(list(tmp_path.glob(f"{FILE}.*"))) == 1


def test_a_damaged_history_is_renamed_by_the_server_and_an_error_to_a_reader(
    tmp_path: Path,
) -> None:
    (tmp_path / FILE).write_bytes(b"no database" * 1000)
    with pytest.raises(StateError, match="cannot be read"):
        read(tmp_path)
    History(tmp_path).close()
    assert read(tmp_path) is not None


def test_a_folder_without_a_history_reads_as_none(tmp_path: Path) -> None:
    assert read(tmp_path) is None


def test_a_migration_is_applied_completely_or_not_at_all(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / FILE)
    with pytest.raises(sqlite3.OperationalError):
        database.executescript(f"BEGIN; {MIGRATIONS[0]} SELECT nothing FROM nowhere; COMMIT;")
    database.close()
    history = History(tmp_path)
    history.add_event("started")
    history.close()


def test_a_history_keeps_a_limited_number_of_rounds_and_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.server.operations.sqlite_history.MAX_ROUNDS", 3)
    monkeypatch.setattr("headwater.server.operations.sqlite_history.MAX_EVENTS", 2)
    history = History(tmp_path)
    for number in range(1, 6):
        history.add_round(round_columns(asdict(row(number, "pi"))))
        history.add_event("aborted", str(number))
    history.close()
    assert rounds_in(tmp_path) == [3, 4, 5]
    snapshot = read(tmp_path)
    assert snapshot is not None
    assert [event["detail"] for event in snapshot.events] == ["5", "4"]
