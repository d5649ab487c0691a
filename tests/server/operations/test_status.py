"""The output of ``headwater-server status`` and of the orders, with and without a server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headwater import __version__
from headwater.common.settings.schema import Settings
from headwater.common.system.console import console
from headwater.server.cli import app
from headwater.server.operations import orders, run_lock
from headwater.server.operations.run_history import HistoryWriter, read, round_figures
from headwater.server.operations.run_lock import RunLock
from headwater.server.operations.status import LONG_WAIT_SECONDS
from headwater.server.succession.run_queue import submit, take_next
from headwater.server.transport.device_records import COLUMNS, DeviceRecord, DeviceRecords
from tests.processes import ROOT
from tests.round_rows import row


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a fixed width: the console has the width at its import, maybe by another test."""
    monkeypatch.setattr(console, "width", 100)


def run(*arguments: object) -> tuple[int, str]:
    ended = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return ended.exit_code, " ".join(ended.output.split())


def write(
    folder: Path, *devices: DeviceRecord, events: Sequence[tuple[str, str]] = (), **state: Any
) -> None:
    """Write a history, or add to it."""
    records = DeviceRecords()
    for device in devices:
        record = records.get(device.name)
        for name in COLUMNS:
            setattr(record, name, getattr(device, name))
    history = HistoryWriter(folder, records)
    for event in events:
        history.add_event(*event)
    history.write({**read(folder).state, **state}, is_last=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(
        tmp_path,
        DeviceRecord(
            name="pi",
            last_seen=50.0,
            is_connected=True,
            accumulation_steps=2,
            micro_batch_size=8,
            peak_bytes=25_000_000,
            memory_limit_bytes=100_000_000,
            temperature_celsius=61.4,
            battery=0.83,
            is_on_battery=True,
            bytes_up=2_000_000,
        ),
        DeviceRecord(
            name="nas",
            last_seen=0.0,
            refused_at=0.0,
            refusal_code="LateUpdate",
            refusal_text="nas did not answer within [5] s",
        ),
        stands="in a round",
        round=3,
        rounds=9,
        last_round=round_figures(row(3, "pi", "nas"), ended_at=60.0),
    )
    return tmp_path


@pytest.fixture
def server(folder: Path) -> Iterator[RunLock]:
    held = RunLock(folder)
    held.write_info({"pid": 7, "address": "127.0.0.1:8500"})
    yield held
    held.release()


@pytest.mark.usefixtures("server")
def test_status_of_a_running_server_shows_the_run_and_its_devices(folder: Path) -> None:
    code, text = run("status", "--out", folder)
    assert code == 0
    for part in (
        "up: in a round, 3 of 9 rounds done, 1 device connected to 127.0.0.1:8500 (process 7)",
        "last round 3: loss 0.5000, 2 of 2 clients, 12 examples, 3 s",
        "pi connected 2 x 8 25.0 MB, 25% 61 °C 83% in use 2.0 MB 0 bytes",
        "nas refused at 1970-01-01T00:00:00.000Z: LateUpdate: nas did not answer within [5] s",
    ):
        assert part in text


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(
    ("seconds", "is_told"), [(LONG_WAIT_SECONDS, True), (LONG_WAIT_SECONDS - 1, False)]
)
def test_status_names_the_devices_that_a_round_has_awaited_for_a_minute(
    seconds: float, is_told: bool, folder: Path
) -> None:
    write(folder, awaited=["nas"], num_awaited=1, awaited_seconds=seconds)
    _, text = run("status", "--out", folder)
    assert ("it has waited 1 min for nas" in text) == is_told


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("other", ["a", "b"])
def test_status_says_if_devices_train_different_code(other: str, folder: Path) -> None:
    devices = [
        DeviceRecord(name=name, last_seen=0.0, is_connected=True, task=f"Signs {digit * 64}")
        for name, digit in (("one", "a"), ("two", other))
    ]
    write(folder, *devices)
    _, text = run("status", "--out", folder)
    told = "its devices train different code: Signs aaaaaaaaaaaa, Signs bbbbbbbbbbbb"
    assert (told in text) == (other == "b")


def test_status_lists_devices_in_natural_order(folder: Path) -> None:
    write(folder, *(DeviceRecord(name=name, last_seen=0.0) for name in ("pi10", "pi2")))
    _, text = run("status", "--out", folder)
    assert text.index("pi2") < text.index("pi10")


def test_status_of_an_ended_server_shows_the_last_heartbeat_and_fails(folder: Path) -> None:
    RunLock(folder).release()
    os.utime(folder / run_lock.FILE, (100.0, 100.0))
    code, text = run("status", "--out", folder)
    assert code == 1
    assert "down: no server runs" in text
    assert "continue with: headwater-server --resume --out" in text
    # A killed server cannot record that its devices disconnected.
    assert "connected" not in text.replace("devices connected", "")


def test_status_of_a_copy_of_a_shared_run_says_that_another_server_may_serve_it(
    folder: Path,
) -> None:
    RunLock(folder).release()
    (folder / "shared-state").write_text("/srv/shared")
    code, text = run("status", "--out", folder)
    assert code == 1
    assert "continue with: headwater-server --standby --out" in text
    assert "a copy of the run in /srv/shared: another server may serve it" in text


def end(folder: Path, *, round_number: int, reason: str) -> None:
    RunLock(folder).release()
    events = [("started", ""), ("ended", reason)]
    write(folder, events=events, stands="ended", round=round_number, rounds=9)


@pytest.mark.parametrize(
    ("round_number", "reason"), [(9, "done"), (9, "drained"), (4, "done")], ids=str
)
def test_status_of_a_finished_run_says_finished_and_succeeds(
    round_number: int, reason: str, folder: Path
) -> None:
    """A run may end before its last round because it has reached its goal."""
    end(folder, round_number=round_number, reason=reason)
    code, text = run("status", "--out", folder)
    assert code == 0
    assert f"finished: {round_number} of 9 rounds done" in text
    assert "down" not in text.split("device")[0]
    found = json.loads(CliRunner().invoke(app, ["status", "--json", "--out", str(folder)]).output)
    assert (found["stands"], found["is_finished"]) == ("finished", True)


@pytest.mark.parametrize("reason", ["drained", "stopped", "StateError: the disk is full"])
def test_a_run_that_ended_early_is_not_finished(reason: str, folder: Path) -> None:
    end(folder, round_number=4, reason=reason)
    code, text = run("status", "--out", folder)
    assert code == 1
    assert "down: no server runs" in text


def test_a_run_that_was_started_again_and_killed_is_not_finished(folder: Path) -> None:
    end(folder, round_number=9, reason="done")
    write(folder, events=[("started", "")])
    assert run("status", "--out", folder)[0] == 1


def test_the_help_lists_the_exit_statuses_of_status() -> None:
    text = run("status", "--help")[1]
    assert "Exit status 0: the server runs" in text
    assert "or the run is finished" in text


def test_the_table_fits_80_columns_and_shows_everything(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "width", 80)
    monkeypatch.setattr(console, "_force_terminal", True)
    name = "kitchen-pi-of-the-third-floor.example.org"
    write(folder, wide_record(name))
    lines = CliRunner().invoke(app, ["status", "--out", str(folder)]).output.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    rows = lines[next(at for at, line in enumerate(lines) if "─" in line) + 1 :]
    column = rows[0].split()[0]
    for line in rows[1:]:
        if len(line.split()) and line.startswith(" ") and column != name:
            column += line.split()[0]
    assert column.startswith(name)


def wide_record(name: str) -> DeviceRecord:
    return DeviceRecord(
        name=name,
        last_seen=0.0,
        accumulation_steps=4096,
        micro_batch_size=65_536,
        peak_bytes=123_456_789_012,
        memory_limit_bytes=256_000_000_000,
        temperature_celsius=61.4,
        battery=0.83,
        is_on_battery=True,
        bytes_up=923_456_789_012,
        bytes_down=923_456_789_012,
    )


def test_in_a_pipe_each_device_is_one_line_however_narrow_the_console_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "width", 80)
    name = "a-device-with-a-name-that-is-longer-than-forty-signs"
    write(folder, wide_record(name))
    text = CliRunner().invoke(app, ["status", "--out", str(folder)]).output
    assert not console.is_terminal
    (line,) = [line for line in text.splitlines() if name in line]
    assert line.rstrip().endswith("923.5 GB   923.5 GB")
    assert any(line.startswith("down: ") and str(folder) in line for line in text.splitlines())


