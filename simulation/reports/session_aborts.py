"""How many secure sessions were aborted because devices vanished: counted, and as expected.

A device vanishes with probability p in a round, at a step drawn evenly from training and the secure
phases (``simulation.fleet.random_events.vanishes_at``). A device that is still present after i of S
steps vanishes at the next step with probability h = (p / S) / (1 - p i / S), so the numbers of
present devices form a chain of binomials. The session continues as long as the rules of
``server.secagg.parameters`` hold; this module sums the probability that a rule fails. It holds for
the complete graph, where every member has a share of every secret.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from headwater.common.secagg.graph import Mode, ceil_fraction
from headwater.common.secagg.protocol import MAX_COMPLETE, PHASES, complete_threshold
from headwater.common.settings.schema import Settings

ACTIONS = tuple(phase.action for phase in PHASES)
STEPS = len(ACTIONS) + 1  # training is the first


def abort_probability(
    num_invited: int, *, dropout: float, mode: Mode, min_members: int, min_survivors: float
) -> float:
    """Return the probability that a session of the complete graph is aborted.

    Exact while ``secure.corrupted`` is at most a third: the signatures then need no more than t.
    """
    # (present, U1, U2) -> probability; U1 and U2 are 0 until their phase.
    states = {(num_invited, 0, 0): 1.0}
    aborted = 0.0
    for step, action in enumerate(("train", *ACTIONS)):
        hazard = (dropout / STEPS) / (1 - dropout * step / STEPS)
        after: dict[tuple[int, int, int], float] = {}
        for (present, first, second), probability in states.items():
            for stay in range(present + 1):
                moved = probability * _binomial(present, stay, 1 - hazard)
                u1 = stay if action == "advertise_keys" else first
                u2 = stay if action == "check_shares" else second
                if _continues(action, stay, u1, u2, mode, min_members, min_survivors):
                    key = (stay, u1, u2)
                    after[key] = after.get(key, 0.0) + moved
                else:
                    aborted += moved
        states = after
    return min(aborted, 1.0)


def _binomial(n: int, k: int, p: float) -> float:
    return math.comb(n, k) * p**k * (1 - p) ** (n - k)


def _continues(
    action: str, present: int, u1: int, u2: int, mode: Mode, min_members: int, min_survivors: float
) -> bool:
    if action == "train":
        return True
    threshold = complete_threshold(u1, mode)
    if action in ("advertise_keys", "share_keys", "check_shares"):
        return present >= min_members and present >= threshold
    if action == "masked_update":
        return present >= max(min_members, threshold, ceil_fraction(min_survivors, u2))
    return present >= threshold


def sessions_line(rows: Sequence[Mapping[str, Any]], settings: Settings) -> str:
    """Return how many of a run's sessions were aborted, and the expected share."""
    aborted = sum(row["num_aborted"] for row in rows)
    number = aborted + len(rows)
    line = f"{aborted} of {number} aborted ({aborted / number:.1%})" if number else "none"
    chosen = settings.secure
    num_invited = max((row["num_invited"] for row in rows), default=0)
    if chosen.aggregation == "off" or not 0 < num_invited <= MAX_COMPLETE:
        return line
    expected = abort_probability(
        num_invited,
        dropout=settings.simulation.dropout,
        mode=chosen.aggregation,
        min_members=chosen.min_members,
        min_survivors=chosen.min_survivors,
    )
    return f"{line}, computed {expected:.1%} for {num_invited} devices"
