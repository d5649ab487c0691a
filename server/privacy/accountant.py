"""The accountant: the epsilon of the sums that were opened, by Google's dp-accounting library.

Each opened sum is one event, with the noise multiplier that its noise really had. Renyi
differential privacy composes the events, also if later noise was chosen after looking at earlier
sums, and bounds the discrete Gaussian as it does the continuous one (Canonne, Kamath and Steinke
2020, theorem 4; under masks see ``common.privacy.noise_shares``).

No event is amplified by sampling. Cohorts are drawn in turns from the run's seed, which every
device knows; a turn is neither random nor secret, so it hides nobody.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from headwater.common.errors import PrivacySpent, SettingsError
from headwater.common.privacy.terms import rho_of
from headwater.common.system.portability import optional_module

Events = Sequence[tuple[float, int]]
"""Noise multipliers, and how many sums had each."""

# Orders of the Renyi divergence, dense enough for one part in a thousand from epsilon 0.01 to 100.
ORDERS = tuple(1 + 10 ** (power / 40) for power in range(-80, 241))
MIN_MULTIPLIER, MAX_MULTIPLIER = 0.01, 1e6
TOLERANCE = 1e-4
ALL_SPENT = "the sums that were opened have spent all of the run's epsilon"


class Accountant:
    """The events so far, and their epsilon at a delta."""

    def __init__(self, delta: float, events: Iterable[tuple[float, int]] = ()) -> None:
        """Compose these events.

        Raises:
            SettingsError: dp-accounting is not installed.
        """
        self.delta = delta
        self.events: list[tuple[float, int]] = []
        self._accountant = _new_accountant()
        for multiplier, count in events:
            self.add(multiplier, count)

    def add(self, noise_multiplier: float, count: int = 1) -> None:
        """Add opened sums with this noise multiplier."""
        if not count:
            return
        library = _library()
        self._accountant.compose(library.GaussianDpEvent(noise_multiplier), count)
        if self.events and self.events[-1][0] == noise_multiplier:
            count += self.events.pop()[1]
        self.events.append((noise_multiplier, count))

    @property
    def epsilon(self) -> float:
        """The epsilon of all events together; 0 before the first."""
        return float(self._accountant.get_epsilon(self.delta)) if self.events else 0.0


def largest_rho(epsilon: float, *, delta: float) -> float:
    """Return the largest zCDP that stays within ``epsilon`` at ``delta``, to one part in 10,000.

    Raises:
        SettingsError: dp-accounting is not installed.
    """
    low, high = math.log(1 / (2 * MAX_MULTIPLIER**2)), math.log(1 / (2 * MIN_MULTIPLIER**2))
    while high - low > TOLERANCE:
        middle = (low + high) / 2
        multiplier = math.exp(-middle / 2) / math.sqrt(2)  # rho = 1 / (2 z^2)
        is_within = Accountant(delta, [(multiplier, 1)]).epsilon <= epsilon
        low, high = (middle, high) if is_within else (low, middle)
    return math.exp(low)


def multiplier_of_rest(rho: float, events: Events, *, rounds: int, gain: float = 1.0) -> float:
    """Return the noise multiplier with which ``rounds`` more sums spend what is left of ``rho``.

    The rho of Gaussian sums add up, so that the sums so far and the coming ones together have the
    epsilon of ``rho``. ``gain`` is how much less than its multiplier says a sum is expected to
    cost, because more devices add noise than must. It only spreads the rest over the rounds: the
    next sum does not exceed the rest even if it costs all that its multiplier says.

    Raises:
        PrivacySpent: nothing is left.
    """
    left = rho - spent_rho(events)
    if left <= rho * TOLERANCE:
        raise PrivacySpent(ALL_SPENT)
    return max(math.sqrt(max(rounds / gain, 1.0) / (2 * left)), MIN_MULTIPLIER)


def multiplier_of(rho: float, *, of: float) -> float:
    """Return the noise multiplier of a sum that costs ``rho``, a part of all ``of`` it.

    Raises:
        PrivacySpent: it would be nothing.
    """
    if rho <= of / (2 * MAX_MULTIPLIER**2):
        raise PrivacySpent(ALL_SPENT)
    return max(math.sqrt(1 / (2 * rho)), MIN_MULTIPLIER)


def epsilon_of(rho: float, *, delta: float) -> float:
    """Return the epsilon of sums that cost ``rho`` together, as zCDP."""
    return Accountant(delta, [(math.sqrt(1 / (2 * rho)), 1)]).epsilon if rho else 0.0


def spent_rho(events: Events) -> float:
    """Return the zCDP of all events."""
    return math.fsum(count * rho_of(multiplier) for multiplier, count in events)


def _new_accountant() -> Any:
    _library()
    from dp_accounting.rdp import RdpAccountant

    return RdpAccountant(orders=ORDERS)


def _library() -> Any:
    library = optional_module("dp_accounting")
    if library is None:
        raise SettingsError(
            "private rounds are accounted for by the library dp-accounting, which is not installed",
            remedy="install it on the server: pip install 'headwater[privacy]'",
        )
    return library
