"""A user's observer: any object with the method ``on_round``, or a function of a row.

It may also have ``started(settings, *, round_number, model)`` and ``ended()``, as
``headwater.server.rounds.observer.Observer`` has. A training outlives its observer: an exception is
logged with its traceback, once, and the observer is called again in the next round, as a server
that could not be reached may be back. Only a failure of ``started`` ends the run: nothing is lost
then, and training for hours without the record that was asked for would be worse.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Protocol, cast, runtime_checkable

from torch import nn

from headwater.common.errors import HeadwaterError, SettingsError
from headwater.common.settings.schema import Settings
from headwater.server.rounds.observer import Observer
from headwater.server.rounds.round_row import RoundRow

log = logging.getLogger(__name__)


@runtime_checkable
class RoundObserver(Protocol):
    """What an observer must have: a method that is called with each committed round."""

    def on_round(self, row: RoundRow, /) -> object: ...


GivenObserver = RoundObserver | Callable[[RoundRow], object]
GivenObservers = GivenObserver | Iterable[GivenObserver]


class UserObserver(Observer):
    """Passes a run's events to a user's observer, and outlives its failures."""

    def __init__(self, observer: GivenObserver) -> None:
        """Take any object with ``on_round``, or a function.

        Raises:
            SettingsError: it is neither.
        """
        on_round = getattr(observer, "on_round", observer)
        if isinstance(observer, type) or not callable(on_round):
            raise SettingsError(
                f"an observer must have a method on_round(row) or be a function of a row, found "
                f"{'the class ' if isinstance(observer, type) else ''}{_name(observer)}",
                remedy="pass an object of the class, as in observer=MyObserver()",
            )
        self._observer = observer
        self._on_round = cast(Callable[[RoundRow], object], on_round)
        self._num_failures = 0

    def started(self, settings: Settings, *, round_number: int, model: nn.Module) -> None:
        """Start the observer.

        Raises:
            SettingsError: it could not start.
        """
        start = getattr(self._observer, "started", None)
        if start is None:
            return
        try:
            start(settings, round_number=round_number, model=model)
        except HeadwaterError:
            raise
        except Exception as error:
            raise SettingsError(
                f"the observer {_name(self._observer)} cannot start: "
                f"{type(error).__name__}: {error}",
                remedy="correct it, or run without it: no round has begun",
            ) from error

    def on_round(self, row: RoundRow) -> None:
        self._call(self._on_round, row)

    def ended(self) -> None:
        end = getattr(self._observer, "ended", None)
        if end is not None:
            self._call(end)
        if self._num_failures > 1:
            log.warning(
                "the observer %s failed %d times in all", _name(self._observer), self._num_failures
            )

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        try:
            function(*arguments)
        except Exception:
            self._num_failures += 1
            if self._num_failures == 1:
                log.warning(
                    "the observer %s failed; the training goes on",
                    _name(self._observer),
                    exc_info=True,
                )


def user_observers(given: GivenObservers) -> list[Observer]:
    """Return the observers of one that was given, or of several.

    Raises:
        SettingsError: one of them is no observer.
    """
    is_one = hasattr(given, "on_round") or callable(given)
    some = [given] if is_one or not isinstance(given, Iterable) else given
    return [UserObserver(cast(GivenObserver, one)) for one in some]


def _name(observer: object) -> str:
    return getattr(observer, "__name__", type(observer).__name__)
