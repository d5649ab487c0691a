"""The summary of a period is the sum of its rounds, and of nothing else that the folder has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

from headwater.common.errors import SettingsError, StateError
from headwater.common.settings.schema import Settings
from headwater.server.cli import app
from headwater.server.operations import round_log, run_history
from headwater.server.report.period_summary import as_json, as_table, summary
from headwater.server.rounds.round_row import RoundRow
from headwater.server.transport.device_records import DeviceRecord, DeviceRecords
from tests.round_rows import masked, row

DAY = 86_400.0
WEEK = 7 * DAY
NOW = 1_800_000_000.0


class Recorded:
    """A run's folder, whose rounds were committed some days ago."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._monkeypatch = monkeypatch
        self.rows = round_log.RoundLog(draws_curves=False)
        self.rows.started(Settings(out=folder), round_number=0, model=nn.Module())

    def add(self, days_ago: float, one: RoundRow) -> None:
        clock = SimpleNamespace(time=lambda: NOW - days_ago * DAY)
        self._monkeypatch.setattr(round_log, "time", clock)
        self.rows.stepped(one)

    def event(self, days_ago: float, kind: str, detail: str) -> None:
        event = {"at": NOW - days_ago * DAY, "kind": kind, "detail": detail}
        with (self.folder / run_history.EVENTS).open("a") as file:
            file.write(json.dumps(event) + "\n")

    def devices(self, *records: DeviceRecord) -> None:
        known = DeviceRecords()
        known.restore(records)
        run_history.HistoryWriter(self.folder, known).write({"round": 1}, is_last=True)

    def summary(self) -> dict[str, Any]:
        return summary(self.folder, seconds=WEEK, now=NOW)


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    found = Recorded(tmp_path, monkeypatch)
    yield found
    found.rows.ended()


def text_of(found: dict[str, Any], folder: Path) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(as_table(found, folder))
    return captured.get()


def test_a_round_counts_in_the_period_in_which_it_was_committed(recorded: Recorded) -> None:
    for number, days_ago in enumerate((20, 13.9, 8, 6.9, 1), start=1):
        recorded.add(days_ago, row(number, "pi", "laptop"))
    found = recorded.summary()
    assert (found["latest"]["num_rounds"], found["before"]["num_rounds"]) == (2, 2)
    assert found["latest"]["num_examples"] == 2 * 2 * 6
    assert found["latest"]["bytes_up"] == 2 * 10


def test_the_loss_is_a_mean_and_a_metric_is_the_last_one(recorded: Recorded) -> None:
    recorded.add(9, row(1, "pi", loss=2.0))
    recorded.add(3, row(2, "pi", loss=1.0, metrics={"test_accuracy": 0.6}))
    recorded.add(2, row(3, "pi", loss=0.5, metrics={"test_accuracy": 0.7}))
    recorded.add(1, row(4, "pi", loss=float("nan"), metrics={}))
    latest = recorded.summary()["latest"]
    assert latest["loss"] == 0.75
    assert latest["metrics"] == {"test_accuracy": 0.7}


def test_each_device_has_its_rounds_and_refusals_and_one_without_rounds_is_lost(
    recorded: Recorded,
) -> None:
    recorded.add(8, row(1, "pi", "gone"))
    late = {"pi": "LateUpdate: pi: late", "nas (again)": "LateUpdate: nas: late"}
    recorded.add(2, row(2, "laptop", refused=late))
    recorded.add(1, row(3, "pi", clients=[], masked_clients=[masked("pi")]))
    found = recorded.summary()
    rounds = {
        one["name"]: (one["num_rounds"], one["num_rounds_before"]) for one in found["devices"]
    }
    assert rounds == {"gone": (0, 1), "laptop": (1, 0), "nas": (0, 0), "pi": (1, 1)}
    refusals = {one["name"]: one["refusals"] for one in found["devices"] if one["refusals"]}
    assert refusals == {"nas": {"LateUpdate": 1}, "pi": {"LateUpdate": 1}}
    assert found["lost"] == ["gone"]


