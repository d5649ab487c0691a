"""Observers of a run: the round log, the operator's control, the metrics, and those of users.

All implement methods of one class, ``Observer``. A user's observer is any object with the method
``on_round``, or a function of a row (``headwater.server.tracking.user_observer``).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from headwater.common.errors import RoundAborted
from headwater.common.messages import DeviceReport
from headwater.common.settings.changes import Changes
from headwater.common.settings.schema import Settings
from headwater.common.task import Task
from headwater.server.rounds.open_round import OpenRound
from headwater.server.rounds.round_row import RoundRow


class Drained(Exception):
    """Ends the run before its next round, as the operator ordered; it is no error.

    A fleet raises it from ``describe``.
    """


class Observer:
    """Receives a run's events, on the rounds' own thread.

    No method may block. Only ``started`` and ``stepped`` may raise, and only a ``HeadwaterError``,
    which ends the run. A class that inherits from this one implements the events that it needs.
    """

    def started(self, settings: Settings, *, round_number: int, model: nn.Module) -> None:
        """Handle the start of a run after the committed round ``round_number``.

        ``settings.out`` is the folder that it writes to, if any. The steps change ``model`` in
        place: it is the model of the last step at any time.
        """

    def loaded(self, task: Task) -> None:
        """Handle the server's task, right before the start; the rounds tell it what they find."""

    def resumed(self, round_number: int, changed: Changes) -> None:
        """Handle a resumed run, right after its start, with the settings that it changes.

        ``round_number`` is the checkpoint's round; 0 if there was no checkpoint.
        """

    def paused(self, is_paused: bool) -> None:
        """Handle an operator's order to begin no further round, or the end of that."""

    def begun(self, round_number: int, reports: Mapping[str, DeviceReport]) -> None:
        """Handle the start of a round, with the reports of the connected clients."""

    def asked(self, opened: OpenRound) -> None:
        """Handle a planned round, whose plans are about to be sent; it fills with the answers."""

    def closed(self, opened: OpenRound) -> None:
        """Handle the end of a round's answers: all are in, or the deadline has passed."""

    def aborted(self, error: RoundAborted) -> None:
        """Handle a round that was aborted."""

    def stepped(self, row: RoundRow) -> None:
        """Handle a round's step, before its checkpoint is written."""

    def on_round(self, row: RoundRow) -> None:
        """Handle a committed round: its checkpoint is on disk, if the run writes to a folder.

        A simulation writes a checkpoint every few seconds.
        """

    def ended(self) -> None:
        """Handle the end of a run, also after an error; the model is saved if it could be."""


class Observers(Observer):
    """Passes each event to several observers in turn; to none if there is none."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def started(self, settings: Settings, *, round_number: int, model: nn.Module) -> None:
        for observer in self._observers:
            observer.started(settings, round_number=round_number, model=model)

    def loaded(self, task: Task) -> None:
        for observer in self._observers:
            observer.loaded(task)

    def resumed(self, round_number: int, changed: Changes) -> None:
        for observer in self._observers:
            observer.resumed(round_number, changed)

    def paused(self, is_paused: bool) -> None:
        for observer in self._observers:
            observer.paused(is_paused)

    def begun(self, round_number: int, reports: Mapping[str, DeviceReport]) -> None:
        for observer in self._observers:
            observer.begun(round_number, reports)

    def asked(self, opened: OpenRound) -> None:
        for observer in self._observers:
            observer.asked(opened)

    def closed(self, opened: OpenRound) -> None:
        for observer in self._observers:
            observer.closed(opened)

    def aborted(self, error: RoundAborted) -> None:
        for observer in self._observers:
            observer.aborted(error)

    def stepped(self, row: RoundRow) -> None:
        for observer in self._observers:
            observer.stepped(row)

    def on_round(self, row: RoundRow) -> None:
        for observer in self._observers:
            observer.on_round(row)

    def ended(self) -> None:
        for observer in self._observers:
            observer.ended()
