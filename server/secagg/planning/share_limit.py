"""Limits the largest quotas and weights of a masked round.

A device refuses to be most of a session's sum (``secure.max_share``), even if the heaviest of the
others drop out: the sum would be its own update. The server therefore plans no client for more than
a part of that, so that a session is still accepted after some of its clients have dropped out. What
is cut is not given to the others. A device also masks no update of fewer examples than its least
quota (``secure.min_quota``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from headwater.common.secagg.graph import ceil_fraction
from headwater.common.settings.rounds import MIN_MEMBERS

# The planned part of a device's own limit: with fewer clients each is a larger part of the sum.
PLANNED_PART = 0.8


def limited_quotas(
    quotas: NDArray[np.int64], *, max_share: float, min_quota: int, min_survivors: float
) -> NDArray[np.int64]:
    """Return the quotas, the smallest raised to the least one, and the largest cut."""
    raised = np.maximum(quotas, min_quota)
    left = lightest(raised.tolist(), min_survivors=min_survivors)
    limit = largest_value(left, max_share=max_share)
    return np.minimum(raised, max(limit, min_quota))


def limited_weights(
    weights: Mapping[str, int], *, max_share: float, min_survivors: float
) -> Mapping[str, int]:
    """Return the weights, with the largest cut to the limit."""
    left = lightest(list(weights.values()), min_survivors=min_survivors)
    limit = largest_value(left, max_share=max_share)
    return {name: min(weight, limit) for name, weight in weights.items()}


def lightest(values: Sequence[int], *, min_survivors: float) -> list[int]:
    """Return the largest value, and the smallest of the others that have to be in a sum with it.

    A device counts on no more (``client.secagg.checks``): which members dropped out, and whether
    they were the heaviest, is the server's word.
    """
    least = max(MIN_MEMBERS, ceil_fraction(min_survivors, len(values)))
    *others, largest = sorted(values) or [0]
    return [*others[: least - 1], largest]


def largest_value(values: Sequence[int], *, max_share: float) -> int:
    """Return the largest v with v <= PLANNED_PART max_share x the sum of min(value, v).

    =====================  =========  ======================================================
    values                 max_share  result
    =====================  =========  ======================================================
    8, 8, 8                0.6        8: nothing is cut
    100, 50, 10, 1, 1      0.6        57: of 119
    30, 1, 1               0.6        1
    7, 3                   0.6        1: two clients cannot have less than 0.48 each
    =====================  =========  ======================================================
    """
    share = PLANNED_PART * max_share
    ordered = sorted(values, reverse=True)
    rest = sum(ordered)  # of the values that are not cut
    for num_cut, value in enumerate(ordered):
        if value <= share * (num_cut * value + rest):
            return value
        rest -= value
        following = ordered[num_cut + 1] if num_cut + 1 < len(ordered) else 0
        free = 1 - (num_cut + 1) * share
        limit = math.floor(share * rest / free) if free > 0 else value
        if limit >= following:
            return max(limit, 1)
    return 1
