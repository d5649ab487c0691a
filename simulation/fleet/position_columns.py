"""Where each simulated device is in its examples: ``client.training.micro_batches.Walk`` in columns.

A column has an entry for each device, and takes memory only around those that have trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwater.client.training.micro_batches import Place, Walk

Ints = NDArray[np.int64]

NO_ROUND = 0  # rounds are counted from 1


class Walks:
    """The places of N devices; who has not trained is at its first example."""

    def __init__(self, num_devices: int) -> None:
        self._has_trained = np.zeros(num_devices, dtype=np.bool_)
        self._columns = np.zeros((5, num_devices), dtype=np.int64)
        self._epoch, self._offset, self._round, self._next_epoch, self._next_offset = self._columns

    def __getitem__(self, part: int) -> Walk:
        epoch, offset, number, next_epoch, next_offset = self._columns[:, part].tolist()
        return Walk(
            place=Place(epoch=epoch, offset=offset),
            pending_round=number or None,
            pending_place=Place(epoch=next_epoch, offset=next_offset),
        )

    def __setitem__(self, part: int, walk: Walk) -> None:
        place, pending = walk.place, walk.pending_place
        number = walk.pending_round or NO_ROUND
        self._has_trained[part] = True
        self._columns[:, part] = place.epoch, place.offset, number, pending.epoch, pending.offset

    def settle(self, parts: Ints, counted_rounds: Ints) -> tuple[Ints, Ints]:
        """Return the epochs and offsets at which devices are: see ``Walk.settle``.

        ``counted_rounds`` has NO_ROUND where none was counted.
        """
        counted = (self._round[parts] == counted_rounds) & (counted_rounds != NO_ROUND)
        epoch = np.where(counted, self._next_epoch[parts], self._epoch[parts])
        offset = np.where(counted, self._next_offset[parts], self._offset[parts])
        return epoch, offset

    def pend(self, parts: Ints, places: tuple[Ints, Ints], number: int, after: Ints) -> None:
        """Remember the places of devices, and where each goes on if a round counts.

        ``after`` [2, D] are those epochs and offsets.
        """
        self._has_trained[parts] = True
        self._columns[:2, parts] = places
        self._round[parts] = number
        self._columns[3:, parts] = after

    def plain(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield what ``client.flower.state_file.walk_of`` reads, for those that have trained."""
        parts = np.flatnonzero(self._has_trained)
        rows = zip(parts.tolist(), *self._columns[:, parts].tolist(), strict=True)
        for part, epoch, offset, number, next_epoch, next_offset in rows:
            yield (
                part,
                {
                    "place": {"epoch": epoch, "offset": offset},
                    "pending_round": number or None,
                    "pending_place": {"epoch": next_epoch, "offset": next_offset},
                },
            )