def test_a_refused_connection_counts_if_it_was_in_the_period(recorded: Recorded) -> None:
    recorded.add(1, row(1, "pi"))
    revoked: dict[str, Any] = {"refusal_code": "CertificateRevoked", "refusal_text": ""}
    recorded.devices(
        DeviceRecord(name="pi", **revoked, refused_at=NOW - 8 * DAY),
        DeviceRecord(name="nas", **revoked, refused_at=NOW - DAY, last_seen=NOW - DAY),
    )
    found = {one["name"]: one for one in recorded.summary()["devices"]}
    assert found["pi"]["refusals"] == {}
    assert found["nas"]["refusals"] == {"CertificateRevoked": 1}
    assert not found["nas"]["is_connected"]


def test_alerts_of_the_period_are_told_and_other_events_counted(recorded: Recorded) -> None:
    recorded.add(1, row(1, "pi"))
    recorded.event(8, "alert", "an earlier one")
    recorded.event(3, "alert", "the loss rises")
    recorded.event(2, "started", "here")
    recorded.event(1, "started", "here")
    found = recorded.summary()
    assert [one["text"] for one in found["alerts"]] == ["the loss rises"]
    assert found["events"] == {"started": 2}


def test_the_budget_of_a_private_run_is_that_at_the_end_of_each_period(recorded: Recorded) -> None:
    for number, (days_ago, epsilon) in enumerate(((9, 0.5), (8, 0.7), (1, 0.9)), start=1):
        recorded.add(days_ago, row(number, "pi", epsilon=epsilon, loss=float("nan")))
    found = recorded.summary()
    assert (found["latest"]["epsilon"], found["before"]["epsilon"]) == (0.9, 0.7)
    assert found["latest"]["loss"] is None


def test_rounds_of_an_earlier_version_are_named_and_not_counted(recorded: Recorded) -> None:
    recorded.add(1, row(1, "pi"))
    file = recorded.folder / round_log.ROUNDS
    line = json.loads(file.read_text())
    del line["ended_at"]
    file.write_text(json.dumps(line) + "\n" + file.read_text())
    found = recorded.summary()
    assert (found["num_untimed"], found["latest"]["num_rounds"]) == (1, 1)


@pytest.mark.parametrize(
    ("first", "days_ago", "is_cut"), [(1, 1, False), (5, 1, True), (5, 15, False)]
)
def test_a_log_that_begins_within_the_periods_is_said_to_be_cut(
    recorded: Recorded, first: int, days_ago: float, is_cut: bool
) -> None:
    recorded.add(days_ago, row(first, "pi"))
    assert recorded.summary()["is_cut"] is is_cut


def test_text_and_json_show_a_summary(recorded: Recorded) -> None:
    recorded.add(8, row(1, "pi", "gone"))
    recorded.add(1, row(2, "pi", refused={"gone": "LateUpdate: gone: late"}))
    recorded.event(1, "alert", "gone is away for 1 d")
    found = recorded.summary()
    shown = text_of(found, recorded.folder)
    for part in ("last 7 d", "test_accuracy", "LateUpdate 1", "gone is away", "1 alert"):
        assert part in shown
    assert json.loads(as_json(found))["lost"] == ["gone"]


def test_the_command_reads_a_folder_and_refuses_another(recorded: Recorded, tmp_path: Path) -> None:
    recorded.add(1, row(1, "pi"))
    given = ["report", "--out", str(tmp_path), "--json"]
    long = CliRunner().invoke(app, [*given, "--since", "3650d"])
    assert long.exit_code == 0, long.output
    assert CliRunner().invoke(app, [*given, "--since", "a week"]).exit_code != 0
    with pytest.raises(SettingsError):
        summary(tmp_path / "nowhere", seconds=WEEK, now=NOW)


@pytest.mark.parametrize(
    "changed",
    [
        {"refused": ["a"]},
        {"refused": {"a": 5}},
        {"metrics": None},
        {"metrics": {"a": "x"}},
        {"loss": "x"},
        {"num_examples": "x"},
        {"epsilon": "x"},
    ],
    ids=str,
)
def test_a_line_that_no_run_has_written_is_named(
    recorded: Recorded, changed: dict[str, Any]
) -> None:
    recorded.add(1, row(1, "pi"))
    recorded.rows.ended()
    file = recorded.folder / "rounds.jsonl"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed) + "\n")
    with pytest.raises(StateError, match=r"rounds\.jsonl has a line, about number 1, that"):
        recorded.summary()
