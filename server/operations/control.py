"""Controls a run in a background thread: follows orders, renews the heartbeat, writes history.

The thread wakes four times a second. The rounds report to it as to an ``Observer`` and ask only
whether the next round may begin; they never wait for it. The thread also warns the operator when a
round waits long for a device, because a connected device that never answers looks like a slow one.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headwater.common.errors import RoundAborted, StateError
from headwater.common.messages import DeviceReport
from headwater.common.settings.changes import Changes, changes_text, of_training
from headwater.common.system.json_logs import FIELDS
from headwater.common.wording import duration_text, names_text
from headwater.server.operations import orders
from headwater.server.operations.orders import Order, read_order, run_state
from headwater.server.operations.round_log import rows_in
from headwater.server.operations.run_history import HistoryWriter, round_figures
from headwater.server.operations.run_lock import FOLLOWS_QUEUE, RunLock
from headwater.server.rounds.observer import Drained, Observer
from headwater.server.rounds.open_round import OpenRound
from headwater.server.rounds.round_row import RoundRow
from headwater.server.transport.device_records import DeviceRecords

log = logging.getLogger(__name__)

CHECK_SECONDS = 0.25
WRITE_SECONDS = 1.0
FIRST_NOTICE_SECONDS = 300.0
# Advice to the operator when a round waits long for a device.
LONG_WAIT_ADVICE = (
    "it ends at its deadline, and without --deadline when they have answered or are gone; "
    "headwater-server revoke NAME ends a device's stream"
)
# Awaited devices that are named in the history.
MAX_AWAITED_NAMES = 100


class LongWaitNotice:
    """Schedules warnings of a wait: after ``FIRST_NOTICE_SECONDS``, then doubled each time."""

    def __init__(self) -> None:
        self._num_doublings = -1

    def is_due(self, waited_seconds: float) -> bool:
        """Return True once per interval; a shorter wait than before is a new one.

        | waited | last call | due |
        | --- | --- | --- |
        | 299 s | | no |
        | 300 s, 599 s | 299 s, 300 s | yes, no |
        | 600 s | 599 s | yes |
        | 1 s, 300 s | 600 s, 1 s | no, yes |
        """
        before, factor = self._num_doublings, waited_seconds / FIRST_NOTICE_SECONDS
        self._num_doublings = -1 if factor < 1 else int(math.log2(factor))
        return self._num_doublings > before


class RunControl(Observer):
    """The background thread and the run's state."""

    def __init__(
        self,
        folder: Path,
        *,
        round_number: int,
        rounds: int | str,
        device_records: DeviceRecords,
        on_order: Callable[[Order | None], None],
        is_alive: Callable[[], bool],
        long_wait_advice: str = LONG_WAIT_ADVICE,
        is_next_due: Callable[[], bool] | None = None,
    ) -> None:
        """Lock the run's folder; ``round_number`` is the last committed round, of ``rounds``.

        ``on_order`` is called with each new order; ``is_alive`` returns whether the devices' event
        loop responds; ``long_wait_advice`` ends the warning about a round that waits long.
        ``is_next_due`` returns whether another run is to begin after the round in progress; None:
        the server serves no other run after this one.

        Raises:
            SettingsError: another server has locked the folder.
            StateError: the folder cannot be written.
        """
        self.round = round_number
        self._folder = folder
        self._rounds = rounds
        self._device_records = device_records
        self._on_order = on_order
        self._is_alive = is_alive
        self._long_wait_advice = long_wait_advice
        self._look_for_next = is_next_due
        self._is_in_round = False
        self._order: Order | None = None
        self._order_error = ""
        self._is_next_due = False
        self._last_round: dict[str, Any] | None = None
        self._long_wait = LongWaitNotice()
        self._history = HistoryWriter(folder, device_records)
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._lock = RunLock(folder)

    @property
    def num_failures(self) -> int:
        """Writes of the history that failed."""
        return self._history.num_failures

    @property
    def is_paused(self) -> bool:
        """Whether no round begins until ``unpause``."""
        return self._order is not None and self._order.verb == "pause"

    @property
    def is_draining(self) -> bool:
        """Whether the server is to end after the round in progress."""
        return self._order is not None and self._order.verb == "drain"

    # Called from the server's main thread.

    def start(self, info: dict[str, Any]) -> None:
        """Start the thread; ``info`` is what other processes may read: process id, address."""
        info = {**info, FOLLOWS_QUEUE: self._look_for_next is not None}
        self._history.attempt(lambda: self._lock.write_info(info))
        order = orders.order_at_start(self._read_order())
        if order is None:
            self._history.attempt(lambda: (self._folder / orders.FILE).unlink(missing_ok=True))
        self._follow(order)
        self._history.attempt(self._read_last_round)
        self._history.add_event("started", info.get("address", ""))
        self._thread.start()

    def _read_last_round(self) -> None:
        rows = (row for row in rows_in(self._folder) if row["round"] <= self.round)
        for row in deque(rows, maxlen=1):
            self._last_round = round_figures(row, ended_at=row.get("ended_at"))

    def stop(self, reason: str) -> None:
        """Write the remaining history and unlock the folder."""
        self._history.add_event("ended", reason)
        self._has_ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._lock.release()

    def note(self, kind: str, detail: str) -> None:
        """Write an event into the history."""
        self._history.add_event(kind, detail)

    # Called from the rounds' thread.

    def may_begin(self) -> bool:
        """Return whether the next round may begin.

        Raises:
            Drained: the run ends here, by an order or because the next run is due.
        """
        if self.is_draining or self._is_next_due:
            raise Drained
        return not self.is_paused

    def resumed(self, round_number: int, changed: Changes) -> None:
        if of_training(changed):
            self._history.add_event("changed", changes_text(of_training(changed)))

    def begun(self, round_number: int, reports: Mapping[str, DeviceReport]) -> None:
        self._is_in_round = True
        for report in reports.values():
            record = self._device_records.get(report.name)
            record.note_vitals(report.vitals)
            record.task, record.labels = report.task, report.labels
        self.round = round_number - 1

    def closed(self, opened: OpenRound) -> None:
        for name, plan in opened.plans.items():
            record = self._device_records.get(name)
            record.note_plan(plan)
            if (report := opened.accepted.get(name)) is not None:
                record.note_vitals(report.vitals)
                record.seconds = report.seconds
                record.peak_bytes = report.peak_bytes or None  # private updates report 0
            if (ready := opened.ready.get(name)) is not None:
                record.note_vitals(ready.vitals)
                record.seconds = ready.seconds
        for name, error in opened.refused.items():
            self._device_records.note_refusal(name.removesuffix(" (again)"), error)

    def aborted(self, error: RoundAborted) -> None:
        self._is_in_round = False
        self._history.add_event("aborted", f"{error.code}: {error}")

    def on_round(self, row: RoundRow) -> None:
        self._is_in_round, self.round = False, row.round
        self._last_round = round_figures(row, ended_at=time.time())
        fields = {
            "round": row.round,
            "loss": row.loss if row.epsilon is None else None,
            "num_clients": row.num_clients,
            "weight": row.weight,
            "seconds": row.seconds,
            "metrics": row.metrics,
        }
        log.info("round %d: %s", row.round, row.loss_text(".4f"), extra={FIELDS: fields})

    # Run in the background thread.

    def _run(self) -> None:
        due = 0.0
        while not self._has_ended.wait(CHECK_SECONDS):
            try:
                self._follow(self._read_order())
                self._look_at_queue()
                self._warn_of_long_wait()
                if time.monotonic() >= due:
                    due = time.monotonic() + WRITE_SECONDS
                    if self._is_alive():
                        self._history.attempt(self._lock.beat)
                    self._history.write(self._state())
            except Exception:
                log.exception("the run's control thread failed; it continues")
        self._history.write({**self._state(), "stands": "ended"}, is_last=True)

    def _warn_of_long_wait(self) -> None:
        awaited, seconds = self._device_records.awaited()
        if self._long_wait.is_due(seconds):
            log.warning(
                "round %d has waited %s for %s: %s",
                self.round + 1,
                duration_text(seconds),
                names_text(awaited, len(awaited)),
                self._long_wait_advice,
            )

    def _look_at_queue(self) -> None:
        """Take note that the next run is to begin after the current round."""
        if self._is_next_due or self._look_for_next is None or not self._look_for_next():
            return
        self._is_next_due = True
        when = f"after round {self.round + 1}" if self._is_in_round else "now"
        log.warning("this run ends %s: the next run of the queue follows", when)
        self._history.add_event("next", when)

    def _read_order(self) -> Order | None:
        """Return the current order; a malformed one is logged once and changes nothing."""
        try:
            order = read_order(self._folder)
        except StateError as error:
            if str(error) != self._order_error:
                self._order_error = str(error)
                log.warning("%s: %s", error.code, error)
            return self._order
        self._order_error = ""
        return order

    def _follow(self, order: Order | None) -> None:
        """Take an order that differs from the last: log it, record it and pass it on."""
        if order == self._order:
            return
        before, self._order = self._order, order
        verb = "resume" if order is None else order.verb
        if verb == "resume" and (before is None or before.verb == "resume"):
            return
        when = f"after round {self.round + 1}" if self._is_in_round else "now"
        log.warning(
            {
                "pause": "paused %s: no round begins until headwater-server unpause --out %s",
                "drain": "draining %s: the server ends; continue later with --resume --out %s",
                "resume": "resumed %s: rounds begin again in %s",
            }[verb],
            when if verb != "resume" else "now",
            self._folder,
        )
        self._history.add_event(verb, when)
        self._on_order(order)

    def _state(self) -> dict[str, Any]:
        awaited, awaited_seconds = self._device_records.awaited()
        return {
            "awaited": awaited[:MAX_AWAITED_NAMES],
            "num_awaited": len(awaited),
            "awaited_seconds": awaited_seconds,
            "stands": run_state(self._order, is_in_round=self._is_in_round),
            "round": self.round,
            "rounds": self._rounds,
            "last_round": self._last_round,
        }
