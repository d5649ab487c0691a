"""Which device answers no more in a round, on an engine that keeps a device's context alone.

A device that is invited vanishes for the rest of that attempt of the round (``simulation.draws``):
it is there again when it is next asked to train.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.settings import Settings
from simulation.draws import vanishes_at
from simulation.faults import STAGES


@dataclass(frozen=True, slots=True)
class LastAsked:
    """The round in which a device was last asked to train, and how often before in it."""

    round: int = 0
    attempt: int = 0

    def again(self, round_number: int) -> LastAsked:
        """Return the same once it is asked in a round."""
        is_same = round_number == self.round
        return LastAsked(round_number, self.attempt + 1 if is_same else 0)

    def has_vanished(self, settings: Settings, part: int, message_type: str) -> bool:
        """Tell whether the device does not answer a message of this round any more."""
        last = vanishes_at(settings, part, round_number=self.round, attempt=self.attempt)
        return last is not None and STAGES.index(message_type) >= STAGES.index(last)
