"""Carries a device's position in its examples over to data that have changed.

An example that was used in the current epoch stays used, whatever its number is now. The order of
the epoch is the permutation of the new number of examples, so the used ones lie anywhere in it:
the new position is behind the last of them, and the others before it are skipped places.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headwater.client.growing_data.known_examples import KnownExamples
from headwater.client.training.sampler import SamplerPosition, permutation


@dataclass(frozen=True, kw_only=True, slots=True)
class DataChange:
    """The examples that joined a device's data, and those that left."""

    num_joined: int
    num_left: int


def change_between(before: KnownExamples, after: KnownExamples) -> DataChange:
    """Count the examples that joined and left."""
    num_stayed = int((before.numbers_in(after) >= 0).sum())
    return DataChange(num_joined=after.number - num_stayed, num_left=before.number - num_stayed)


def moved(
    place: SamplerPosition,
    before: KnownExamples,
    after: KnownExamples,
    *,
    run_seed: int,
    name: str,
) -> SamplerPosition:
    """Return the position in the data ``after`` that follows the same examples as ``place``.

    New examples wait for the end of the epoch in which the device began to use ``before``, once it
    has used any in it; in a later epoch they are used from now on.
    """
    place = place.of_existing(before.number)
    numbers = before.numbers_in(after)
    is_used = np.zeros(after.number, dtype=np.bool_)
    has_begun = place.num_left(before.number) < before.number
    if has_begun and place.epoch == before.epoch:
        is_used[:] = True
        is_used[numbers[numbers >= 0]] = False
    order = permutation(run_seed, place.epoch, name, before.number)
    passed = np.ones(place.offset, dtype=np.bool_)
    passed[list(place.skipped)] = False
    used = numbers[order[: place.offset][passed]]
    is_used[used[used >= 0]] = True
    is_used = is_used[permutation(run_seed, place.epoch, name, after.number)]
    places = np.flatnonzero(is_used)
    offset = int(places[-1]) + 1 if len(places) else 0
    skipped = tuple(np.flatnonzero(~is_used[:offset]).tolist())
    found = SamplerPosition(epoch=place.epoch, offset=offset, skipped=skipped)
    return found.of_existing(after.number)
