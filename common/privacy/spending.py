"""What sums with noise cost a device, in closed form: a device needs no accountant's library.

A sum with (discrete) Gaussian noise of z times its sensitivity is rho-zCDP with rho = 1/(2 z^2).
The rho of several sums add up, also if later ones were chosen after looking at earlier ones (Bun
and Steinke 2016, "Concentrated Differential Privacy", lemma 2.3). Nothing is taken off for
sampling: a device knows when it takes part. The server's accountant (``server.privacy.accountant``)
gives the same epsilon to one percent, which a test holds.
"""

from __future__ import annotations

import math

MIN_ORDER, MAX_ORDER = 1.0 + 1e-6, 1e9
STEPS = 200


def epsilon_of(rho: float, *, delta: float) -> float:
    """Return the epsilon of rho-zCDP at a delta; 0 if nothing was spent.

    The smallest over alpha > 1 of alpha rho + log(1 / (alpha delta)) / (alpha - 1) + log(1 - 1 /
    alpha) (Canonne, Kamath and Steinke 2020, corollary 13). Every alpha gives a valid bound, so an
    error of the search can only make epsilon larger.

    Raises:
        ValueError: a delta that is not in 0..1 (both exclusive), or a negative rho.
    """
    if not 0 < delta < 1 or not rho >= 0:
        raise ValueError(f"no epsilon for rho = {rho} and delta = {delta}")
    if rho == 0:
        return 0.0
    if math.isinf(rho):
        return math.inf
    low, high = math.log(MIN_ORDER - 1), math.log(MAX_ORDER - 1)
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(STEPS):  # golden section over log(alpha - 1), in which the bound has one minimum
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if _epsilon_at(left, rho, delta) < _epsilon_at(right, rho, delta):
            high = right
        else:
            low = left
    return max(0.0, _epsilon_at((low + high) / 2, rho, delta))


def _epsilon_at(log_excess: float, rho: float, delta: float) -> float:
    excess = math.exp(log_excess)  # alpha - 1
    order = 1 + excess
    return order * rho - math.log(order * delta) / excess + math.log(excess / order)
