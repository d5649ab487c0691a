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
MIN_EVEN_PART = 0.25
"""A device that affords less than this part of an even share of a round has hardly anything left.

Where every round counts from the first on, each may cost a device an even share.
"""


class AffordableNoise:
    """Says which devices of a round the noise follows, and how strong it is."""

    def __init__(self, rho: float, *, num_rounds: int, min_clients: int) -> None:
        """``rho`` is the zCDP that all rounds may spend together."""
        self._rho = rho
        self._least = MIN_EVEN_PART * rho / num_rounds
        self._min_clients = min_clients
        self._left_out: set[str] = set()
        """The devices that were left out of a round."""
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

        They stay where the noise need not be stronger for them, and where half of the devices are
        such, with those of earlier rounds: then the noise is what every device can afford. One that
        has hardly anything left stays only where too few others would be left.
        """
        irregular = epochs.irregular(shares, round_number=round_number)
        if not irregular:
            return shares
        regular = shares.keys() - irregular
        costs = epochs.affordable(
            self._rho, round_number=round_number, rounds=rounds, shares=shares
        )
        enough = min((costs[name] for name in regular), default=0.0)
        dear = {name for name in irregular if costs[name] < enough}
        spent = {name for name in irregular if costs[name] < self._least}
        num_others = len(shares.keys() | self._left_out) / 2
        found = dear | spent if len(regular) >= max(self._min_clients, num_others) else spent
        if len(shares) - len(found) < self._min_clients:
            return shares
        self._left_out |= found
        return {name: share for name, share in shares.items() if name not in found}

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
