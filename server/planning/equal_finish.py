"""Quotas by equal finish: the smallest T by which a cohort can train on a number of examples.

A client's q examples in micro-batches of m arrive after ``fixed + ceil(q/m) base + q each``
seconds. The server takes updates one after another, each in a turn of its own, so the client whose
turn is j-th from the end must finish j turns before T. The slowest clients have the last turns, as
they are the last to be ready in any case. So uploads are staggered, and none waits for another.

A client's transfers may take longer than T. The round waits for its update in any case, so it also
trains for a part of that time, on at most an equal share of the target: otherwise a model of few
bytes would be trained on the examples of clients with fast links alone.

If n turns take more than half of T, the round waits for the server, and no order of quotas would
shorten it: the turns then share half of T, and every client has at least the other half. Otherwise
a round would end before the first turns, and the fastest clients would get nothing to do.

The round takes longer than T: a client whose link is slow is late by its transfers, and the last
round shows what else is waited for. The others' time is lost in any case. So a quota below an even
share is raised, up to that, as long as the client ends within MORE_TIME of what is waited for
anyway; and one below a part of an even share (``plan.least_share``), up to that part, as long as
the round takes at most MORE_TIME longer. What is raised is taken from the largest quotas: the sum
stays the target. In a fleet whose clients compute until the end nothing changes.

All functions work on numpy columns of n clients: planning a round takes about forty passes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# The search for T ends at this relative error, if it also decides each quota to one example.
RESOLUTION = 1e-6
MAX_HALVINGS = 60
# The largest share of T that all turns take together.
TURNS_SHARE = 0.5
# Every client may train for this part of its transfers' time: its update is late by as much.
TRAINING_PER_TRANSFER = 0.25
# A client is bound by its link if its transfers take at least this part of T.
LINK_BOUND = 1 / (1 + TRAINING_PER_TRANSFER)
# The part of its time by which a round may take longer for smaller shares.
MORE_TIME = 0.05
# A quota that would grow by less than this part of an even share stays as it is.
LEAST_GAIN = 0.05
NUM_TURNS = 40  # that of T at which it stays, to 2^-40


@dataclass(frozen=True, kw_only=True, slots=True)
class CohortColumns:
    """A round's clients as columns of n; seconds are by the wall clock."""

    size: Ints
    """Examples per micro-batch, 1 or more."""
    base: Floats
    """Seconds per micro-batch, in addition to its examples."""
    each: Floats
    """Seconds per example, above 0."""
    fixed: Floats
    """Seconds of download and upload."""
    most: Ints
    """The maximal number of examples, 1 or more."""
    longest: Floats
    """The maximal seconds of training, without the transfers."""
    turn_seconds: float

    def finish(self, quotas: Ints) -> Floats:
        """Return the seconds after which each client's update of so many examples has arrived."""
        num_micro_batches = -(-quotas // self.size)
        seconds: Floats = self.fixed + num_micro_batches * self.base + quotas * self.each
        return seconds

    def turns(self) -> Ints:
        """Return each client's turn from the end, 1 being the last; of equals the first is last."""
        order = np.argsort(-self.finish(np.ones_like(self.most)), kind="stable")
        turns = np.empty_like(order)
        turns[order] = np.arange(1, len(order) + 1)
        return turns

    def ahead(self, turns: Ints, finish_seconds: float) -> Floats:
        """Return how many seconds before T each client's update must have arrived."""
        turn = min(self.turn_seconds, TURNS_SHARE * finish_seconds / max(len(turns), 1))
        return turns.astype(np.float64) * turn

    def quotas(self, turns: Ints, finish_seconds: float) -> Ints:
        """Return the most examples that each client can finish in time for its turn; 0 if none.

        The numbers never fall as T grows.
        """
        return self._within(finish_seconds - self.fixed - self.ahead(turns, finish_seconds))

    def least(self, target: int) -> Ints:
        """Return the fewest examples that each client gets: 1, or more if its link is slow.

        What it trains on in TRAINING_PER_TRANSFER of its transfers' time, and not more than an
        equal share of the target, so that a false claim of a slow link wins no more than that.
        """
        share = max(target // max(len(self.most), 1), 1)
        return np.clip(self._within(TRAINING_PER_TRANSFER * self.fixed), 1, share)

    def _within(self, seconds: Floats) -> Ints:
        """Return the most examples that each client can train on in so many seconds; 0 if none."""
        budget = np.minimum(np.maximum(seconds, 0.0), self.longest) * (1 + 1e-12)
        full = self.base + self.size * self.each
        whole = np.minimum(np.floor(budget / full), self.most // self.size)
        left = budget - whole * full
        more = np.clip(np.floor((left - self.base) / self.each), 0, self.size - 1)
        quotas: Ints = np.minimum(whole * self.size + more, self.most).astype(np.int64)
        return quotas


def equal_finish(
    cohort: CohortColumns, *, target: int, finish_seconds: float | None
) -> tuple[Ints, float]:
    """Return each client's quota, at least ``least``, and T: the sum is ``target`` if possible.

    The sum is more if there are more clients than that. It is less if the clients' own bounds, or a
    given finish, allow no more: then every client gets as much as it can have. No client below its
    own bound could finish another example by T, which is known to RESOLUTION.
    """
    turns = cohort.turns()
    least = cohort.least(target)
    target = min(target, int(cohort.most.sum()))

    def at(finish: float) -> Ints:
        return np.maximum(cohort.quotas(turns, finish), least)

    if finish_seconds is not None:
        least = np.maximum(np.minimum(cohort.quotas(turns, finish_seconds), least), 1)
        quotas = at(finish_seconds)
        if int(quotas.sum()) <= target:
            return quotas, finish_seconds
    # Search from below: one client that claims to need a century must not coarsen it for all.
    low, few = 0.0, least
    high = float(cohort.finish(np.ones_like(least)).min())
    many = at(high)
    while int(many.sum()) < target:
        low, few = high, many
        high *= 2
        many = at(high)
    for _ in range(MAX_HALVINGS):
        if high - low <= RESOLUTION * high and int((many - few).max()) <= 1:
            break
        middle = (low + high) / 2
        tried = at(middle)
        if int(tried.sum()) >= target:
            high, many = middle, tried
        else:
            low, few = middle, tried
    surplus = max(int(many.sum()) - max(target, int(least.sum())), 0)
    quotas = _without(surplus, many, many - few, cohort.finish(many) + cohort.ahead(turns, high))
    ends = cohort.finish(quotas) + cohort.ahead(turns, high)
    is_free = quotas > least
    return quotas, float(ends[is_free].max()) if is_free.any() else high


def _without(surplus: int, quotas: Ints, most: Ints, ends: Floats) -> Ints:
    """Take ``surplus`` examples from the clients that end last, at most ``most`` from each."""
    if not surplus:
        return quotas
    order = np.argsort(-ends, kind="stable")
    spare = most[order]
    before = np.cumsum(spare) - spare
    taken = np.empty_like(quotas)
    taken[order] = np.clip(surplus - before, 0, spare)
    return quotas - taken


def share_wait(
    cohort: CohortColumns,
    quotas: Ints,
    *,
    least_share: float,
    finish_seconds: float | None,
    round_seconds: float = 0.0,
) -> Ints:
    """Return the quotas, those below an even share raised within the round's time.

    ``finish_seconds`` is when a round with a deadline must end, ``round_seconds`` what the last one
    took, 0 if that is unknown. The sum stays as it is.
    """
    total = int(quotas.sum())
    even, turns = total / len(quotas), cohort.turns()
    end = round_end(cohort, quotas)
    within = end + MORE_TIME * max(round_seconds - end, 0.0)
    longest = end + MORE_TIME * max(round_seconds, end)
    if finish_seconds is not None:
        within, longest = (min(one, max(finish_seconds, end)) for one in (within, longest))
    by_end = np.minimum(cohort.quotas(turns, within), math.floor(even))
    by_longest = np.minimum(cohort.quotas(turns, longest), math.ceil(least_share * even))
    raised = np.maximum(quotas, np.maximum(by_end, by_longest))
    raised = np.where(raised - quotas >= max(LEAST_GAIN * even, 1.0), raised, quotas)
    surplus = int(raised.sum()) - total
    return _lowered(raised, surplus, least=math.floor(even)) if surplus else quotas


def round_end(cohort: CohortColumns, quotas: Ints) -> float:
    """Return when a round of these quotas ends, T: each client has its turn before it."""
    ends, turns = cohort.finish(quotas), cohort.turns()
    end = float(ends.max())
    for _ in range(NUM_TURNS):  # a turn may be a part of T
        end = float((ends + cohort.ahead(turns, end)).max())
    return end


def _lowered(quotas: Ints, surplus: int, *, least: int) -> Ints:
    """Lower the largest quotas to one level, at least ``least``, until ``surplus`` is taken."""
    low, high = least, int(quotas.max())
    while low < high:  # the highest level that takes enough
        level = (low + high + 1) // 2
        if int(np.maximum(quotas - level, 0).sum()) >= surplus:
            low = level
        else:
            high = level - 1
    lowered = np.minimum(quotas, low)
    back = surplus - int((quotas - lowered).sum())  # 0 or less: too much was taken
    above = np.flatnonzero(quotas > low)[: max(-back, 0)]
    lowered[above] += 1
    return lowered
