"""What goes on beside the rounds: orders are looked for, the heartbeat and the history are written.

One thread does all of it, a few times a second. The rounds tell it what happens (``Observer``) and
ask it one thing, whether the next may begin; they never wait for it. A disk that fails is logged
once, counted, and tried again; the run goes on without its history.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from headwater.common.errors import RoundAborted, StateError
from headwater.common.messages import DeviceReport
from headwater.common.system.json_logs import FIELDS
from headwater.server.operations import orders
from headwater.server.operations.history import History, figures_of
from headwater.server.operations.orders import Order
from headwater.server.operations.round_log import read_rows, row_to_dict
from headwater.server.operations.run_lock import RunLock
from headwater.server.operations.vigil import LongWaitNotice, duration_text, names_text
from headwater.server.rounds.observer import Drained, Observer
from headwater.server.rounds.open_round import OpenRound
from headwater.server.rounds.round_row import RoundRow
from headwater.server.transport.device_records import DeviceRecords

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.25
WRITE_SECONDS = 1.0
# Of a large fleet the devices are written less often.
DEVICES_PER_SECOND = 1000
# What ends a round's long wait for a device.
REVOKE = (
    "it ends at its deadline, and without --deadline when they have answered or are gone; "
    "headwater-server revoke NAME ends a device's stream"
)
# Rounds and events that wait for a disk that fails; what is lost is filled in at the next start.
MOST_WAITING = 1000
# Of those whom a round waits for.
MOST_TOLD = 100

RunState = Literal["waiting", "in a round", "pausing", "paused", "draining", "ended"]


def run_state(order: Order | None, *, is_in_round: bool) -> RunState:
    """Say in a word how a run stands; a round in progress ends before an order is done.

    | order | in a round | between rounds |
    | --- | --- | --- |
    | none, resume | in a round | waiting |
    | pause | pausing | paused |
    | drain | draining | draining |
    """
    match None if order is None else order.verb:
        case "pause":
            return "pausing" if is_in_round else "paused"
        case "drain":
            return "draining"
    return "in a round" if is_in_round else "waiting"


class RunControl(Observer):
    """The thread, and what it knows; an ``Observer`` of the rounds."""

    def __init__(
        self,
        folder: Path,
        *,
        round_number: int,
        rounds: int,
        attendance: DeviceRecords,
        on_order: Callable[[Order | None], None],
        is_alive: Callable[[], bool],
        wait_ends: str = REVOKE,
    ) -> None:
        """Take the run's folder, the round committed last and the last of all.

        ``on_order`` hears of each change; ``is_alive`` says whether the devices are served;
        ``wait_ends`` says to who waits long what ends a round's wait for a device.

        Raises:
            SettingsError: another server has the folder.
            StateError: it cannot be written.
        """
        self.num_failures = 0
        self.round = round_number
        self._folder = folder
        self._rounds = rounds
        self._attendance = attendance
        self._on_order = on_order
        self._is_alive = is_alive
        self._wait_ends = wait_ends
        self._is_in_round = False
        self._order: Order | None = None
        self._bad_order = ""
        self._is_failing = False
        self._history: History | None = None
        self._has_begun = False
        self._devices_due = 0.0
        self._vigil = LongWaitNotice()
        self._waiting: deque[Callable[[History], None]] = deque()
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="operation", daemon=True)
        self._presence = RunLock(folder)

    @property
    def is_paused(self) -> bool:
        """Whether no round begins until ``resume``."""
        return self._order is not None and self._order.verb == "pause"

    @property
    def is_draining(self) -> bool:
        """Whether the server is to end behind the round in progress."""
        return self._order is not None and self._order.verb == "drain"

    # What the server's own thread calls.

    def start(self, about: dict[str, Any]) -> None:
        """Begin; ``about`` tells others of this server: its process, its address."""
        self._try(lambda: self._presence.tell(about))
        self._take(self._read_order(), is_start=True)
        self._note(lambda history: history.event("started", about.get("address", "")))
        self._thread.start()

    def stop(self, how: str) -> None:
        """Write the rest, and let the folder go."""
        self._note(lambda history: history.event("ended", how))
        self._has_ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._presence.release()

    # What the rounds call, from theirs.

    def may_begin(self) -> bool:
        """Whether the next round may begin.

        Raises:
            Drained: none will.
        """
        if self.is_draining:
            raise Drained
        return not self.is_paused

    def begun(self, round_number: int, reports: Mapping[str, DeviceReport]) -> None:
        self._is_in_round = True
        for report in reports.values():
            self._attendance.of(report.name).sensed(report.vitals)
        if not self._has_begun:
            self._has_begun = True
            known = [figures_of(row) for row in read_rows(self._folder)]
            self._note(lambda history: history.begin(round_number, known))
        self.round = round_number - 1

    def closed(self, opened: OpenRound) -> None:
        for name, plan in opened.plans.items():
            device = self._attendance.of(name)
            device.planned(plan)
            if (report := opened.accepted.get(name)) is not None:
                device.sensed(report.vitals)
                device.seconds = report.seconds
                device.peak_bytes = max((step.peak_bytes for step in report.steps), default=0)
            if (ready := opened.ready.get(name)) is not None:
                device.sensed(ready.vitals)
                device.seconds, device.peak_bytes = ready.seconds, ready.peak_bytes
        for name, error in opened.refused.items():
            self._attendance.refuse(name.removesuffix(" (again)"), error)

    def aborted(self, error: RoundAborted) -> None:
        self._is_in_round = False
        self._note(lambda history: history.event("aborted", f"{error.code}: {error}"))

    def committed(self, row: RoundRow) -> None:
        self._is_in_round, self.round = False, row.round
        figures = figures_of(row_to_dict(row), ended_at=time.time())
        self._note(lambda history: history.round(figures))
        fields = {
            "round": row.round,
            "loss": row.loss,
            "num_clients": row.num_clients,
            "weight": row.weight,
            "seconds": row.seconds,
            "metrics": row.metrics,
        }
        log.info("round %d: loss %.4f", row.round, row.loss, extra={FIELDS: fields})

    # The thread's own.

    def _note(self, write: Callable[[History], None]) -> None:
        if len(self._waiting) < MOST_WAITING:
            self._waiting.append(write)
        else:
            self.num_failures += 1

    def _run(self) -> None:
        due = 0.0
        while not self._has_ended.wait(LOOK_SECONDS):
            try:
                self._take(self._read_order())
                self._keep_vigil()
                if time.monotonic() >= due:
                    due = time.monotonic() + WRITE_SECONDS
                    self._beat()
                    self._write()
            except Exception:
                log.exception("the watch over the run failed, and goes on")
        self._write(has_ended=True)
        if self._history is not None:
            self._try(self._history.close)

    def _keep_vigil(self) -> None:
        awaited, seconds = self._attendance.awaited()
        if self._vigil.is_due(seconds):
            log.warning(
                "round %d has waited %s for %s: %s",
                self.round + 1,
                duration_text(seconds),
                names_text(awaited, len(awaited)),
                self._wait_ends,
            )

    def _beat(self) -> None:
        if self._is_alive():
            self._try(self._presence.beat)

    def _read_order(self) -> Order | None:
        """Return the order that stands; one that makes no sense is told once, and changes none."""
        try:
            order = orders.standing(self._folder)
        except StateError as error:
            if str(error) != self._bad_order:
                self._bad_order = str(error)
                log.warning("%s: %s", error.code, error)
            return self._order
        self._bad_order = ""
        return order

    def _take(self, order: Order | None, *, is_start: bool = False) -> None:
        if is_start:
            order = orders.at_start(order)
            if order is None:
                self._try(lambda: (self._folder / orders.FILE).unlink(missing_ok=True))
        if order == self._order:
            return
        before, self._order = self._order, order
        verb = "resume" if order is None else order.verb
        if verb == "resume" and (before is None or before.verb == "resume"):
            return
        after = f"behind round {self.round + 1}" if self._is_in_round else "now"
        log.warning(
            {
                "pause": "paused %s: no round begins until headwater-server resume --out %s",
                "drain": "draining %s: the server ends; go on later with --resume --out %s",
                "resume": "resumed %s: rounds begin again in %s",
            }[verb],
            after if verb != "resume" else "now",
            self._folder,
        )
        self._note(lambda history: history.event(verb, after))
        self._on_order(order)

    def _write(self, *, has_ended: bool = False) -> None:
        """Write what was noted; what the disk does not take is tried again a second later."""
        if not self._try(self._open):
            return
        history = self._history
        assert history is not None
        while self._waiting:
            if not self._try(partial(self._waiting[0], history)):
                return
            self._waiting.popleft()
        awaited, awaited_seconds = self._attendance.awaited()
        state = {
            "awaited": awaited[:MOST_TOLD],
            "num_awaited": len(awaited),
            "awaited_seconds": awaited_seconds,
            "stands": "ended"
            if has_ended
            else run_state(self._order, is_in_round=self._is_in_round),
            "round": self.round,
            "rounds": self._rounds,
            "num_failures": self.num_failures,
        }
        if has_ended or time.monotonic() >= self._devices_due:
            devices = self._attendance.devices()
            self._devices_due = time.monotonic() + len(devices) / DEVICES_PER_SECOND
            self._try(lambda: history.write_devices(devices))
        if self._try(lambda: history.tell(state)):
            self._is_failing = False

    def _open(self) -> None:
        if self._history is None:
            self._history = History(self._folder)
            self._attendance.restore(self._history.devices())

    def _try(self, work: Callable[[], object]) -> bool:
        """Do what may fail on a bad disk; the first failure in a row is logged, each counted."""
        try:
            work()
        except (sqlite3.Error, OSError) as error:
            self.num_failures += 1
            if not self._is_failing:
                self._is_failing = True
                log.warning("the history in %s is not written: %s", self._folder, error)
            return False
        return True
