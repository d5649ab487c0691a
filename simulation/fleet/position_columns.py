"""Each simulated device's position in its examples: many ``SamplerState``s, as columns of numbers.

A column has an entry for each device, but uses memory only near those that have trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwater.client.training.sampler import SamplerPosition, SamplerState

Ints = NDArray[np.int64]

NO_ROUND = 0  # rounds are counted from 1


def ranges(starts: Ints, lengths: Ints) -> Ints:
    """Return start, start + 1, ... of each length, one range after another."""
    numbers: Ints = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    numbers += np.arange(len(numbers))
    return numbers


def starts_of(lengths: Ints) -> Ints:
    """Return where each of these lengths begins if they follow one another."""
    starts: Ints = np.cumsum(lengths) - lengths
    return starts


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlaceColumns:
    """The ``SamplerPosition``s of D devices.

    ``skipped`` has the ``num_skipped`` [D] places of each, one device after another.
    """

    epoch: Ints
    offset: Ints
    num_skipped: Ints
    skipped: Ints

    @staticmethod
    def of(places: Sequence[SamplerPosition]) -> PlaceColumns:
        """Return some positions as columns."""
        return PlaceColumns(
            epoch=np.array([place.epoch for place in places], dtype=np.int64),
            offset=np.array([place.offset for place in places], dtype=np.int64),
            num_skipped=np.array([len(place.skipped) for place in places], dtype=np.int64),
            skipped=np.array([at for place in places for at in place.skipped], dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.epoch)

    def __iter__(self) -> Iterator[SamplerPosition]:
        skipped = iter(self.skipped.tolist())
        columns = (self.epoch.tolist(), self.offset.tolist(), self.num_skipped.tolist())
        for epoch, offset, number in zip(*columns, strict=True):
            some = tuple(islice(skipped, number))
            yield SamplerPosition(epoch=epoch, offset=offset, skipped=some)

    def of_existing(self, num_examples: Ints) -> PlaceColumns:
        """Move to the next epoch where none is left, as ``SamplerPosition.of_existing`` does."""
        is_over = (self.offset >= num_examples) & (self.num_skipped == 0)
        if not is_over.any():
            return self
        return PlaceColumns(
            epoch=self.epoch + is_over,
            offset=np.where(is_over, 0, self.offset),
            num_skipped=self.num_skipped,
            skipped=self.skipped,
        )

    def some(self, at: Ints) -> PlaceColumns:
        """Return the positions of these devices."""
        number = self.num_skipped[at]
        return PlaceColumns(
            epoch=self.epoch[at],
            offset=self.offset[at],
            num_skipped=number,
            skipped=self.skipped[ranges(starts_of(self.num_skipped)[at], number)],
        )

    @staticmethod
    def joined(parts: Sequence[PlaceColumns]) -> PlaceColumns:
        """Return the positions of several sets of devices as one."""
        return PlaceColumns(
            epoch=np.concatenate([part.epoch for part in parts]),
            offset=np.concatenate([part.offset for part in parts]),
            num_skipped=np.concatenate([part.num_skipped for part in parts]),
            skipped=np.concatenate([part.skipped for part in parts]),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StateColumns:
    """The ``SamplerState``s of D devices, to be copied from one process to another."""

    pending_round: Ints
    settled_round: Ints
    place: PlaceColumns
    pending_place: PlaceColumns


class PositionColumns:
    """The positions of N devices; a device that has not trained is at its first example."""

    def __init__(self, num_devices: int) -> None:
        self._has_trained = np.zeros(num_devices, dtype=np.bool_)
        self._round = np.zeros(num_devices, dtype=np.int64)
        self._settled = np.full(num_devices, NO_ROUND, dtype=np.int64)
        # Of each device's position and of its pending one: epoch, offset, number of skipped places,
        # and where these begin among those of all devices, which follow in the order of writing.
        self._columns = np.zeros((2, 4, num_devices), dtype=np.int64)
        self._skipped: Ints = np.zeros(0, dtype=np.int64)
        self._num_written = 0

    def __getitem__(self, part: int) -> SamplerState:
        place, after = (
            SamplerPosition(
                epoch=epoch,
                offset=offset,
                skipped=tuple(self._skipped[start : start + number].tolist()) if number else (),
            )
            for epoch, offset, number, start in self._columns[:, :, part].tolist()
        )
        return SamplerState(
            place=place,
            pending_round=int(self._round[part]) or None,
            pending_place=after,
            settled_round=int(self._settled[part]) or None,
        )

    def __setitem__(self, part: int, state: SamplerState) -> None:
        self._has_trained[part] = True
        self._round[part] = state.pending_round or NO_ROUND
        self._settled[part] = state.settled_round or NO_ROUND
        for which, place in enumerate((state.place, state.pending_place)):
            skipped = place.skipped
            begin = self._append(np.array(skipped)) if skipped else 0
            self._columns[which, :, part] = place.epoch, place.offset, len(skipped), begin

    def states(self, parts: Ints) -> StateColumns:
        """Return all that is known of these devices' positions."""
        return StateColumns(
            pending_round=self._round[parts],
            settled_round=self._settled[parts],
            place=self._places(parts, np.zeros(len(parts), dtype=np.int64)),
            pending_place=self._places(parts, np.ones(len(parts), dtype=np.int64)),
        )

    def store(self, parts: Ints, states: StateColumns) -> None:
        """Store what ``states`` returned for these devices, here or in another process."""
        self._has_trained[parts] = True
        self._round[parts] = states.pending_round
        self._settled[parts] = states.settled_round
        self._store_places(parts, states.place, states.pending_place)

    def settle(self, parts: Ints, counted_rounds: Ints) -> PlaceColumns:
        """Return the devices' current positions, as ``SamplerState.settle`` does for one.

        ``counted_rounds`` is NO_ROUND for a device whose last round was not counted.
        """
        counted = (self._round[parts] == counted_rounds) & (counted_rounds != NO_ROUND)
        self._settled[parts[counted]] = counted_rounds[counted]
        return self._places(parts, counted.astype(np.int64))

    def set_pending(
        self, parts: Ints, places: PlaceColumns, number: int, after: PlaceColumns
    ) -> None:
        """Store the devices' positions, and those ``after`` the round ``number``.

        The devices move to ``after`` if the round counts.
        """
        self._has_trained[parts] = True
        self._round[parts] = number
        self._store_places(parts, places, after)

    def _store_places(self, parts: Ints, places: PlaceColumns, after: PlaceColumns) -> None:
        for which, stored in enumerate((places, after)):
            begin = self._append(stored.skipped)
            starts = begin + starts_of(stored.num_skipped)
            self._columns[which][:, parts] = (
                *(stored.epoch, stored.offset, stored.num_skipped),
                starts,
            )

    def to_plain(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield each device that has trained, with its state as ``client.flower`` saves it."""
        for part in np.flatnonzero(self._has_trained).tolist():
            state = self[part]
            yield (
                part,
                {
                    "place": _plain(state.place),
                    "pending_round": state.pending_round,
                    "pending_place": _plain(state.pending_place),
                    "settled_round": state.settled_round,
                    "pending_order": None,  # for a device's own budget, which no simulated one has
                },
            )

    def _places(self, parts: Ints, which: Ints) -> PlaceColumns:
        """Return each device's position (0) or its pending one (1)."""
        epoch, offset, num_skipped, start = self._columns[which, :, parts].T
        skipped = self._skipped[ranges(start, num_skipped)]
        return PlaceColumns(epoch=epoch, offset=offset, num_skipped=num_skipped, skipped=skipped)

    def _append(self, skipped: Ints) -> int:
        """Append places, and drop those of earlier rounds when the room is full; return where."""
        if self._num_written + len(skipped) > len(self._skipped):
            self._make_room(len(skipped))
        begin = self._num_written
        self._num_written += len(skipped)
        self._skipped[begin : self._num_written] = skipped
        return begin

    def _make_room(self, number: int) -> None:
        num_skipped, start = self._columns[:, 2], self._columns[:, 3]
        which, parts = np.nonzero(num_skipped)
        lengths = num_skipped[which, parts]
        current = self._skipped[ranges(start[which, parts], lengths)]
        start[which, parts] = starts_of(lengths)
        self._skipped = np.zeros(2 * (len(current) + number), dtype=np.int64)
        self._skipped[: len(current)] = current
        self._num_written = len(current)


def _plain(place: SamplerPosition) -> dict[str, Any]:
    plain: dict[str, Any] = {"epoch": place.epoch, "offset": place.offset}
    return {**plain, "skipped": place.skipped} if place.skipped else plain