@pytest.mark.parametrize("command", ["status", "drain"])
def test_a_simulation_over_grpc_is_continued_by_the_simulator(command: str, folder: Path) -> None:
    held = RunLock(folder)
    held.write_info({"command": "headwater-simulate"})
    held.release()
    _, text = run(command, "--out", folder)
    assert "headwater-simulate --resume --out" in text
    assert "headwater-server --resume" not in text


@pytest.mark.usefixtures("server")
def test_a_server_without_a_recent_heartbeat_is_not_healthy(folder: Path) -> None:
    os.utime(folder / run_lock.FILE, (100.0, 100.0))
    code, text = run("status", "--out", folder)
    assert code == 1
    assert "up, but not responding" in text


@pytest.mark.parametrize(("is_up", "code"), [(True, 0), (False, 1)])
def test_json_status_is_one_object_with_an_exit_status(
    is_up: bool, code: int, folder: Path
) -> None:
    held = RunLock(folder) if is_up else None
    ended = CliRunner().invoke(app, ["status", "--json", "--out", str(folder)])
    if held is not None:
        held.release()
    assert ended.exit_code == code
    status: dict[str, Any] = json.loads(ended.output)
    assert status["is_up"] is is_up
    assert status["num_connected"] == int(is_up)
    assert [device["name"] for device in status["devices"]] == ["nas", "pi"]
    assert status["last_round"]["ended_at"] == "1970-01-01T00:01:00.000Z"


