"""What a device keeps for a run: its place, its record of secure sessions, its pace.

In memory it lies in Flower's context. A real device writes it to a file as well, before the answer
that it belongs to leaves: after a restart the device goes on where the server's count says, and an
update that was masked is never masked again. There is no secret in it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headwater.client.secagg.types import SessionRecord
from headwater.client.training.micro_batches import SamplerPosition, SamplerState
from headwater.common.errors import StateError
from headwater.common.stats.linear_fit import Line
from headwater.common.system.atomic_file import write_whole

log = logging.getLogger(__name__)

WALK, SECURE, PACE = "walk", "secure", "pace"

Plain = Mapping[str, Any]


def walk_of(plain: Plain | None) -> SamplerState:
    """Return the walk through the examples; at its start if none was kept."""
    if plain is None:
        return SamplerState()
    return SamplerState(
        place=SamplerPosition(**plain["place"]),
        pending_round=plain["pending_round"],
        pending_place=SamplerPosition(**plain["pending_place"]),
    )


def record_of(plain: Plain | None) -> SessionRecord:
    """Return the record of the run's secure sessions; empty if none was kept."""
    return SessionRecord() if plain is None else SessionRecord.of(plain)


def pace_of(plain: Plain | None) -> Line | None:
    """Return the seconds of a micro-batch as a line in its size; None if they were not asked."""
    return None if plain is None else Line(base=float(plain["base"]), each=float(plain["each"]))


READERS: Mapping[str, Callable[[Plain], object]] = {
    WALK: walk_of,
    SECURE: record_of,
    PACE: pace_of,
}


class StateFile:
    """One device's file in a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """Return what was written last; nothing if there is no file.

        Raises:
            StateError: it cannot be read back.
        """
        try:
            told = json.loads(self.path.read_text())
            for name, plain in told.items():
                READERS[name](plain)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StateError(
                f"what the device keeps in {self.path} cannot be read: "
                f"{type(error).__name__}: {error}",
                remedy="delete the file: the device then starts at its first example, and no "
                "longer knows which of its updates were masked",
            ) from error
        self._written = told
        return dict(told)

    def write(self, kept: Mapping[str, Any]) -> None:
        """Write what is kept, forced to disk, unless it is there already.

        Raises:
            StateError: it could not be written; what was there before still is.
        """
        if kept == self._written:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps(kept).encode())
        except OSError as error:
            log.warning("%s cannot be written: %s", self.path, error.strerror)
            raise StateError(f"the device cannot keep its place: {error.strerror}") from error
        self._written = dict(kept)
