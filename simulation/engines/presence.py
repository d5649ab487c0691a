"""Which devices are there when a round's cohort is chosen: all, or as the fleet's file says."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.common.errors import SettingsError
from headwater.common.settings.schema import Settings
from headwater.simulation.fleet.nodes import MOST_LOOKS
from headwater.simulation.fleet.random_events import is_there


class Presence:
    """Looks at a fleet until enough are there; each look of a round is a draw of its own."""

    def __init__(self, settings: Settings) -> None:
        self.last_round = 0
        """The last round whose plans were sent."""
        self._settings = settings
        self._num_looks = 0

    def plans_sent(self, round_number: int) -> None:
        """Take note that a round has its cohort: the next look is the first of another."""
        self.last_round, self._num_looks = round_number, 0

    def look(self) -> Sequence[int]:
        """Return the devices that are there for the round behind the last one.

        Raises:
            SettingsError: it was looked MOST_LOOKS times for the same round.
        """
        parts = range(self._settings.simulation.clients)
        if self._settings.simulation.fleet is None:
            return parts
        number = self.last_round + 1
        look, self._num_looks = self._num_looks, self._num_looks + 1
        if look == MOST_LOOKS:
            raise SettingsError(
                f"round {number}: {look:,} looks at the fleet found too few clients "
                f"at once, at least {self._settings.cohort.min_clients} are needed",
                remedy="lower --min-clients, or raise availability in the fleet's file",
            )
        return [
            part for part in parts if is_there(self._settings, part, round_number=number, look=look)
        ]