@pytest.mark.parametrize("command", ["status", "pause", "unpause", "resume", "drain"])
def test_each_command_names_a_folder_without_a_run(command: str, tmp_path: Path) -> None:
    for folder, what in ((tmp_path, "holds no run"), (tmp_path / "nowhere", "is not a folder")):
        code, text = run(command, "--out", folder)
        assert code == 2
        assert what in text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["pause", "unpause", "resume", "drain"])
def test_an_order_without_a_running_server_says_how_to_continue(command: str, folder: Path) -> None:
    code, text = run(command, "--out", folder)
    assert code == 2
    assert f"nothing to {command.replace('resume', 'unpause')}" in text
    assert "headwater-server --resume --out" in text
    assert orders.read_order(folder) is None


def test_a_pause_can_be_undone_without_a_server(folder: Path) -> None:
    orders.write_order(folder, "pause")
    _, text = run("status", "--out", folder)
    assert "still paused; to undo: headwater-server unpause" in text
    code, text = run("unpause", "--out", folder)
    assert code == 0
    assert "no longer paused" in text
    order = orders.read_order(folder)
    assert order is not None
    assert order.verb == "resume"


def test_the_help_knows_one_resume_and_the_old_command_names_the_new_one(folder: Path) -> None:
    assert " unpause Undo `pause`" in run("--help")[1]
    assert " resume Do as" not in run("--help")[1]
    orders.write_order(folder, "pause")
    code, text = run("resume", "--out", folder)
    assert code == 0
    assert "`headwater-server resume` is now `headwater-server unpause`" in text
    assert "no longer paused" in text


@pytest.mark.slow
def test_a_health_check_does_not_load_torch(folder: Path) -> None:
    program = (
        "import sys; from headwater.server.cli import app; "
        f"app(['status', '--json', '--out', {str(folder)!r}], standalone_mode=False); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True)


def test_a_run_without_a_last_round_is_finished_only_if_it_ended_by_itself(tmp_path: Path) -> None:
    events = [("started", ""), ("ended", "drained")]
    write(tmp_path, events=events, round=7, rounds="forever")
    status, text = run("status", "--out", tmp_path)
    assert status == 1
    assert "down" in text
    write(tmp_path, events=[("started", ""), ("ended", "done")])
    status, text = run("status", "--out", tmp_path)
    assert status == 0
    assert "7 rounds done, without a last one" in text


def test_the_status_shows_the_runs_that_wait_and_the_one_that_has_followed(folder: Path) -> None:
    submit(folder, Settings(task="a.py:A", rounds="forever"), is_next=False)
    submit(folder, Settings(task="b.py:B", rounds=3), is_next=True)
    _, text = run("status", "--out", folder)
    assert "queue 1: b.py:B, 3 rounds, begins after the current round" in text
    assert "queue 2: a.py:A, no last round" in text
    _, shown = run("status", "--out", folder, "--json")
    assert [one["rounds"] for one in json.loads(shown)["queue"]] == [3, "forever"]
    out = take_next(folder, default_out=folder / "next")
    _, shown = run("status", "--out", folder, "--json")
    assert (json.loads(shown)["queue"], json.loads(shown)["followed_by"]) == ([], str(out))


def test_devices_of_another_version_are_named_with_what_makes_them_the_same(
    tmp_path: Path,
) -> None:
    devices = [
        DeviceRecord(name="old", is_connected=True, version="0.0.9"),
        DeviceRecord(name="older", version="0.0.8"),
        DeviceRecord(name="newer", version="999.1"),
        DeviceRecord(name="strange", version="0.1?"),
        DeviceRecord(name="same", version=__version__),
        DeviceRecord(name="unknown"),
    ]
    write(tmp_path, *devices, round=1, rounds=2)
    _, text = run("status", "--out", tmp_path)
    upgrade = f"install headwater {__version__} on the device: "
    assert f"headwater 0.0.9 on old, {__version__} here: {upgrade}" in text
    assert f"headwater 0.0.8 on older, {__version__} here: {upgrade}" in text
    assert f"headwater 999.1 on newer, {__version__} here: upgrade the server too" in text
    assert f"headwater 0.1? on strange, {__version__} here: {upgrade}" in text
    assert "on same" not in text
    assert "on unknown" not in text
