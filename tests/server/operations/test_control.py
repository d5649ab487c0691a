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
from headwater.server.operations import control, history, orders
from headwater.server.operations.control import FIRST_NOTICE_SECONDS, LongWaitNotice, RunControl
from headwater.server.operations.history_writer import MAX_QUEUED
from headwater.server.operations.orders import Order
from headwater.server.operations.round_log import RoundLog
from headwater.server.operations.run_lock import read_server_state
from headwater.server.rounds.observer import Drained
from headwater.server.rounds.open_round import OpenRound
from headwater.server.transport.device_records import DeviceRecords
from tests.processes import until
from tests.round_rows import row


class Desk:
    """An operation in a folder, and what it heard."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.device_records = DeviceRecords()
        self.heard: list[str | None] = []
        self.control = RunControl(
            folder,
            round_number=0,
            rounds=9,
            device_records=self.device_records,
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
    desk.control.start({"pid": 1, "address": "here"})
    yield desk
    desk.control.stop("done")


def opened_round(plans: dict[str, Plan]) -> OpenRound:
    total = CohortSum(ModelLayout(trainable=(), constant=(), num_bytes=0))
    owned = dict.fromkeys(plans, 2**53)
    return OpenRound(plans=plans, total=total, max_weight_per_example=1, owned=owned)


def test_pause_and_resume_reach_the_rounds_and_the_devices(desk: Desk) -> None:
    assert desk.control.may_begin()
    orders.write_order(desk.folder, "pause")
    desk.wait_for("pause")
    assert not desk.control.may_begin()
    assert desk.control.is_paused
    orders.write_order(desk.folder, "resume")
    desk.wait_for("pause", "resume")
    assert desk.control.may_begin()


def test_for_whom_a_round_has_waited_long_is_logged_and_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "FIRST_NOTICE_SECONDS", 0.01)
    desk = Desk(tmp_path)
    desk.device_records.set_awaited(["pi", "nas"])
    desk.device_records.note_answer("pi")
    desk.control.start({})
    try:
        until(lambda: "for nas: it ends" in caplog.text, seconds=30, what=lambda: caplog.text)
        desk.until_written(lambda found: found.state.get("awaited") == ["nas"])
    finally:
        desk.control.stop("done")


def test_a_drain_ends_the_rounds(desk: Desk) -> None:
    orders.write_order(desk.folder, "drain")
    desk.wait_for("drain")
    with pytest.raises(Drained):
        desk.control.may_begin()


def test_nonsense_in_place_of_an_order_is_said_once_and_changes_nothing(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    orders.write_order(desk.folder, "pause")
    desk.wait_for("pause")
    (desk.folder / orders.FILE).write_text("nonsense")
    until(lambda: "is not an order" in caplog.text, seconds=30, what=lambda: caplog.text)
    assert desk.control.is_paused
    orders.write_order(desk.folder, "drain")
    desk.wait_for("pause", "drain")
    assert caplog.text.count("is not an order") == 1


def test_a_server_begins_paused_where_the_last_one_was(tmp_path: Path) -> None:
    orders.write_order(tmp_path, "pause")
    desk = Desk(tmp_path)
    desk.control.start({})
    assert not desk.control.may_begin()
    assert desk.heard == ["pause"]
    desk.control.stop("stopped")
    assert orders.read_order(tmp_path) is not None


def test_a_drain_that_is_done_does_not_end_the_next_server(tmp_path: Path) -> None:
    orders.write_order(tmp_path, "drain")
    desk = Desk(tmp_path)
    desk.control.start({})
    assert desk.control.may_begin()
    desk.control.stop("done")
    assert orders.read_order(tmp_path) is None


def test_what_happens_in_the_rounds_is_written(desk: Desk) -> None:
    round_log = RoundLog()
    round_log.started(desk.folder, round_number=0)
    round_log.ended()
    plan = Plan(round=1, run_seed=0, model_version=0, quota=20, micro_batch_size=8)
    report = DeviceReport(name="pi", num_examples=9, layout_digest="x", vitals=Vitals(battery=0.5))
    desk.control.begun(1, {report.name: report})
    desk.until_written(lambda found: found.state.get("stands") == "in a round")
    opened = opened_round({"pi": plan, "late": plan})
    opened.ready["pi"] = ReadyReport(name="pi", round=1, seconds=2.0, peak_bytes=7)
    opened.refuse("late", NonFiniteUpdate("late: NaN"))
    desk.control.closed(opened)
    desk.control.aborted(TooFewClients("one of two"))
    desk.control.begun(1, {report.name: report})
    desk.control.closed(opened_round({}))
    desk.control.committed(row(1, "pi"))
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
    desk.control.start({"pid": 1})
    assert read_server_state(tmp_path).is_well
    desk.control.stop("drained")
    assert not read_server_state(tmp_path).is_up
    found = desk.reading()
    assert found.events[0]["kind"] == "ended"
    assert found.events[0]["detail"] == "drained"
    assert found.state["stands"] == "ended"


def test_an_operation_that_never_started_lets_the_folder_go(tmp_path: Path) -> None:
    Desk(tmp_path).control.stop("PortInUse")
    assert not read_server_state(tmp_path).is_up


def test_a_disk_that_fails_is_said_once_counted_and_made_up_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk(tmp_path)
    history.History(tmp_path).close()
    blocking = sqlite3.connect(tmp_path / history.FILE, isolation_level=None)
    blocking.execute("BEGIN EXCLUSIVE")  # to a writer it is as a disk that takes nothing
    with caplog.at_level(logging.WARNING):
        desk.control.start({})
        until(lambda: desk.control.num_failures >= 2, seconds=60, what=lambda: "failures")
        desk.control.committed(row(1, "pi"))
        assert desk.control.may_begin()
        blocking.execute("ROLLBACK")
        blocking.close()
        desk.until_written(lambda found: found.last_round is not None)
    desk.control.stop("done")
    assert caplog.text.count("is not written") == 1


def test_what_waits_for_a_disk_is_bounded_and_the_rest_counted(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    for number in range(MAX_QUEUED + 3):
        desk.control.aborted(TooFewClients(str(number)))
    assert desk.control.num_failures == 3
    desk.control.stop("done")


def test_a_long_wait_is_logged_after_five_minutes_then_after_twice_as_long_each_time() -> None:
    notice = LongWaitNotice()
    due = [second for second in range(3600) if notice.is_due(second)]
    assert due == [FIRST_NOTICE_SECONDS * factor for factor in (1, 2, 4, 8)]


def test_a_long_wait_that_was_not_checked_meanwhile_is_logged_once() -> None:
    notice = LongWaitNotice()
    assert [notice.is_due(seconds) for seconds in (10_000, 10_001)] == [True, False]


def test_the_next_wait_is_logged_again_after_five_minutes() -> None:
    notice = LongWaitNotice()
    assert notice.is_due(10_000)
    assert not notice.is_due(1)
    assert notice.is_due(FIRST_NOTICE_SECONDS)
