"""Quotas by equal finish: the smallest T by which a cohort can train on so many examples.

A device's q examples in micro-batches of m are here after ``fixed + ceil(q/m) base + q each``
seconds. The server takes updates one after another, each in a turn of its own, so the device whose
turn is j-th from the end must be here j turns before T. The slowest take the last turns: they are
the last to be ready in any case. So uploads come staggered, and none waits for another.

Where n turns take more than half of T the server is what the round waits for, and no order of
quotas would shorten it: the turns then share half of T, and every device has the other half at
least. Otherwise a round would end before the first turns, whose devices, the fastest, would get
nothing to do.

Everything here is numpy over columns of n devices: some forty sweeps plan a round.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# The search ends when T is known so well, relatively, and to one example of each device.
RESOLUTION = 1e-6
MOST_HALVINGS = 60
TURNS_SHARE = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Cohort:
    """A round's devices as columns of n; seconds are by the wall clock."""

    size: Ints
    """Examples per micro-batch, 1 or more."""
    base: Floats
    """Seconds per micro-batch beside its examples."""
    each: Floats
    """Seconds per example, above 0."""
    fixed: Floats
    """Seconds of download and upload."""
    most: Ints
    """Examples, 1 or more."""
    longest: Floats
    """Seconds that a device may train, beside its transfers."""
    turn_seconds: float

    def finish(self, quotas: Ints) -> Floats:
        """Return after how many seconds each device's update of so many examples is here."""
        num_micro_batches = -(-quotas // self.size)
        seconds: Floats = self.fixed + num_micro_batches * self.base + quotas * self.each
        return seconds

    def turns(self) -> Ints:
        """Return each device's turn, counted from the last one, 1; of equals the first is last."""
        order = np.argsort(-self.finish(np.ones_like(self.most)), kind="stable")
        turns = np.empty_like(order)
        turns[order] = np.arange(1, len(order) + 1)
        return turns

    def ahead(self, turns: Ints, finish_seconds: float) -> Floats:
        """Return how many seconds before T each device must be here."""
        turn = min(self.turn_seconds, TURNS_SHARE * finish_seconds / max(len(turns), 1))
        return turns.astype(np.float64) * turn

    def quotas(self, turns: Ints, finish_seconds: float) -> Ints:
        """Return the most examples with which each is here in its turn; 0 if none.

        It never falls as T grows.
        """
        budget = finish_seconds - self.fixed - self.ahead(turns, finish_seconds)
        budget = np.minimum(np.maximum(budget, 0.0), self.longest) * (1 + 1e-12)
        full = self.base + self.size * self.each
        whole = np.minimum(np.floor(budget / full), self.most // self.size)
        left = budget - whole * full
        more = np.clip(np.floor((left - self.base) / self.each), 0, self.size - 1)
        quotas: Ints = np.minimum(whole * self.size + more, self.most).astype(np.int64)
        return quotas


def equal_finish(
    cohort: Cohort, *, target: int, finish_seconds: float | None
) -> tuple[Ints, float]:
    """Return each device's quota, 1 at least, and T: the sum is ``target`` if that can be.

    It is more where there are more devices than that, and less where the devices' own bounds, or a
    given finish, allow no more: then every device gets as much as it can have. No device that is
    not at its own bound could take another example by T, which is known to RESOLUTION.
    """
    turns = cohort.turns()
    least = np.ones_like(cohort.most)
    target = min(target, int(cohort.most.sum()))

    def at(finish: float) -> Ints:
        return np.maximum(cohort.quotas(turns, finish), least)

    if finish_seconds is not None:
        quotas = at(finish_seconds)
        if int(quotas.sum()) <= target:
            return quotas, finish_seconds
    # From below: one device that says it needs a century must not coarsen the search for all.
    low, few = 0.0, least
    high = float(cohort.finish(least).min())
    many = at(high)
    while int(many.sum()) < target:
        low, few = high, many
        high *= 2
        many = at(high)
    for _ in range(MOST_HALVINGS):
        if high - low <= RESOLUTION * high and int((many - few).max()) <= 1:
            break
        middle = (low + high) / 2
        tried = at(middle)
        if int(tried.sum()) >= target:
            high, many = middle, tried
        else:
            low, few = middle, tried
    surplus = max(int(many.sum()) - max(target, len(least)), 0)
    quotas = _without(surplus, many, many - few, cohort.finish(many) + cohort.ahead(turns, high))
    ends = cohort.finish(quotas) + cohort.ahead(turns, high)
    is_free = quotas > 1
    return quotas, float(ends[is_free].max()) if is_free.any() else high


def _without(surplus: int, quotas: Ints, most: Ints, ends: Floats) -> Ints:
    """Take ``surplus`` examples away from those who end last, at most ``most`` from each."""
    if not surplus:
        return quotas
    order = np.argsort(-ends, kind="stable")
    spare = most[order]
    before = np.cumsum(spare) - spare
    taken = np.empty_like(quotas)
    taken[order] = np.clip(surplus - before, 0, spare)
    return quotas - taken
