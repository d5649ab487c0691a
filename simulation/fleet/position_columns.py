"""Each simulated device's position in its examples: many ``SamplerState``s, as columns of numbers.

A column has an entry for each device, but uses memory only near those that have trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwater.client.training.sampler import SamplerPosition, SamplerState

Ints = NDArray[np.int64]

NO_ROUND = 0  # rounds are counted from 1


class PositionColumns:
    """The positions of N devices; a device that has not trained is at its first example."""

    def __init__(self, num_devices: int) -> None:
        self._has_trained = np.zeros(num_devices, dtype=np.bool_)
        self._columns = np.zeros((5, num_devices), dtype=np.int64)
        self._epoch, self._offset, self._round, self._next_epoch, self._next_offset = self._columns

    def __getitem__(self, part: int) -> SamplerState:
        epoch, offset, number, next_epoch, next_offset = self._columns[:, part].tolist()
        return SamplerState(
            place=SamplerPosition(epoch=epoch, offset=offset),
            pending_round=number or None,
            pending_place=SamplerPosition(epoch=next_epoch, offset=next_offset),
        )

    def __setitem__(self, part: int, state: SamplerState) -> None:
        place, pending = state.place, state.pending_place
        number = state.pending_round or NO_ROUND
        self._has_trained[part] = True
        self._columns[:, part] = place.epoch, place.offset, number, pending.epoch, pending.offset

    def settle(self, parts: Ints, counted_rounds: Ints) -> tuple[Ints, Ints]:
        """Return the devices' current epochs and offsets, as ``SamplerState.settle`` does for one.

        ``counted_rounds`` is NO_ROUND for a device whose last round was not counted.
        """
        counted = (self._round[parts] == counted_rounds) & (counted_rounds != NO_ROUND)
        epoch = np.where(counted, self._next_epoch[parts], self._epoch[parts])
        offset = np.where(counted, self._next_offset[parts], self._offset[parts])
        return epoch, offset

    def set_pending(
        self, parts: Ints, positions: tuple[Ints, Ints], number: int, after: Ints
    ) -> None:
        """Store the devices' epochs and offsets, and those ``after`` [2, D] the round ``number``.

        The devices move to ``after`` if the round counts.
        """
        self._has_trained[parts] = True
        self._columns[:2, parts] = positions
        self._round[parts] = number
        self._columns[3:, parts] = after

    def to_plain(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield each device that has trained, with its state as ``client.flower`` saves it."""
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
