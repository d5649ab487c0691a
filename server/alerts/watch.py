"""Watches a server's run, and says once that a trouble is there, and once that it is over."""

from __future__ import annotations

import datetime as dt
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from headwater.common.settings.schema import Settings
from headwater.server.alerts.conditions import MIN_LOSSES, Trouble, WatchedRun, troubles
from headwater.server.alerts.sender import Alert, Sender
from headwater.server.rounds.observer import Observer
from headwater.server.rounds.round_row import RoundRow
from headwater.server.transport.device_records import DeviceRecords

log = logging.getLogger(__name__)

CHECK_SECONDS = 5.0
NUM_LOSSES = 50 * MIN_LOSSES
NUM_SHARES = 20
"""Rounds over which a device's share of the weight is taken."""


class Alerts(Observer):
    """Looks every few seconds for troubles, in a thread of its own."""

    def __init__(
        self,
        settings: Settings,
        records: DeviceRecords,
        *,
        certificates: Mapping[str, float],
        is_paused: Callable[[], bool],
        note: Callable[[str], None],
    ) -> None:
        """Begin to watch; ``note`` is called with each alert's text, also if it cannot be sent.

        Raises:
            SettingsError: see ``Sender``.
        """
        assert settings.alerts.notify is not None
        self._settings, self._records = settings, records
        self._certificates, self._is_paused, self._note = certificates, is_paused, note
        self._sender = Sender(settings.alerts.notify)
        self._known: dict[Trouble, str] = {}
        self._losses: deque[float] = deque(maxlen=NUM_LOSSES)
        self._weights: deque[dict[str, int]] = deque(maxlen=NUM_SHARES)
        self._round, self._last_round_at = 0, time.time()
        self._spent: tuple[float, float] | None = None
        self._lock = threading.Lock()
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def on_round(self, row: RoundRow) -> None:
        with self._lock:
            self._round, self._last_round_at = row.round, time.time()
            self._losses.append(row.loss)
            if row.clients:
                self._weights.append({one.name: one.weight for one in row.clients})
            most = self._settings.privacy.epsilon
            if row.epsilon is not None and most is not None:
                self._spent = row.epsilon, most

    def stop(self, reason: str) -> None:
        """Say that the run has ended, and why; send what waits."""
        self._has_ended.set()
        self._thread.join()
        self._tell("run-ended", "", f"the run has ended after round {self._round}: {reason}")
        self._sender.close()

    def _run(self) -> None:
        while not self._has_ended.wait(CHECK_SECONDS):
            try:
                self.look()
            except Exception:  # it watches; it ends nothing
                log.exception("the run could not be looked at for alerts")
                return

    def look(self) -> None:
        """Look for troubles now."""
        found = troubles(self._state(), self._settings.alerts)
        for trouble in found.keys() - self._known.keys():
            self._tell(*trouble, found[trouble])
        for trouble in self._known.keys() - found.keys():
            self._tell(*trouble, self._known[trouble], is_over=True)
        self._known = found

    def _state(self) -> WatchedRun:
        folder = self._settings.out
        with self._lock:
            figures: dict[str, Any] = {
                "round": self._round,
                "last_round_at": self._last_round_at,
                "losses": [*self._losses],
                "shares": _shares([*self._weights]),
                "spent": self._spent,
            }
        return WatchedRun(
            now=time.time(),
            is_paused=self._is_paused(),
            devices=self._records.devices(),
            certificates=self._certificates,
            free_bytes=None if folder is None else _free_bytes(folder),
            folder=str(folder),
            **figures,
        )

    def _tell(self, kind: str, subject: str, text: str, *, is_over: bool = False) -> None:
        text = f"over: {text}" if is_over else text
        self._note(text)
        out = self._settings.out
        self._sender.send(
            Alert(
                text=text if out is None else f"{out.name}: {text}",
                kind=kind,
                subject=subject,
                is_over=is_over,
                run="" if out is None else out.name,
                at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            )
        )


def _shares(weights: list[dict[str, int]]) -> dict[str, float]:
    if len(weights) < NUM_SHARES:
        return {}
    sums: dict[str, int] = {}
    for one in weights:
        for name, weight in one.items():
            sums[name] = sums.get(name, 0) + weight
    total = sum(sums.values())
    return {name: weight / total for name, weight in sums.items()} if total else {}


def _free_bytes(folder: Path) -> int | None:
    try:
        return int(psutil.disk_usage(str(folder)).free)
    except OSError:
        return None
