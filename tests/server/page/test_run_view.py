"""A run as its page shows it: devices' states through a round, and rounds in the order of time."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.common.errors import ConnectionLost, TooFewClients
from headwater.common.messages import DeviceReport, Plan
from headwater.common.model.layout import ModelLayout
from headwater.common.settings.schema import Settings
from headwater.server.aggregation.cohort_sum import CohortSum
from headwater.server.page import run_view
from headwater.server.page.run_view import MAX_KEPT_PARTS, RunView
from headwater.server.report import replay
from headwater.server.report.round_points import MAX_NAME_CHARACTERS
from headwater.server.rounds.open_round import OpenRound
from headwater.server.transport.device_records import DeviceRecords
from tests.round_rows import row
from tests.server.report.test_replay import write

PLAN = Plan(round=1, run_seed=0, model_version=0, quota=20, micro_batch_size=4)


def reports(*names: str) -> dict[str, DeviceReport]:
    return {name: DeviceReport(name=name, num_examples=50, layout_digest="x") for name in names}


def opened(*names: str) -> OpenRound:
    plans = dict.fromkeys(names, PLAN)
    owned = dict.fromkeys(names, 50)
    total = CohortSum(ModelLayout(trainable=()))
    return OpenRound(plans=plans, total=total, owned=owned)


@pytest.fixture
def view() -> RunView:
    return RunView(Settings())


def states(view: RunView) -> dict[str, str]:
    return {name: tile["state"] for name, tile in view.tiles().items()}


def test_a_device_is_idle_computing_dropped_and_done(view: RunView) -> None:
    view.begun(1, reports("a", "b", "c"))
    assert states(view) == {"a": "idle", "b": "idle", "c": "idle"}
    first = opened("a", "b")
    view.asked(first)
    assert states(view) == {"a": "computing", "b": "computing", "c": "idle"}
    assert view.tiles()["a"]["k"] == 5
    assert view.tiles()["a"]["done"] == 0
    first.refuse("b", ConnectionLost("b is gone"))
    assert states(view)["b"] == "dropped"
    assert view.tiles()["b"]["why"] == "ConnectionLost: b is gone"
    view.closed(first)
    view.on_round(row(1, "a", left_out={"c": "too slow"}))
    assert view.tiles()["a"]["done"] == 2, "of K 2 in the row"
    assert states(view)["c"] == "left out"


def test_a_transport_shows_a_plan_on_its_way_and_an_update_that_arrives() -> None:
    stages: dict[str, str] = {}
    view = RunView(Settings(), stages=stages.copy)
    view.begun(1, reports("a", "b", "idle"))
    first = opened("a", "b")
    view.asked(first)
    assert states(view) == {"a": "planned", "b": "planned", "idle": "idle"}
    stages |= {"a": "uploading", "b": "computing", "idle": "computing", "stranger": "planned"}
    assert states(view) == {"a": "uploading", "b": "computing", "idle": "idle"}
    first.refuse("a", ConnectionLost("a is gone"))
    assert states(view)["a"] == "dropped", "whatever its last stage was"
    view.on_round(row(1, "b"))
    view.asked(opened("a", "b"))
    stages.clear()
    assert states(view) == {"a": "planned", "b": "planned", "idle": "idle"}


def test_the_next_round_begins_with_empty_bars(view: RunView) -> None:
    view.begun(1, reports("a", "b"))
    view.asked(opened("a", "b"))
    view.on_round(row(1, "a", "b"))
    view.tiles()
    view.asked(opened("a"))
    assert states(view) == {"a": "computing", "b": "idle"}
    assert view.tiles()["a"]["done"] == 0


def test_progress_that_a_device_tells_fills_its_bar() -> None:
    records = DeviceRecords()
    view = RunView(Settings(), records=records)
    view.begun(1, reports("a"))
    records.note_connected("a")
    records.set_awaited(["a"])
    view.asked(opened("a"))
    view.tiles()
    records.note_steps("a", 3)
    assert view.tiles()["a"]["done"] == 3
    records.note_steps("a", 10**9)
    assert view.tiles()["a"]["done"] == 5, "no more than K"


def test_a_device_that_was_disconnected_is_gone_and_comes_back() -> None:
    records = DeviceRecords()
    view = RunView(Settings(), records=records)
    view.begun(1, reports("a"))
    record = records.note_connected("a")
    records.note_disconnected(record)
    assert states(view) == {"a": "gone"}
    records.note_connected("a")
    assert states(view) == {"a": "idle"}


def test_a_device_has_the_history_of_its_rounds(view: RunView) -> None:
    view.begun(1, reports("a", "b"))
    for number in (1, 2, 3):
        view.on_round(row(number, *("ab" if number == 2 else "a")))
    view.tiles()
    assert [point["round"] for point in view.device("a")] == [1, 2, 3]
    assert [point["round"] for point in view.device("b")] == [2]
    assert view.device("nobody") == []


def test_rounds_that_nobody_looks_at_stay_bounded(view: RunView) -> None:
    names = [f"d{n}" for n in range(1000)]
    each = row(1, *names)
    for _ in range(3 * MAX_KEPT_PARTS // 1000):
        view.on_round(each)
    view.tiles()
    assert len(view.device("d0")) == MAX_KEPT_PARTS // 1000
    assert view.history.num_added == 3 * MAX_KEPT_PARTS // 1000, "and no round's figures are lost"


def test_the_status_says_what_happens_and_why_a_round_was_aborted(view: RunView) -> None:
    assert view.status()["phase"] == "waiting for devices"
    view.begun(1, reports("a", "b"))
    first = opened("a", "b")
    view.asked(first)
    first.refuse("b", ConnectionLost("gone"))
    now = view.status()
    assert (now["phase"], now["answered"], now["invited"]) == ("devices compute", 1, 2)
    view.aborted(TooFewClients("1 of 2"))
    assert "TooFewClients: 1 of 2" in view.status()["note"]
    view.on_round(row(1, "a"))
    view.ended()
    assert view.status()["has_ended"]
    assert view.status()["note"] == ""


def test_a_paused_run_says_so_and_does_not_wait_for_devices(view: RunView) -> None:
    view.paused(True)
    assert view.status()["phase"] == "paused"
    view.paused(False)
    assert view.status()["phase"] == "waiting for devices"


def test_a_hostile_name_is_shortened_and_printable(view: RunView) -> None:
    name = "<img src=x onerror=alert(1)>\x1b]0;" + "x" * 500
    view.on_round(row(1, name))
    (tile,) = view.tiles().values()
    assert "\x1b" not in tile["name"]
    assert len(tile["name"]) <= MAX_NAME_CHARACTERS


def test_the_longest_name_that_a_device_may_have_is_shown_whole(view: RunView) -> None:
    view.on_round(row(1, *(name := ["n" * 127 + end for end in "ab"])))
    assert {tile["name"] for tile in view.tiles().values()} == set(name)


def test_a_masked_round_shows_what_the_server_saw(view: RunView) -> None:
    assert view.status()["ring"] is None
    view.on_round(row(1, "a", ring_masked=(5, 5), ring_opened=(10, 0)))
    assert view.status()["ring"] == {"round": 1, "masked": [5, 5], "opened": [10, 0]}
    view.on_round(row(2, "a"))
    assert view.status()["ring"] is None


def test_devices_beyond_those_shown_take_no_memory(
    view: RunView, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_view, "MAX_TILES", 1)
    monkeypatch.setattr(replay, "MAX_TILES", 1)
    view.on_round(row(1, "a", "b"))
    view.tiles()
    finished = replay.FinishedRun(write(tmp_path / "run", row(1, "a", "b")))
    for shown in (view, finished):
        assert [len(shown.device(name)) for name in ("a", "b")] == [1, 0]
