"""Observers of a run: the base class of the round log, the operator's control and the metrics."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from headwater.common.errors import RoundAborted
from headwater.common.messages import DeviceReport
from headwater.server.rounds.open_round import OpenRound
from headwater.server.rounds.round_row import RoundRow


class Drained(Exception):
    """Ends the run before its next round, as the operator ordered; it is no error.

    A fleet raises it from ``describe``.
    """


class Observer:
    """Receives a run's events, on the rounds' own thread.

    No method may block. Only ``started`` and ``stepped`` may raise, and only a ``StateError``,
    which ends the run. A class that inherits from this one implements the events that it needs.
    """

    def started(self, folder: Path, *, round_number: int) -> None:
        """Handle the start of a run that writes to ``folder``, after the committed round."""

    def begun(self, round_number: int, reports: Mapping[str, DeviceReport]) -> None:
        """Handle the start of a round, with the reports of the connected clients."""

    def closed(self, opened: OpenRound) -> None:
        """Handle the end of a round's answers: all are in, or the deadline has passed."""

    def aborted(self, error: RoundAborted) -> None:
        """Handle a round that was aborted."""

    def stepped(self, row: RoundRow) -> None:
        """Handle a round's step, before its checkpoint is written."""

    def committed(self, row: RoundRow) -> None:
        """Handle a round whose checkpoint is on disk (if the run writes to a folder)."""

    def ended(self) -> None:
        """Handle the end of a run that was started, also after an error."""


class Observers(Observer):
    """Passes each event to several observers in turn; to none if there is none."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def started(self, folder: Path, *, round_number: int) -> None:
        for observer in self._observers:
            observer.started(folder, round_number=round_number)

    def begun(self, round_number: int, reports: Mapping[str, DeviceReport]) -> None:
        for observer in self._observers:
            observer.begun(round_number, reports)

    def closed(self, opened: OpenRound) -> None:
        for observer in self._observers:
            observer.closed(opened)

    def aborted(self, error: RoundAborted) -> None:
        for observer in self._observers:
            observer.aborted(error)

    def stepped(self, row: RoundRow) -> None:
        for observer in self._observers:
            observer.stepped(row)

    def committed(self, row: RoundRow) -> None:
        for observer in self._observers:
            observer.committed(row)

    def ended(self) -> None:
        for observer in self._observers:
            observer.ended()
