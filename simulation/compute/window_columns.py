"""The windows of many devices: what ``client.training.micro_batches.window`` gives of each, in columns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headwater.client.training.micro_batches import SHORT, Place, Window, orders, walk_seed, window
from headwater.simulation.fleet.devices import Called
from headwater.simulation.fleet.position_columns import NO_ROUND, Ints, Walks


def windows_of(called: Sequence[Called], walks: Walks, owned: Ints) -> list[Window]:
    """Return what each device trains on next; ``owned`` is how many examples each trains on.

    Short orders are drawn all at once; a long one is kept from round to round.
    """
    parts = np.array([one.part for one in called], dtype=np.int64)
    counted = np.array([one.plan.counted_round or NO_ROUND for one in called], dtype=np.int64)
    epochs, offsets = walks.settle(parts, counted)
    is_over = offsets >= owned  # a data set that shrank
    epochs, offsets = epochs + is_over, np.where(is_over, 0, offsets)
    is_short = owned <= SHORT
    names = [(one.plan.run_seed, one.name) for one in called]
    seeds = np.array([walk_seed(*name) for name in names], dtype=np.uint64)
    walked = orders(seeds[is_short], epochs[is_short], owned[is_short]).tolist()
    found, start = [], 0
    rows = zip(called, epochs.tolist(), offsets.tolist(), owned.tolist(), strict=True)
    for one, epoch, offset, number in rows:
        quota, most = one.plan.quota, one.plan.most_examples
        if number > SHORT:
            place = Place(epoch=epoch, offset=offset)
            found.append(
                window(
                    place,
                    quota=quota,
                    num_more=most - quota,
                    run_seed=one.plan.run_seed,
                    name=one.name,
                    num_examples=number,
                )
            )
            continue
        positions = tuple(walked[start + offset : start + min(offset + most, number)])
        ends_epoch = len(positions) < quota
        found.append(Window(positions=positions, epoch=epoch, offset=offset, ends_epoch=ends_epoch))
        start += number
    return found
