"""The noise of rounds whose epsilon is for each example: what the devices can still afford.

The noise of a round is the same for all, so it follows the device that affords least. A device with
few examples begins many epochs and makes it strong, which the log says. A device that tells another
number of examples than before has every round counted; its word alone does not make the noise
stronger for the others: it is left out.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from headwater.common.wording import counted, natural
from headwater.server.privacy.accountant import multiplier_of
from headwater.server.privacy.example_epochs import ExampleEpochs, Share

log = logging.getLogger(__name__)

STRONGER, MAX_NAMES = 1.5, 5
"""The log names devices that make the noise so many times as strong for all, the first of them."""


class AffordableNoise:
    """Says which devices of a round the noise follows, and how strong it is."""

    def __init__(self, rho: float, *, min_clients: int) -> None:
        """``rho`` is the zCDP that all rounds may spend together."""
        self._rho = rho
        self._min_clients = min_clients
        self._left_out: set[str] = set()
        """The devices that are not in the current round, so that its noise does not follow them."""
        self._logged: set[str] = set()

    def without_irregular(
        self,
        shares: Mapping[str, Share],
        epochs: ExampleEpochs,
        *,
        round_number: int,
        rounds: int,
    ) -> Mapping[str, Share]:
        """Return the shares without those of devices that told other numbers of examples before.

        They stay where the noise need not be stronger for them, and where they are the greater part
        or too few others would be left: then the noise is what every device can afford.
        """
        self._left_out = set()
        irregular = epochs.irregular(shares, round_number=round_number)
        if len(shares.keys() - irregular) < max(self._min_clients, len(shares) / 2):
            return shares
        costs = epochs.affordable(
            self._rho, round_number=round_number, rounds=rounds, shares=shares
        )
        enough = min(cost for name, cost in costs.items() if name not in irregular)
        self._left_out = {name for name in irregular if costs[name] < enough}
        return {name: share for name, share in shares.items() if name not in self._left_out}

    def multiplier(
        self,
        shares: Mapping[str, Share],
        epochs: ExampleEpochs,
        *,
        round_number: int,
        rounds: int,
    ) -> float:
        """Return the noise multiplier that spends the rest evenly over so many rounds.

        Raises:
            PrivacySpent: nothing is left.
        """
        costs = epochs.affordable(
            self._rho, round_number=round_number, rounds=rounds, shares=shares
        )
        costs = {name: cost for name, cost in costs.items() if name not in self._left_out}
        self._log_weakest(costs, shares)
        return multiplier_of(min(costs.values()), of=self._rho)

    def _log_weakest(self, costs: Mapping[str, float], shares: Mapping[str, Share]) -> None:
        """Log which devices make the noise stronger for all, if some do; each once."""
        least, most = min(costs.values()), max(costs.values())
        weakest = {name for name, cost in costs.items() if STRONGER**2 * cost <= most}
        if least <= 0 or weakest <= self._logged:
            return
        self._logged |= weakest
        names = sorted(weakest, key=natural)
        numbers = {name: share.num_owned for name, share in shares.items() if share.num_owned}
        told = [f"{name} with {numbers[name]}" if name in numbers else name for name in names]
        log.warning(
            "the noise is %.1f times as strong (a multiplier of %.3g, and not of %.3g) for %s with "
            "few examples, or whose rounds all count: %s",
            math.sqrt(most / least),
            multiplier_of(least, of=self._rho),
            multiplier_of(most, of=self._rho),
            counted(len(names), "device"),
            ", ".join(told[:MAX_NAMES] + ["..."] * (len(told) > MAX_NAMES)),
        )
