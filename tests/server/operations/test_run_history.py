"""The history's files: contents, limits, damage, and the history of an earlier version."""

from __future__ import annotations

import json
import math
import sqlite3
from pathlib import Path

import pytest

from headwater.common.errors import StateError
from headwater.server.operations import run_history
from headwater.server.operations.run_history import (
    DEVICES,
    EVENTS,
    SQLITE,
    STATE,
    HistorySnapshot,
    HistoryWriter,
    read,
    round_figures,
)
from headwater.server.transport.device_records import DeviceRecord, DeviceRecords
from tests.round_rows import masked, row


def writer(folder: Path, *devices: DeviceRecord) -> HistoryWriter:
    records = DeviceRecords()
    records.restore(devices)
    return HistoryWriter(folder, records)


def test_a_round_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    given = row(1, "a", loss=math.nan, masked_clients=[masked("b")])
    writer(tmp_path).write({"last_round": round_figures(given, ended_at=5.0)})
    last = read(tmp_path).state["last_round"]
    shown = {key: last[key] for key in ("round", "ended_at", "loss", "k_min", "k_max")}
    # JSON has no NaN.
    assert shown == {"round": 1, "ended_at": 5.0, "loss": None, "k_min": 2, "k_max": 5}
    assert last["wait_seconds"] == 1.0
    assert last["metrics"] == {"test_accuracy": 0.75}


def test_devices_are_read_back_and_written_only_after_a_change(tmp_path: Path) -> None:
    device = DeviceRecord(name="pi", battery=0.5, is_on_battery=True, bytes_up=2**53)
    history = writer(tmp_path, device, DeviceRecord(name="other"))
    history.write({})
    (tmp_path / DEVICES).rename(tmp_path / "before")
    history.write({}, is_last=True)
    assert not (tmp_path / DEVICES).exists()
    device.refusal_code = "LateUpdate"
    history.write({}, is_last=True)
    assert read(tmp_path).devices == [DeviceRecord(name="other"), device]
    text = (tmp_path / DEVICES).read_text()
    (tmp_path / DEVICES).write_text(text.replace('"name"', '"of_a_newer_version": 1, "name"'))
    records = DeviceRecords()
    HistoryWriter(tmp_path, records).write({})
    assert records.devices() == [DeviceRecord(name="other"), device]


def test_events_are_read_newest_first_with_the_latest_state(tmp_path: Path) -> None:
    assert read(tmp_path) == HistorySnapshot(state={}, devices=[], events=[])
    history = writer(tmp_path)
    for kind in ("started", "paused"):
        history.add_event(kind, "because")
    history.write({"round": 1})
    history.write({"round": 2, "stands": "paused"})
    found = read(tmp_path)
    assert [event["kind"] for event in found.events] == ["paused", "started"]
    assert found.state == {"round": 2, "stands": "paused", "num_failures": 0}


def test_damaged_devices_are_renamed_by_the_server_and_an_error_to_a_reader(
    tmp_path: Path,
) -> None:
    writer(tmp_path).write({})
    (tmp_path / DEVICES).write_bytes(b'[{"no": "name"}]')
    with pytest.raises(StateError, match="cannot be read"):
        read(tmp_path)
    writer(tmp_path).write({})
    assert [event["kind"] for event in read(tmp_path).events] == ["put aside"]
    (aside,) = tmp_path.glob(f"{DEVICES}.*")
    assert b"no" in aside.read_bytes()


def test_an_event_that_a_crash_cut_off_is_skipped_and_hides_no_other(tmp_path: Path) -> None:
    for number in range(3):
        history = writer(tmp_path)
        history.add_event("started", str(number))
        history.write({})
        with (tmp_path / EVENTS).open("ab") as file:
            file.write(b'{"at": 1.0, "ki')
    assert [event["detail"] for event in read(tmp_path).events] == ["2", "1", "0"]


def test_a_history_keeps_a_limited_number_of_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_history, "MAX_EVENTS", 2)
    history = writer(tmp_path)
    for number in range(1, 10):
        history.add_event("aborted", str(number))
        history.write({})
        lines = [json.loads(line) for line in (tmp_path / EVENTS).read_text().splitlines()]
        details = [int(line["detail"]) for line in lines]
        assert details == [*range(number - len(lines) + 1, number + 1)]
        assert min(2, number) <= len(lines) <= 4


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A folder with the history of an earlier version, as far as it is read."""
    database = sqlite3.connect(tmp_path / SQLITE)
    database.executescript(
        """
        CREATE TABLE rounds (round INTEGER, loss REAL, metrics TEXT);
        CREATE TABLE devices (name TEXT, is_connected INTEGER, battery REAL, bytes_up INTEGER);
        CREATE TABLE events (at REAL, kind TEXT, detail TEXT);
        CREATE TABLE state (key TEXT, value TEXT);
        INSERT INTO rounds VALUES (8, 2.0, '{}'), (9, 0.5, '{"test_accuracy": 1}');
        INSERT INTO devices VALUES ('pi', 1, 0.5, 7);
        INSERT INTO events VALUES (1.0, 'started', 'here'), (2.0, 'ended', 'done');
        INSERT INTO state VALUES ('round', '9'), ('rounds', '9');
        """
    )
    database.close()
    return tmp_path


def test_the_history_of_an_earlier_version_is_read(earlier: Path) -> None:
    found = read(earlier)
    assert found.devices == [DeviceRecord(name="pi", is_connected=True, battery=0.5, bytes_up=7)]
    assert [event["kind"] for event in found.events] == ["ended", "started"]
    last = {"round": 9, "loss": 0.5, "metrics": {"test_accuracy": 1}}
    assert found.state == {"round": 9, "rounds": 9, "last_round": last}


def test_the_device_records_of_an_earlier_version_are_taken_over_once(earlier: Path) -> None:
    for _ in range(2):
        writer(earlier).write({})
        assert read(earlier).devices == [DeviceRecord(name="pi", battery=0.5, bytes_up=7)]


def test_a_damaged_history_of_an_earlier_version_is_left_and_noted(tmp_path: Path) -> None:
    (tmp_path / SQLITE).write_bytes(b"no database" * 1000)
    with pytest.raises(StateError, match="cannot be read"):
        read(tmp_path)
    writer(tmp_path).write({})
    assert read(tmp_path).events[0]["detail"].startswith(SQLITE)
    assert (tmp_path / STATE).exists()
