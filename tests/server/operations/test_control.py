"""Orders, heartbeat and history beside the rounds, and a disk that fails."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headwater.common.errors import NonFiniteUpdate, TooFewClients
from headwater.common.messages import DeviceReport, Plan, ReadyReport, Vitals
from headwater.common.model.parameters import ModelLayout
from headwater.server.aggregation.cohort_sum import CohortSum
from headwater.server.operations import history, orders, vigil
from headwater.server.operations import run_lock as presence
from headwater.server.operations.control import MOST_WAITING, RunControl
from headwater.server.operations.orders import Order
from headwater.server.rounds.observer import Drained
from headwater.server.rounds.open_round import OpenRound
from headwater.server.transport.device_records import DeviceRecords
from tests.processes import until
from tests.round_rows import row


class Desk:
    """An operation in a folder, and what it heard."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.attendance = DeviceRecords()
        self.heard: list[str | None] = []
        self.operation = RunControl(
            folder,
            round_number=0,
            rounds=9,
            attendance=self.attendance,
            on_order=self._hear,
            is_alive=lambda: True,
        )

    def _hear(self, order: Order | None) -> None:
        self.heard.append(None if order is None else order.verb)

    def wait_for(self, *heard: str) -> None:
        until(lambda: self.heard == list(heard), seconds=30, what=lambda: f"{self.heard}")

    def reading(self) -> history.HistorySnapshot:
        found = history.read(self.folder)
        assert found is not None
        return found

    def until_written(self, is_so: Callable[[history.HistorySnapshot], bool]) -> None:
        def is_there() -> bool:
            found = history.read(self.folder)
            return found is not None and is_so(found)

        until(is_there, seconds=30, what=lambda: "the history")


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    desk.operation.start({"pid": 1, "address": "here"})
    yield desk
    desk.operation.stop("done")


def opened_round(plans: dict[str, Plan]) -> OpenRound:
    total = CohortSum(ModelLayout(trainable=(), constant=(), num_bytes=0))
    owned = dict.fromkeys(plans, 2**53)
    return OpenRound(plans=plans, total=total, max_weight_per_example=1, owned=owned)


def test_pause_and_resume_reach_the_rounds_and_the_devices(desk: Desk) -> None:
    assert desk.operation.may_begin()
    orders.give(desk.folder, "pause")
    desk.wait_for("pause")
    assert not desk.operation.may_begin()
    assert desk.operation.is_paused
    orders.give(desk.folder, "resume")
    desk.wait_for("pause", "resume")
    assert desk.operation.may_begin()


def test_for_whom_a_round_has_waited_long_is_logged_and_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vigil, "FIRST_SECONDS", 0.01)
    desk = Desk(tmp_path)
    desk.attendance.awaits(["pi", "nas"])
    desk.attendance.answered("pi")
    desk.operation.start({})
    try:
        until(lambda: "for nas: it ends" in caplog.text, seconds=30, what=lambda: caplog.text)
        desk.until_written(lambda found: found.state.get("awaited") == ["nas"])
    finally:
        desk.operation.stop("done")


def test_a_drain_ends_the_rounds(desk: Desk) -> None:
    orders.give(desk.folder, "drain")
    desk.wait_for("drain")
    with pytest.raises(Drained):
        desk.operation.may_begin()


def test_nonsense_in_place_of_an_order_is_said_once_and_changes_nothing(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    orders.give(desk.folder, "pause")
    desk.wait_for("pause")
    (desk.folder / orders.FILE).write_text("nonsense")
    until(lambda: "is no order" in caplog.text, seconds=30, what=lambda: caplog.text)
    assert desk.operation.is_paused
    orders.give(desk.folder, "drain")
    desk.wait_for("pause", "drain")
    assert caplog.text.count("is no order") == 1


def test_a_server_begins_paused_where_the_last_one_was(tmp_path: Path) -> None:
    orders.give(tmp_path, "pause")
    desk = Desk(tmp_path)
    desk.operation.start({})
    assert not desk.operation.may_begin()
    assert desk.heard == ["pause"]
    desk.operation.stop("stopped")
    assert orders.standing(tmp_path) is not None


def test_a_drain_that_is_done_does_not_end_the_next_server(tmp_path: Path) -> None:
    orders.give(tmp_path, "drain")
    desk = Desk(tmp_path)
    desk.operation.start({})
    assert desk.operation.may_begin()
    desk.operation.stop("done")
    assert orders.standing(tmp_path) is None


def test_what_happens_in_the_rounds_is_written(desk: Desk) -> None:
    round_log = RoundLog()
    round_log.started(desk.folder, round_number=0)
    round_log.ended()
    plan = Plan(round=1, run_seed=0, model_version=0, quota=20, micro_batch_size=8)
    report = DeviceReport(name="pi", num_examples=9, layout_digest="x", vitals=Vitals(battery=0.5))
    desk.operation.begun(1, {report.name: report})
    desk.until_written(lambda found: found.state.get("stands") == "in a round")
    opened = opened_round({"pi": plan, "late": plan})
    opened.ready["pi"] = ReadyReport(name="pi", round=1, seconds=2.0, peak_bytes=7)
    opened.refuse("late", NonFiniteUpdate("late: NaN"))
    desk.operation.closed(opened)
    desk.operation.aborted(TooFewClients("one of two"))
    desk.operation.begun(1, {report.name: report})
    desk.operation.closed(opened_round({}))
    desk.operation.committed(row(1, "pi"))
    desk.until_written(lambda found: found.last_round is not None)
    desk.until_written(lambda found: found.state["stands"] == "waiting" and len(found.devices) == 2)
    found = desk.reading()
    late, device = found.devices
    assert (late.name, late.refusal_code) == ("late", "NonFiniteUpdate")
    assert (device.accumulation_steps, device.quota, device.peak_bytes) == (3, 20, 7)
    assert [event["kind"] for event in found.events] == ["aborted", "started"]
    assert (found.state["round"], found.state["rounds"]) == (1, 9)


def test_the_end_is_written_and_the_folder_let_go(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.operation.start({"pid": 1})
    assert presence.read_server_state(tmp_path).is_well
    desk.operation.stop("drained")
    assert not presence.read_server_state(tmp_path).is_up
    found = desk.reading()
    assert found.events[0]["kind"] == "ended"
    assert found.events[0]["detail"] == "drained"
    assert found.state["stands"] == "ended"


def test_an_operation_that_never_started_lets_the_folder_go(tmp_path: Path) -> None:
    Desk(tmp_path).operation.stop("PortInUse")
    assert not presence.read_server_state(tmp_path).is_up


def test_a_disk_that_fails_is_said_once_counted_and_made_up_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk(tmp_path)
    history.History(tmp_path).close()
    blocking = sqlite3.connect(tmp_path / history.FILE, isolation_level=None)
    blocking.execute("BEGIN EXCLUSIVE")  # to a writer it is as a disk that takes nothing
    with caplog.at_level(logging.WARNING):
        desk.operation.start({})
        until(lambda: desk.operation.num_failures >= 2, seconds=60, what=lambda: "failures")
        desk.operation.committed(row(1, "pi"))
        assert desk.operation.may_begin()
        blocking.execute("ROLLBACK")
        blocking.close()
        desk.until_written(lambda found: found.last_round is not None)
    desk.operation.stop("done")
    assert caplog.text.count("is not written") == 1


def test_what_waits_for_a_disk_is_bounded_and_the_rest_counted(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    for number in range(MOST_WAITING + 3):
        desk.operation.aborted(TooFewClients(str(number)))
    assert desk.operation.num_failures == 3
    desk.operation.stop("done")
