"""The run's control: orders, heartbeat, history, and a failing disk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from torch import nn

from headwater.common.errors import NonFiniteUpdate, SettingsError, TooFewClients
from headwater.common.messages import DeviceReport, Plan, ReadyReport, Step, UpdateReport, Vitals
from headwater.common.model.layout import ModelLayout
from headwater.common.settings.schema import Settings
from headwater.server.aggregation.cohort_sum import CohortSum
from headwater.server.operations import control, orders
from headwater.server.operations.control import FIRST_NOTICE_SECONDS, LongWaitNotice, RunControl
from headwater.server.operations.orders import Order
from headwater.server.operations.round_log import RoundLog
from headwater.server.operations.run_history import EVENTS, MAX_QUEUED, HistorySnapshot, read
from headwater.server.operations.run_lock import read_server_state
from headwater.server.rounds.observer import Drained
from headwater.server.rounds.open_round import OpenRound
from headwater.server.succession.commands import submit_run
from headwater.server.succession.run_queue import is_next_due
from headwater.server.transport.device_records import DeviceRecords
from tests.processes import until
from tests.round_rows import row


class ControlledRun:
    """A run control in a folder, and the orders that it passed on."""

    def __init__(self, folder: Path, *, follows_queue: bool = True, round_number: int = 0) -> None:
        self.folder = folder
        self.device_records = DeviceRecords()
        self.orders: list[str | None] = []
        self.control = RunControl(
            folder,
            round_number=round_number,
            rounds=9,
            device_records=self.device_records,
            on_order=self._note_order,
            is_alive=lambda: True,
            is_next_due=partial(is_next_due, folder) if follows_queue else None,
        )

    def _note_order(self, order: Order | None) -> None:
        self.orders.append(None if order is None else order.verb)

    def wait_for(self, *verbs: str) -> None:
        until(lambda: self.orders == list(verbs), what=lambda: f"{self.orders}")

    def until_written(self, is_so: Callable[[HistorySnapshot], bool]) -> None:
        until(lambda: is_so(read(self.folder)), what=lambda: "the history")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ControlledRun]:
    run = ControlledRun(tmp_path)
    run.control.start({"pid": 1, "address": "here"})
    yield run
    run.control.stop("done")


def opened_round(plans: dict[str, Plan]) -> OpenRound:
    total = CohortSum(ModelLayout(trainable=()))
    owned = dict.fromkeys(plans, 2**53)
    return OpenRound(plans=plans, total=total, owned=owned)


def test_pause_and_resume_reach_the_rounds_and_the_devices(run: ControlledRun) -> None:
    assert run.control.may_begin()
    orders.write_order(run.folder, "pause")
    run.wait_for("pause")
    assert not run.control.may_begin()
    assert run.control.is_paused
    orders.write_order(run.folder, "resume")
    run.wait_for("pause", "resume")
    assert run.control.may_begin()


def test_a_long_wait_is_logged_and_written_with_the_awaited_devices(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "FIRST_NOTICE_SECONDS", 0.01)
    run = ControlledRun(tmp_path)
    run.device_records.set_awaited(["pi", "nas"])
    run.device_records.note_answer("pi")
    run.control.start({})
    try:
        until(lambda: "for nas: it ends" in caplog.text, what=lambda: caplog.text)
        run.until_written(lambda found: found.state.get("awaited") == ["nas"])
    finally:
        run.control.stop("done")


def test_a_drain_ends_the_rounds(run: ControlledRun) -> None:
    orders.write_order(run.folder, "drain")
    run.wait_for("drain")
    with pytest.raises(Drained):
        run.control.may_begin()


def test_a_queue_that_nobody_follows_neither_ends_the_run_nor_grows(tmp_path: Path) -> None:
    queued = tmp_path / "queue" / "499999-next.toml"
    queued.parent.mkdir()
    queued.write_text('task = "x.py:X"\n')
    (tmp_path / "settings.toml").write_text('task = "x.py:X"\n')
    run = ControlledRun(tmp_path, follows_queue=False)
    run.control.start({"pid": 1, "address": "here"})
    try:
        orders.write_order(tmp_path, "pause")
        run.wait_for("pause")  # by then it has looked at the folder
        assert not run.control.may_begin()
        with pytest.raises(SettingsError, match="takes no runs from a queue"):
            submit_run(tmp_path / "settings.toml", tmp_path, is_next=False)
    finally:
        run.control.stop("done")


def test_a_malformed_order_is_logged_once_and_changes_nothing(
    run: ControlledRun, caplog: pytest.LogCaptureFixture
) -> None:
    orders.write_order(run.folder, "pause")
    run.wait_for("pause")
    (run.folder / orders.FILE).write_text("nonsense")
    until(lambda: "is not an order" in caplog.text, what=lambda: caplog.text)
    assert run.control.is_paused
    orders.write_order(run.folder, "drain")
    run.wait_for("pause", "drain")
    assert caplog.text.count("is not an order") == 1


def test_a_pause_outlasts_its_server(tmp_path: Path) -> None:
    orders.write_order(tmp_path, "pause")
    run = ControlledRun(tmp_path)
    run.control.start({})
    assert not run.control.may_begin()
    assert run.orders == ["pause"]
    run.control.stop("stopped")
    assert orders.read_order(tmp_path) is not None


def test_a_drain_ends_only_its_own_server(tmp_path: Path) -> None:
    orders.write_order(tmp_path, "drain")
    run = ControlledRun(tmp_path)
    run.control.start({})
    assert run.control.may_begin()
    run.control.stop("done")
    assert orders.read_order(tmp_path) is None


def test_events_of_the_rounds_are_written(run: ControlledRun) -> None:
    round_log = RoundLog()
    round_log.started(Settings(out=run.folder), round_number=0, model=nn.Module())
    round_log.ended()
    plan = Plan(round=1, run_seed=0, model_version=0, quota=20, micro_batch_size=8)
    report = DeviceReport(name="pi", num_examples=9, layout_digest="x", vitals=Vitals(battery=0.5))
    run.control.begun(1, {report.name: report})
    run.until_written(lambda found: found.state.get("stands") == "in a round")
    opened = opened_round({"pi": plan, "late": plan})
    opened.ready["pi"] = ReadyReport(name="pi", round=1, seconds=2.0)
    opened.refuse("late", NonFiniteUpdate("late: NaN"))
    run.control.closed(opened)
    run.control.aborted(TooFewClients("one of two"))
    run.control.begun(1, {report.name: report})
    run.control.closed(opened_round({}))
    run.control.on_round(row(1, "pi"))
    run.until_written(lambda found: found.state.get("last_round") is not None)
    run.until_written(
        lambda found: found.state.get("stands") == "waiting" and len(found.devices) == 2
    )
    found = read(run.folder)
    late, device = found.devices
    assert (late.name, late.refusal_code) == ("late", "NonFiniteUpdate")
    assert (device.accumulation_steps, device.quota, device.seconds) == (3, 20, 2.0)
    assert [event["kind"] for event in found.events] == ["aborted", "started"]
    assert (found.state["round"], found.state["rounds"]) == (1, 9)


@pytest.mark.parametrize(("peak", "shown"), [(0, None), (7, 7)])
def test_the_peak_memory_that_an_update_hides_is_unknown_and_not_zero(
    peak: int, shown: int | None, run: ControlledRun
) -> None:
    plan = Plan(round=1, run_seed=0, model_version=0, quota=20, micro_batch_size=20)
    step = Step(num_examples=20, weight=20, loss=0.0, seconds=1.0, peak_bytes=peak)
    opened = opened_round({"pi": plan})
    report = UpdateReport(
        name="pi",
        round=1,
        num_examples=20,
        weight=20,
        loss_sum=0.0,
        micro_batch_size=20,
        seconds=1.0,
        steps=(step,),
        reason="quota",
    )
    opened.accepted.add(report)
    run.control.closed(opened)
    assert run.device_records.get("pi").peak_bytes == shown


def test_the_end_is_written_and_the_folder_unlocked(tmp_path: Path) -> None:
    run = ControlledRun(tmp_path)
    run.control.start({"pid": 1})
    assert read_server_state(tmp_path).is_well
    run.control.stop("drained")
    assert not read_server_state(tmp_path).is_up
    found = read(run.folder)
    assert found.events[0]["kind"] == "ended"
    assert found.events[0]["detail"] == "drained"
    assert found.state.get("stands") == "ended"


def test_a_control_that_never_started_unlocks_the_folder(tmp_path: Path) -> None:
    ControlledRun(tmp_path).control.stop("PortInUse")
    assert not read_server_state(tmp_path).is_up


@pytest.mark.slow
def test_a_failing_disk_is_logged_once_counted_and_retried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = ControlledRun(tmp_path)
    (tmp_path / EVENTS).mkdir()  # acts like a failing disk on the writer
    with caplog.at_level(logging.WARNING):
        run.control.start({})
        until(lambda: run.control.num_failures >= 2, what=lambda: "failures")
        run.control.on_round(row(1, "pi"))
        assert run.control.may_begin()
        (tmp_path / EVENTS).rmdir()
        run.until_written(lambda found: found.state.get("last_round") is not None)
    assert [event["kind"] for event in read(run.folder).events] == ["started"]
    run.control.stop("done")
    assert caplog.text.count("is not written") == 1


def test_a_resumed_run_shows_the_last_round_up_to_its_checkpoint(tmp_path: Path) -> None:
    round_log = RoundLog(draws_curves=False)
    round_log.started(Settings(out=tmp_path), round_number=0, model=nn.Module())
    for number in (1, 2, 3):
        round_log.stepped(row(number, "pi"))
    round_log.ended()
    run = ControlledRun(tmp_path, round_number=2)
    run.control.start({})
    run.control.stop("done")
    assert read(run.folder).state["last_round"]["round"] == 2


def test_entries_waiting_for_a_disk_are_bounded_and_lost_ones_counted(tmp_path: Path) -> None:
    run = ControlledRun(tmp_path)
    for number in range(MAX_QUEUED + 3):
        run.control.aborted(TooFewClients(str(number)))
    assert run.control.num_failures == 3
    run.control.stop("done")


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
