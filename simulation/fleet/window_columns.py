"""The windows of many devices at once: the same examples as ``client.training.sampler`` for each.

The examples of D devices are one flat column, device after device, as are their permutations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headwater.client.training.sampler import (
    MAX_SHORT,
    permutation,
    permutations,
    sampler_seed,
)
from headwater.simulation.fleet.position_columns import Ints, PlaceColumns, ranges, starts_of


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Samplers:
    """The samplers of D devices: their names, the run's seed, and the examples that each owns."""

    names: Sequence[str]
    run_seed: int
    num_owned: Ints

    def some(self, at: Ints) -> Samplers:
        """Return the samplers of these devices."""
        names = [self.names[row] for row in at.tolist()]
        return Samplers(names=names, run_seed=self.run_seed, num_owned=self.num_owned[at])

    def orders(self, epoch: Ints) -> Ints:
        """Return each device's permutation of its ``epoch`` [D], one device after another.

        Short permutations are drawn all at once; a long one is cached from round to round.
        """
        owned = self.num_owned
        orders = np.empty(owned.sum(), dtype=np.int64)
        is_short = owned <= MAX_SHORT
        short, ends = np.flatnonzero(is_short), np.cumsum(owned)
        seeds = [sampler_seed(self.run_seed, self.names[row]) for row in short.tolist()]
        drawn = permutations(np.array(seeds, dtype=np.uint64), epoch[short], owned[short])
        orders[np.repeat(is_short, owned)] = drawn
        for row in np.flatnonzero(~is_short).tolist():
            number = int(owned[row])
            order = permutation(self.run_seed, int(epoch[row]), self.names[row], number)
            orders[ends[row] - number : ends[row]] = order
        return orders


def window_positions(samplers: Samplers, places: PlaceColumns, lengths: Ints) -> Ints:
    """Return the first ``lengths`` [D] examples of the devices' windows from ``places``."""
    return _windows(samplers, places, lengths)[0]


def places_after(samplers: Samplers, places: PlaceColumns, num_used: Ints) -> PlaceColumns:
    """Return the places after ``num_used`` [D] examples of the devices' windows from ``places``.

    Only devices that go on into their next epoch need their permutations.
    """
    after = _after_rest(samplers, places, num_used)
    at = np.flatnonzero(num_used > _num_left(samplers, places))
    if not len(at):
        return after
    _, crossed = _windows(samplers.some(at), places.some(at), num_used[at])
    return _replaced(after, at, crossed)


def _windows(samplers: Samplers, places: PlaceColumns, lengths: Ints) -> tuple[Ints, PlaceColumns]:
    """Take a pass over the data after another, until all windows have their lengths."""
    positions = np.empty(lengths.sum(), dtype=np.int64)
    starts, lengths = starts_of(lengths), lengths.copy()
    while True:
        numbers = np.minimum(lengths, samplers.num_owned)
        positions[ranges(starts, numbers)], places = _pass(samplers, places, numbers)
        starts += numbers
        lengths -= numbers
        if not lengths.any():
            return positions, places


def _num_left(samplers: Samplers, places: PlaceColumns) -> Ints:
    """Return how many examples each device's epoch has left."""
    num_left: Ints = places.num_skipped + samplers.num_owned - places.offset
    return num_left


def _after_rest(samplers: Samplers, places: PlaceColumns, numbers: Ints) -> PlaceColumns:
    """Return the places after so many examples; the next epoch's start if it has no more."""
    is_over = numbers >= _num_left(samplers, places)
    from_skipped = np.where(is_over, places.num_skipped, np.minimum(numbers, places.num_skipped))
    num_skipped = places.num_skipped - from_skipped
    starts = starts_of(places.num_skipped)
    return PlaceColumns(
        epoch=places.epoch + is_over,
        offset=np.where(is_over, 0, places.offset + numbers - from_skipped),
        num_skipped=num_skipped,
        skipped=places.skipped[ranges(starts + from_skipped, num_skipped)],
    )


def _pass(samplers: Samplers, places: PlaceColumns, numbers: Ints) -> tuple[Ints, PlaceColumns]:
    """Take at most all examples of each device, none twice; return them and the places after."""
    owned = samplers.num_owned
    orders, order_starts = samplers.orders(places.epoch), starts_of(owned)
    from_skipped = np.minimum(numbers, places.num_skipped)
    from_rest = np.minimum(numbers - from_skipped, owned - places.offset)
    num_here = from_skipped + from_rest
    positions, starts = np.empty(numbers.sum(), dtype=np.int64), starts_of(numbers)
    if len(places.skipped):
        skipped = places.skipped[ranges(starts_of(places.num_skipped), from_skipped)]
        skipped += np.repeat(order_starts, from_skipped)
        positions[ranges(starts, from_skipped)] = orders[skipped]
    rest = ranges(order_starts + places.offset, from_rest)
    positions[ranges(starts + from_skipped, from_rest)] = orders[rest]
    after = _after_rest(samplers, places, numbers)
    at = np.flatnonzero(numbers > num_here)
    if not len(at):
        return positions, after
    had = positions[ranges(starts[at], num_here[at])]
    more = (numbers - num_here)[at]
    beyond, crossed = _next_epoch(samplers.some(at), after.epoch[at], had, num_here[at], more)
    positions[ranges((starts + num_here)[at], more)] = beyond
    return positions, _replaced(after, at, crossed)


def _next_epoch(
    samplers: Samplers, epoch: Ints, had: Ints, num_had: Ints, numbers: Ints
) -> tuple[Ints, PlaceColumns]:
    """Take the first ``numbers`` [D] examples of an epoch that are not among those a window has.

    ``had`` are the ``num_had`` [D] examples of each device's window, one device after another.
    """
    owned = samplers.num_owned
    orders, starts = samplers.orders(epoch), starts_of(owned)
    is_new = np.ones(len(orders), dtype=np.bool_)
    is_new[np.repeat(starts, num_had) + had] = False
    is_new = is_new[np.repeat(starts, owned) + orders]  # from examples to places in the order
    counts = np.cumsum(is_new)
    counts -= np.repeat(counts[starts] - is_new[starts], owned)
    wanted = np.repeat(numbers, owned)
    is_taken = is_new & (counts <= wanted)
    is_skipped = ~is_new & (counts < wanted)
    last = np.flatnonzero(is_taken)[np.cumsum(numbers) - 1]
    num_skipped = np.add.reduceat(is_skipped, starts, dtype=np.int64)
    skipped = np.flatnonzero(is_skipped) - np.repeat(starts, num_skipped)
    after = PlaceColumns(
        epoch=epoch, offset=last + 1 - starts, num_skipped=num_skipped, skipped=skipped
    )
    return orders[is_taken], after


def _replaced(places: PlaceColumns, at: Ints, others: PlaceColumns) -> PlaceColumns:
    """Return the places with those ``at`` some devices replaced by others."""
    both = PlaceColumns.joined([places, others])
    rows = np.arange(len(places))
    rows[at] = len(places) + np.arange(len(at))
    return both.some(rows)
