"""Who looks on at a run: told what happens, from the rounds' own thread, and never waited for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from headwater.common.errors import RoundAborted
from headwater.common.messages import DeviceReport
from headwater.server.rounds.open_round import OpenRound
from headwater.server.rounds.round_row import RoundRow


class Observer(Protocol):
    """What is told of a run. Nothing here may block, or raise."""

    def begun(self, round_number: int, reports: Mapping[str, DeviceReport]) -> None:
        """Take note that a round begins, with the devices that are there."""
        ...

    def closed(self, opened: OpenRound) -> None:
        """Take note that all answers of a round are in, or its deadline has passed."""
        ...

    def aborted(self, error: RoundAborted) -> None:
        """Take note that a round came to nothing."""
        ...

    def committed(self, row: RoundRow) -> None:
        """Take note that a round is committed, on disk as well."""
        ...


class Observers:
    """Several who look on."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def begun(self, round_number: int, reports: Mapping[str, DeviceReport]) -> None:
        for observer in self._observers:
            observer.begun(round_number, reports)

    def closed(self, opened: OpenRound) -> None:
        for observer in self._observers:
            observer.closed(opened)

    def aborted(self, error: RoundAborted) -> None:
        for observer in self._observers:
            observer.aborted(error)

    def committed(self, row: RoundRow) -> None:
        for observer in self._observers:
            observer.committed(row)


class Unobserved:
    """Nobody looks on."""

    def begun(self, round_number: int, reports: Mapping[str, DeviceReport]) -> None: ...

    def closed(self, opened: OpenRound) -> None: ...

    def aborted(self, error: RoundAborted) -> None: ...

    def committed(self, row: RoundRow) -> None: ...
